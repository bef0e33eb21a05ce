"""A node daemon in memory, over real HTTP: for gateway tests that need nodes which are slow, cut, refuse or lie.

It keeps the node contract (creates idempotent by id, all or nothing, undone when the asker goes away) unless a test
replaces a handler in `script`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import WSMsgType, web
from libdsec import wire
from libdsec.errors import CapacityError, DsecError, NotFoundError

from nomad_dsec.gateway.endpoints import Endpoint
from nomad_dsec.httpd import Running, error_middleware, json_reply, listen_tcp, read_body, read_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

TOKEN = "node-token"
IMAGE = "debian:12"
DIGEST = "sha256:" + "d" * 64


def cut(request: web.Request) -> None:
    """End the connection as a killed daemon does."""
    assert request.transport is not None
    request.transport.abort()


class FakeNode:
    """`async with FakeNode("n1") as node`; `script["POST /v1/sandboxes"] = handler` replaces one route."""

    def __init__(self, node: str = "n1", **capacity: Any) -> None:
        self.id = node
        self.capacity = {
            "cpus_total": 64.0,
            "memory_mib_total": 65536,
            "sandboxes_max": 1000,
            "starting_max": 16,
            "disk_mib_free": 1_000_000,
        } | capacity
        self.draining = False
        self.images = [wire.ImageInfo(digest=DIGEST, names=[IMAGE], created_at=1.0)]
        self.offers = [wire.BackendFingerprint(name="container", available=True, features=["pause"])]
        self.sandboxes: dict[str, wire.SandboxInfo] = {}
        self.files: dict[str, bytes] = {}
        self.script: dict[str, Handler] = {}
        self.calls: Counter[str] = Counter()
        self.refuse: DsecError | None = None
        self.create_s = 0.0
        self.asked: list[wire.NodeCreateRequest] = []
        self.made = 0
        self._port = 0
        self._running: Running | None = None

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(url=f"http://127.0.0.1:{self._port}", token=TOKEN)

    @property
    def live(self) -> dict[str, wire.SandboxInfo]:
        return {name: info for name, info in self.sandboxes.items() if info.state in wire.LIVE_STATES}

    async def __aenter__(self) -> FakeNode:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the same port when started before."""
        app = web.Application(middlewares=[error_middleware, self._scripted], client_max_size=0)
        app.router.add_get("/v1/node", self._node)
        app.router.add_get("/v1/images", self._images)
        app.router.add_post("/v1/node/drain", self._drain)
        app.router.add_post("/v1/sandboxes", self._create)
        app.router.add_get("/v1/sandboxes", self._list)
        app.router.add_get("/v1/sandboxes/{id}", self._info)
        app.router.add_delete("/v1/sandboxes/{id}", self._kill)
        app.router.add_put("/v1/sandboxes/{id}/lease", self._info)
        app.router.add_post("/v1/sandboxes/{id}/execs", self._exec)
        app.router.add_get("/v1/sandboxes/{id}/execs/stream", self._stream)
        app.router.add_get("/v1/sandboxes/{id}/files", self._read)
        app.router.add_put("/v1/sandboxes/{id}/files", self._write)
        self.routes(app)
        self._running = await listen_tcp(app, "127.0.0.1", self._port, shutdown_s=0.0)
        self._port = int(self._running.address.rpartition(":")[2])

    def routes(self, app: web.Application) -> None:
        """More routes, for subclasses."""

    async def stop(self) -> None:
        """Die: cut everything; the sandboxes stay, as they do on a real node."""
        if self._running is not None:
            await self._running.close(timeout_s=1.0)
            self._running = None

    @web.middleware
    async def _scripted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401)
        resource = request.match_info.route.resource  # None: there is no such route, which aiohttp says itself
        route = f"{request.method} {resource.canonical if resource else ''}"
        self.calls[route] += 1
        return await self.script.get(route, handler)(request)

    def info(self) -> wire.NodeInfo:
        live = self.live.values()
        used = {
            "cpus_used": sum(info.cpus for info in live),
            "memory_mib_used": sum(info.memory_mib for info in live),
            "sandboxes": len(live),
        }
        return wire.NodeInfo(
            node=self.id,
            version="fake",
            draining=self.draining,
            boot_id="boot",
            backends=self.offers,
            capacity=wire.NodeCapacity(**(self.capacity | used)),
            images=[image.digest for image in self.images],
            counts=dict(Counter(info.state for info in self.sandboxes.values())),
        )

    async def _node(self, request: web.Request) -> web.Response:
        return json_reply(self.info())

    async def _images(self, request: web.Request) -> web.Response:
        return json_reply(wire.ImageList(images=self.images))

    async def _drain(self, request: web.Request) -> web.Response:
        self.draining = (await read_json(request, wire.DrainRequest)).on
        return json_reply(self.info())

    async def _create(self, request: web.Request) -> web.Response:
        asked = await read_json(request, wire.NodeCreateRequest)
        self.asked.append(asked)
        if self.refuse is not None:
            raise self.refuse
        known = (one.digest for one in self.images if asked.digest == one.digest or asked.spec.image in one.names)
        digest = next(known, "")
        if not digest:
            raise CapacityError("image_missing", f"no image {asked.spec.image} on node {self.id}")
        fresh = [name for name in asked.ids if name not in self.sandboxes]
        if len(self.live) + len(fresh) > self.capacity["sandboxes_max"]:
            raise CapacityError("capacity", "full", retry_after_s=1.0)
        try:
            await asyncio.sleep(self.create_s)
        finally:
            for name in fresh:
                self.sandboxes[name] = self.make(name, asked, digest)
                self.made += 1
        return json_reply(wire.CreateReply(sandboxes=[self.sandboxes[name] for name in asked.ids]))

    def make(self, name: str, asked: wire.NodeCreateRequest, digest: str = DIGEST) -> wire.SandboxInfo:
        spec = asked.spec
        return wire.SandboxInfo(
            id=name,
            node=self.id,
            namespace=asked.namespace,
            backend=spec.backend,
            image=spec.image,
            digest=digest,
            state="running",
            cpus=spec.cpus,
            memory_mib=spec.memory_mib,
            disk_mib=spec.disk_mib,
            labels=spec.labels,
            created_at=time.time(),
        )

    def _of(self, request: web.Request) -> wire.SandboxInfo:
        name = request.match_info["id"]
        if name not in self.sandboxes:
            raise NotFoundError("sandbox_not_found", f"there is no sandbox {name} on node {self.id}", field="sandbox")
        return self.sandboxes[name]

    async def _info(self, request: web.Request) -> web.Response:
        return json_reply(self._of(request))

    async def _list(self, request: web.Request) -> web.Response:
        namespace = request.query.get("namespace")
        states = [part for part in request.query.get("state", "").split(",") if part] or wire.LIVE_STATES
        kept = [
            info for info in self.sandboxes.values() if namespace in (None, info.namespace) and info.state in states
        ]
        return json_reply(wire.SandboxList(sandboxes=kept))

    async def _kill(self, request: web.Request) -> web.Response:
        info = self._of(request)
        if info.state in wire.LIVE_STATES:
            info = msgspec.structs.replace(info, state="exited", reason="killed", ended_at=time.time())
            self.sandboxes[info.id] = info
        return json_reply(info)

    async def _exec(self, request: web.Request) -> web.Response:
        self._of(request)
        asked = await read_json(request, wire.ExecRequest, max_bytes=wire.MAX_JSON_BYTES)
        return json_reply(wire.ExecReply(exec_id=asked.exec_id or "ex-1", exit_code=0, stdout=asked.stdin or b"ran"))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self._of(request)
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        async for message in ws:
            if message.type is WSMsgType.BINARY:
                await ws.send_bytes(message.data)
            elif message.data == "exit":
                await ws.close(code=4000)
            else:
                await ws.send_str(message.data)
        return ws

    async def _read(self, request: web.Request) -> web.StreamResponse:
        self._of(request)
        response = web.StreamResponse(headers={"X-Dsec-Size": str(len(self.files[request.query["path"]]))})
        await response.prepare(request)
        await response.write(self.files[request.query["path"]])
        return response

    async def _write(self, request: web.Request) -> web.Response:
        self._of(request)
        body = await read_body(request, max_bytes=1 << 30)
        self.files[request.query["path"]] = body
        return json_reply(wire.FileWritten(bytes=len(body)))
