"""A gateway whose replies a test scripts, for faults that a healthy one never shows: cuts, garbage, refusals."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from libdsec.client import AsyncClient
from libdsec.wire import CreateReply, ExecReply, ExecRequest, SandboxInfo

from nomad_dsec.httpd import Running, listen_tcp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SANDBOX = "sb-n1-abcdefghijklmnop"


def info(sandbox: str = SANDBOX, **fields: Any) -> SandboxInfo:
    """A running sandbox."""
    known: dict[str, Any] = {"node": "n1", "namespace": "default", "backend": "container", "image": "i", "digest": "d"}
    return SandboxInfo(id=sandbox, state="running", created_at=time.time(), **(known | fields))


def json(value: Any, status: int = 200) -> web.Response:
    """A JSON reply."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def refusal(kind: str, code: str, status: int, **more: Any) -> web.Response:
    """An error of ours."""
    return json({"error": {"kind": kind, "code": code, "message": code.replace("_", " "), **more}}, status)


def cut(request: web.Request) -> None:
    """End the connection as a killed server does."""
    assert request.transport is not None
    request.transport.abort()


def frame(stream: int, offset: int, data: bytes) -> bytes:
    """An output message of a stream."""
    return bytes([stream]) + offset.to_bytes(8, "big") + data


class ScriptedGateway:
    """Runs handlers queued per `METHOD path-suffix`, in order; the last one stays."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.bodies: dict[str, list[bytes]] = defaultdict(list)
        self._script: dict[str, deque[Handler]] = defaultdict(deque)
        self.address = ""

    def on(self, what: str, *handlers: Handler) -> None:
        """Script the replies to `GET /suffix`."""
        self._script[what].extend(handlers)

    def count(self, what: str) -> int:
        """How often it was called."""
        method, _, suffix = what.partition(" ")
        return sum(1 for seen, path in self.calls if seen == method and path.endswith(suffix))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Route to the script."""
        self.calls.append((request.method, request.path))
        for what, queue in self._script.items():
            method, _, suffix = what.partition(" ")
            if request.method == method and request.path.endswith(suffix) and queue:
                handler = queue.popleft() if len(queue) > 1 else queue[0]
                return await handler(request)
        if request.method == "POST" and request.path == "/v1/sandboxes":
            return json(CreateReply(sandboxes=[info()]))
        if request.method == "DELETE":
            return json(SandboxInfo(**_ended()))
        return refusal("not_found", "no_script", 404)


def _ended() -> dict[str, Any]:
    return {
        "id": SANDBOX,
        "node": "n1",
        "namespace": "default",
        "backend": "container",
        "image": "i",
        "digest": "d",
        "state": "exited",
        "reason": "killed",
    }


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[ScriptedGateway, AsyncClient]]:
    """A scripted gateway on loopback, and a client of it that gives up after 3 s."""
    gateway = ScriptedGateway()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{tail:.*}", gateway.handle)
    running: Running = await listen_tcp(app, "127.0.0.1", 0, shutdown_s=0.2)
    gateway.address = running.address
    try:
        async with AsyncClient(running.address, "key", reconnect_s=3.0) as client:
            yield gateway, client
    finally:
        await running.close(timeout_s=0.2)


async def replying(value: Any) -> web.Response:
    """A coroutine form of `json` for lambdas."""
    return json(value)


def always(value: Any, status: int = 200) -> Handler:
    """A handler that gives the same JSON."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        return json(value, status)

    return handler


def cutting(*, after_read: bool = True) -> Handler:
    """A handler that cuts the connection, having read the request or not."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if after_read:
            await request.read()
        cut(request)
        await asyncio.sleep(0)
        return web.Response()

    return handler


def executing(ran: dict[str, int]) -> Handler:
    """Replies to an exec as a node does: an exec_id runs once."""

    async def handler(request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=ExecRequest)
        ran[asked.exec_id] = ran.get(asked.exec_id, 0) + 1
        return json(ExecReply(exec_id=asked.exec_id, exit_code=0, stdout=b"done\n", duration_s=0.01))

    return handler
