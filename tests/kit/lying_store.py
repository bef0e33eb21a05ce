"""A registry on loopback that misbehaves on demand: each request takes the next fault of a list, or is served well."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Fault = Callable[["Handler", bytes, int, int], None]  # the object, and the range asked for


@dataclass
class LyingStore:
    """`token`: what a request needs when set. `tokens`: what the realm hands out, one after another."""

    objects: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    faults: deque[Fault] = field(default_factory=deque)
    every: Fault | None = None
    token: str = ""
    tokens: deque[str] = field(default_factory=deque)
    challenge: str = ""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    uploads: dict[str, bytearray] = field(default_factory=dict)
    address: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def add(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.objects[digest] = data
        return digest

    @property
    def url(self) -> str:
        return f"oci://{self.address}/some/repo"

    def seen(self, kind: str = "/blobs/") -> list[tuple[str, str, dict[str, str]]]:
        return [row for row in self.requests if kind in row[1]]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    lying: LyingStore

    def log_message(self, *_args: Any) -> None:
        """Quiet."""

    def reply(self, status: int, body: bytes = b"", **headers: Any) -> None:
        """Send headers as they are given; `Content_Length` defaults to the truth, None leaves it out."""
        self.send_response(status)
        length = headers.pop("Content_Length", len(body))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), str(value))
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def serve(self, data: bytes, start: int, end: int) -> None:
        """A right answer to a request for bytes start..end, both included."""
        if "Range" not in self.headers:
            return self.reply(200, data)
        if start >= len(data):
            return self.reply(416, b"no", Content_Length=len(data))  # the lie distribution tells
        end = min(end, len(data) - 1)
        return self.reply(206, data[start : end + 1], Content_Range=f"bytes {start}-{end}/{len(data)}")

    def drip(self, data: bytes, pause_s: float) -> None:
        """A byte at a time, until the test is over."""
        for at in range(len(data)):
            if self.lying.over.wait(pause_s):
                return
            self.wfile.write(data[at : at + 1])
            self.wfile.flush()

    def hang_up(self) -> None:
        """Reset the connection."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def refuse(self, status: int = 401) -> None:
        realm = f'Bearer realm="http://{self.lying.address}/token",service="lying",scope="repository:some/repo:pull"'
        self.reply(
            status, b'{"errors": []}', **({"WWW_Authenticate": self.lying.challenge or realm} if status == 401 else {})
        )

    def do_GET(self) -> None:
        lying = self.lying
        lying.requests.append((self.command, self.path, dict(self.headers)))
        if self.path.startswith("/token"):
            token = lying.tokens.popleft() if lying.tokens else lying.token
            return self.reply(200, json.dumps({"token": token}).encode())
        if lying.token and self.headers.get("Authorization") != f"Bearer {lying.token}":
            return self.refuse()
        digest = urlsplit(self.path).path.rpartition("sha256:")[2]
        data = lying.objects.get(digest, b"")
        first, _, last = self.headers.get("Range", "bytes=0-0").removeprefix("bytes=").partition("-")
        fault = lying.faults.popleft() if lying.faults else lying.every
        if fault is not None:
            return fault(self, data, int(first), int(last))
        if self.path.startswith("/elsewhere/"):
            return self.serve(lying.objects[urlsplit(self.path).path.split("/")[2]], int(first), int(last))
        if "/manifests/" in self.path:
            tag = self.path.rpartition("/")[2]
            return self.reply(200, lying.manifests[tag]) if tag in lying.manifests else self.reply(404)
        if digest not in lying.objects:
            return self.reply(404, b"{}")
        return self.serve(data, int(first), int(last))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.lying.requests.append((self.command, self.path, dict(self.headers)))
        self.body()
        if self.lying.faults:
            return self.lying.faults.popleft()(self, b"", 0, 0)
        name = str(len(self.lying.uploads))
        self.lying.uploads[name] = bytearray()
        return self.reply(202, Location=f"/v2/some/repo/blobs/uploads/{name}?_state=x")

    def do_PATCH(self) -> None:
        self.lying.requests.append((self.command, self.path, dict(self.headers)))
        if self.lying.faults:
            return self.lying.faults.popleft()(self, b"", 0, 0)
        upload = self.lying.uploads[urlsplit(self.path).path.rpartition("/")[2]]
        start = int(self.headers["Content-Range"].partition("-")[0])
        if start != len(upload):
            self.body()
            return self.reply(416)
        upload += self.body()
        return self.reply(202, Location=self.path, Range=f"0-{len(upload) - 1}")

    def do_PUT(self) -> None:
        self.lying.requests.append((self.command, self.path, dict(self.headers)))
        if self.lying.faults:
            return self.lying.faults.popleft()(self, b"", 0, 0)
        parts = urlsplit(self.path)
        if "/manifests/" in parts.path:
            self.lying.manifests[parts.path.rpartition("/")[2]] = self.body()
            return self.reply(201)
        data = bytes(self.lying.uploads.get(parts.path.rpartition("/")[2], b"")) + self.body()
        digest = parse_qs(parts.query).get("digest", [""])[0].removeprefix("sha256:")
        if hashlib.sha256(data).hexdigest() != digest:
            return self.reply(400)
        self.lying.objects[digest] = data
        return self.reply(201)

    def do_DELETE(self) -> None:
        self.lying.requests.append((self.command, self.path, dict(self.headers)))
        self.reply(204)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_args: Any) -> None:
        """Clients of liars hang up."""


@contextmanager
def lying_store() -> Iterator[LyingStore]:
    """A server on a loopback port, with nothing in it."""
    lying = LyingStore()
    server = _Server(("127.0.0.1", 0), type("Bound", (Handler,), {"lying": lying}))
    lying.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield lying
    finally:
        lying.over.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


# --- faults


def status(code: int, **headers: str) -> Fault:
    """An empty answer of this status."""
    return lambda handler, data, start, end: handler.reply(code, **headers)


def short_body(handler: Handler, data: bytes, start: int, end: int) -> None:
    """Fewer bytes than announced, then the end of the connection."""
    body = data[start : end + 1]
    handler.reply(
        206, body[: len(body) // 2], Content_Length=len(body), Content_Range=f"bytes {start}-{end}/{len(data)}"
    )
    handler.close_connection = True


def short_range(handler: Handler, data: bytes, start: int, end: int) -> None:
    """Less than asked for, said openly."""
    end -= 1
    handler.reply(206, data[start : end + 1], Content_Range=f"bytes {start}-{end}/{len(data)}")


def long_body(handler: Handler, data: bytes, start: int, end: int) -> None:
    """More than announced by the range, without a length."""
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(data[start : end + 1] + b"and more")
    handler.close_connection = True


def wrong_bytes(handler: Handler, data: bytes, start: int, end: int) -> None:
    """One bit is wrong."""
    handler.serve(data[:start] + bytes([data[start] ^ 1]) + data[start + 1 :], start, end)


def shifted_range(handler: Handler, data: bytes, start: int, end: int) -> None:
    """Another range than was asked for."""
    handler.reply(206, data[: end - start + 1], Content_Range=f"bytes 0-{end - start}/{len(data)}")


def no_content_range(handler: Handler, data: bytes, start: int, end: int) -> None:
    """A 206 that does not say of what."""
    handler.reply(206, data[start : end + 1])


def whole_object(handler: Handler, data: bytes, start: int, end: int) -> None:
    """200 with everything."""
    handler.reply(200, data)


def endless(handler: Handler, data: bytes, start: int, end: int) -> None:
    """200 with a body that does not end."""
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.close_connection = True
    while not handler.lying.over.is_set():
        handler.wfile.write(bytes(1 << 16))


def reset(handler: Handler, data: bytes, start: int, end: int) -> None:
    """Half a body, then a reset."""
    handler.reply(
        206, data[start : start + 10], Content_Length=end - start + 1, Content_Range=f"bytes {start}-{end}/{len(data)}"
    )
    handler.wfile.flush()
    handler.hang_up()


def encoded(handler: Handler, data: bytes, start: int, end: int) -> None:
    """Compressed, though only identity was asked for."""
    handler.reply(206, data[start : end + 1], Content_Range=f"bytes {start}-{end}/{len(data)}", Content_Encoding="gzip")


def dripping_body(handler: Handler, data: bytes, start: int, end: int) -> None:
    """A byte each 50 ms."""
    handler.send_response(206)
    handler.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
    handler.send_header("Content-Length", str(end - start + 1))
    handler.end_headers()
    handler.close_connection = True
    handler.drip(data[start : end + 1], 0.05)


def dripping_headers(handler: Handler, data: bytes, start: int, end: int) -> None:
    """A header that goes on and on."""
    handler.close_connection = True
    handler.wfile.write(b"HTTP/1.1 206 OK\r\nX-Slow: ")
    handler.drip(b"x" * 60_000, 0.05)


def silent(handler: Handler, data: bytes, start: int, end: int) -> None:
    """No answer at all."""
    handler.close_connection = True
    handler.lying.over.wait(60)


def redirect(location: str, code: int = 307) -> Fault:
    """To another place."""
    return lambda handler, data, start, end: handler.reply(code, Location=location)


def monotonic_in(seconds: float) -> float:
    """A deadline."""
    return time.monotonic() + seconds
