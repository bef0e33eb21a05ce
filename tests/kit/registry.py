"""A registry (distribution API v2, pull only) and a Docker engine (save only) on loopback, with faults on demand."""

from __future__ import annotations

import json
import socketserver
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Registry:
    """Serves one OCI layout as ``name:tag`` for every name. `faults`: digest -> what goes wrong, a request each."""

    def __init__(self, layout: Path) -> None:
        self.layout = layout
        self.faults: dict[str, list[str]] = {}
        self.requests: list[str] = []
        self.authorization = ""
        self.address = ""

    def blob(self, digest: str) -> bytes:
        """The stored bytes."""
        return (self.layout / "blobs" / digest.replace(":", "/")).read_bytes()

    def manifest(self, reference: str) -> tuple[str, bytes]:
        """Media type and bytes of a manifest by tag or digest."""
        rows = json.loads((self.layout / "index.json").read_text())["manifests"]
        (row,) = [
            r for r in rows
            if r["digest"] == reference
            or (r.get("annotations") or {}).get("org.opencontainers.image.ref.name") == reference
        ]  # fmt: skip
        return row["mediaType"], self.blob(row["digest"])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: Registry

    def log_message(self, *_args: Any) -> None:
        """Quiet."""

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("length", str(len(body))))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        registry = self.registry
        registry.requests.append(self.path)
        if registry.authorization and self.headers.get("Authorization") != registry.authorization:
            return self.reply(401, WWW_Authenticate='Basic realm="test"')
        parts = self.path.strip("/").split("/")
        if parts == ["v2"]:
            return self.reply(200)
        reference = parts[-1]
        fault = registry.faults.get(reference, [])
        wrong = fault.pop(0) if fault else ""
        if wrong == "429":
            return self.reply(429, Retry_After="0")
        if wrong == "500":
            return self.reply(500)
        if parts[-2] == "manifests":
            try:
                kind, body = registry.manifest(reference)
            except ValueError:
                return self.reply(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}')
            return self.reply(200, body, Content_Type=kind)
        body = registry.blob(reference)
        if wrong == "redirect":
            return self.reply(307, Location=self.path)
        if wrong == "short":
            self.reply(200, body[: len(body) // 2], length=str(len(body)))
            self.close_connection = True
            return None
        if wrong == "corrupt":
            body = bytes([body[0] ^ 0xFF]) + body[1:]
        return self.reply(200, body)


@contextmanager
def serve_registry(layout: Path) -> Iterator[Registry]:
    """A registry on a loopback port."""
    registry = Registry(layout)
    handler = type("Handler", (_Handler,), {"registry": registry})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    registry.address = f"127.0.0.1:{server.server_address[1]}"
    with _running(server):
        yield registry


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@contextmanager
def serve_engine(socket: Path, images: dict[str, bytes]) -> Iterator[None]:
    """The two calls of a Docker engine that saving an image takes, for the real docker SDK."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_args: Any) -> None:
            """Quiet."""

        def address_string(self) -> str:
            return "unix"

        def reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", kind)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path.endswith(("/version", "/_ping")):
                return self.reply(200, json.dumps({"ApiVersion": "1.43", "MinAPIVersion": "1.24"}).encode())
            name = self.path.partition("/images/")[2].rpartition("/")[0]
            if name not in images:
                return self.reply(404, b'{"message":"No such image"}')
            if self.path.endswith("/json"):
                return self.reply(200, json.dumps({"Id": "sha256:" + "1" * 64, "Size": 1, "RepoTags": [name]}).encode())
            return self.reply(200, images[name], "application/x-tar")

    images = images | {"sha256:" + "1" * 64: next(iter(images.values()), b"")}
    with _running(_UnixServer(str(socket), Handler)):
        yield


@contextmanager
def _running(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
