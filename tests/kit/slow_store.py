"""A registry on loopback, in a process of its own, that serves a directory store as slowly as it is told: for benches.

Pull only. `with slow_store(root, latency_ms=2, mib_s=200) as slow:` gives `slow.url` for `parse_store` and
`slow.traffic()`, what went over the line so far.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_imagefs.stores import artifact
from dsec_imagefs.stores.slow import Link

from tests.kit.store_servers import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 128 << 10  # how finely concurrent answers share the line


@dataclass
class Traffic:
    """Requests and bytes of bodies that were sent."""

    requests: int = 0
    sent_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, sent_bytes: int) -> None:
        with self.lock:
            self.requests += 1
            self.sent_bytes += sent_bytes


class Handler(BaseHTTPRequestHandler):
    """The part of the distribution API that reading takes."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    root: Path
    latency_s: float
    link: Link
    traffic: Traffic

    def log_message(self, *_args: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        place, _, name = self.path.partition("?")[0].rpartition("/")
        if name == "traffic":
            counts = {"requests": self.traffic.requests, "sent_bytes": self.traffic.sent_bytes}
            return self.document(json.dumps(counts).encode(), counted=False)
        time.sleep(self.latency_s)
        if name == "v2" or self.path == "/v2/":
            return self.document(b"{}", counted=False)
        if place.endswith("/blobs"):
            return self.blob(name.removeprefix("sha256:"))
        try:
            image = (
                name.removeprefix("image-") if name.startswith("image-") else self.read("refs", name).decode().strip()
            )
            return self.document(artifact.render_image(image, self.read("images", image), []))
        except FileNotFoundError:
            return self.nothing()

    def blob(self, digest: str) -> None:
        path = self.root / "objects" / digest[:2] / digest
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return self.manifest_blob(digest)
        try:
            self.send_file(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        return None

    def send_file(self, fd: int, size: int) -> None:
        first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        start, end = (int(first), min(int(last), size - 1)) if first else (0, size - 1)
        if start >= size and size:
            return self.nothing(416)
        length = end - start + 1
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return None
        self.traffic.add(length)
        while length:
            count = min(PIECE_BYTES, length)
            self.link.pass_bytes(count, time.monotonic() + 600, "slow store")
            sent = 0
            while sent < count:
                sent += os.sendfile(self.connection.fileno(), fd, start + sent, count - sent)
            start, length = start + count, length - count
        return None

    def manifest_blob(self, digest: str) -> None:
        """An image's manifest by its own digest: the directory has it by the image's."""
        for path in (self.root / "images").glob("*"):
            raw = path.read_bytes()
            if hashlib.sha256(raw).hexdigest() == digest:
                fd = os.open(path, os.O_RDONLY)
                try:
                    return self.send_file(fd, len(raw))
                finally:
                    os.close(fd)
        return self.nothing()

    def read(self, place: str, name: str) -> bytes:
        return (self.root / place / Path(name).name).read_bytes()

    def document(self, body: bytes, *, counted: bool = True) -> None:
        if counted:
            self.traffic.add(len(body))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def nothing(self, status: int = 404) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


@dataclass(frozen=True)
class SlowStoreServer:
    """The running server."""

    address: str

    @property
    def url(self) -> str:
        return f"oci://{self.address}/bench/images"

    def traffic(self) -> dict[str, int]:
        """``{"requests": …, "sent_bytes": …}`` so far."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{self.address}/traffic", timeout=10) as reply:
            return json.load(reply)


@contextmanager
def slow_store(root: Path, *, latency_ms: float = 0.0, mib_s: float = 0.0) -> Iterator[SlowStoreServer]:
    """Serve what `DirectoryStore(root)` holds; `mib_s` 0 is no bound."""
    server = SlowStoreServer(f"127.0.0.1:{free_port()}")
    argv = [sys.executable, "-m", "tests.kit.slow_store", str(root), server.address, str(latency_ms), str(mib_s)]
    child = subprocess.Popen(argv, cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                server.traffic()
                break
            except OSError:
                assert child.poll() is None, f"the slow store ended with {child.returncode}"
                assert time.monotonic() < deadline, "the slow store did not come up"
                time.sleep(0.05)
        yield server
    finally:
        child.kill()
        child.wait(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("address")
    parser.add_argument("latency_ms", type=float)
    parser.add_argument("mib_s", type=float)
    chosen = parser.parse_args()
    host, _, port = chosen.address.partition(":")
    facts = {
        "root": chosen.root, "latency_s": chosen.latency_ms / 1000, "traffic": Traffic(),
        "link": Link(bytes_per_s=chosen.mib_s * (1 << 20)),
    }  # fmt: skip
    _Server((host, int(port)), type("Bound", (Handler,), facts)).serve_forever()


if __name__ == "__main__":
    main()
