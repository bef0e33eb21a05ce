"""The node's HTTP API: what each path does, and nothing else. See CONTRACT for the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from libdsec.errors import PlatformError, UsageError
from libdsec.wire import (
    MAX_JSON_BYTES,
    DrainRequest,
    ExecList,
    ExecRequest,
    ImageList,
    LeaseRequest,
    NodeCreateRequest,
    Ok,
    SandboxList,
    SetTimeoutRequest,
    SignalRequest,
)

from nomad_dsec.httpd import (
    DECODE_ERRORS,
    JSON_TYPE,
    json_reply,
    query_int,
    read_body,
    read_json,
    usage_from_decode,
)
from nomad_dsec.node import exec_stream
from nomad_dsec.node.metrics import CONTENT_TYPE
from nomad_dsec.node.row import to_info

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nomad_dsec.node.core import Entry, Node
    from nomad_dsec.node.create import Creator
    from nomad_dsec.node.execs import Execs
    from nomad_dsec.node.files import Files
    from nomad_dsec.node.fingerprint import Fingerprint
    from nomad_dsec.node.routes_fncall import FncallRoutes
    from nomad_dsec.node.supervisor import Supervisor
    from nomad_dsec.node.verbs import Verbs

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

NODE_HEADER = "X-Dsec-Node"  # NodeCapacity as JSON, on replies to creates and kills
_encode = msgspec.json.Encoder().encode
_decode_exec: Callable[[bytes], ExecRequest] = msgspec.json.Decoder(ExecRequest).decode
_LABEL_SEPARATOR = "="


class Routes:
    """Handlers over the verbs of one node."""

    def __init__(
        self,
        node: Node,
        creator: Creator,
        verbs: Verbs,
        execs: Execs,
        files: Files,
        fingerprint: Fingerprint,
        supervisor: Supervisor,
        fncall: FncallRoutes,
    ) -> None:
        self._node = node
        self._creator = creator
        self._verbs = verbs
        self._execs = execs
        self._files = files
        self._fingerprint = fingerprint
        self._supervisor = supervisor
        self._fncall = fncall

    def table(self) -> list[web.RouteDef]:
        """Hot paths first: the router tries them in order."""
        one = "/v1/sandboxes/{sandbox}"
        return [
            web.post(f"{one}/execs", self.exec_run),
            *self._fncall.table(),
            web.post("/v1/sandboxes", self.create),
            web.delete(one, self.kill),
            web.get(one, self.info, allow_head=False),
            web.get(f"{one}/execs/stream", self.exec_spawn),
            web.get(f"{one}/execs/{{exec_id}}/stream", self.exec_attach),
            web.get(f"{one}/execs/{{exec_id}}", self.exec_get),
            web.post(f"{one}/execs/{{exec_id}}/signal", self.exec_signal),
            web.get(f"{one}/execs", self.exec_list),
            web.get(f"{one}/files", self._file(self._files.read), allow_head=False),
            web.put(f"{one}/files", self._file(self._files.write)),
            web.get(f"{one}/files/list", self._file(self._files.ls)),
            web.get(f"{one}/files/stat", self._file(self._files.stat)),
            web.post(f"{one}/files/op", self._file(self._files.op)),
            web.get(f"{one}/files/tree", self._file(self._files.download_tree), allow_head=False),
            web.put(f"{one}/files/tree", self._file(self._files.upload_tree)),
            web.get(f"{one}/files/watch", self._file(self._files.watch)),
            web.post(f"{one}/pause", self.pause),
            web.post(f"{one}/resume", self.resume),
            web.put(f"{one}/timeout", self.set_timeout),
            web.put(f"{one}/lease", self.lease),
            web.get(f"{one}/metrics", self.metrics),
            web.get(f"{one}/network", self.network),
            web.get(f"{one}/plan", self.plan),
            web.get("/v1/sandboxes", self.ls),
            web.get("/v1/node", self.node_info),
            web.post("/v1/node/drain", self.drain),
            web.get("/v1/images", self.images),
            web.get("/metrics", self.prometheus),
            web.get("/healthz", self.healthz),
            web.get("/readyz", self.readyz),
        ]

    def _entry(self, request: web.Request) -> Entry:
        return self._node.entry(request.match_info["sandbox"])

    def _file(self, handler: Callable[[web.Request, Entry], Awaitable[web.StreamResponse]]) -> Handler:
        async def route(request: web.Request) -> web.StreamResponse:
            entry = self._entry(request)
            try:
                return await handler(request, entry)
            except PlatformError as error:
                raise await self._execs.explained(entry, error) from error

        return route

    def _capacity_header(self) -> dict[str, str]:
        return {NODE_HEADER: _encode(self._fingerprint.capacity()).decode()}

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/sandboxes. Who can't take the reply has not got the sandboxes."""
        wanted = await read_json(request, NodeCreateRequest)
        reply, groups = await self._creator.create(wanted)
        self._node.failpoints.reach("before_reply")
        response = web.Response(body=_encode(reply), content_type=JSON_TYPE, headers=self._capacity_header())
        try:
            await response.prepare(request)
            await response.write_eof()
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the client left before the reply")
        except BaseException:
            self._creator.leave(groups)
            raise
        self._creator.delivered(groups)
        return response

    async def ls(self, request: web.Request) -> web.Response:
        """GET /v1/sandboxes: by namespace, state (comma-separated), label (k=v, repeated); live ones by default.

        Listed infos leave out the policy.
        """
        query = request.query
        namespace = query.get("namespace")
        states = set(filter(None, query.get("state", "").split(",")))
        labels = [text.partition(_LABEL_SEPARATOR)[::2] for text in query.getall("label", [])]
        found = []
        for entry in list(self._node.entries.values()):
            row = entry.row
            if namespace is not None and row.namespace != namespace:
                continue
            if (row.state not in states) if states else entry.ended.is_set():
                continue
            if all(row.labels.get(name) == value for name, value in labels):
                found.append(to_info(row, self._node.id, brief=True))
        return json_reply(SandboxList(sandboxes=found))

    async def info(self, request: web.Request) -> web.Response:
        """GET one."""
        return json_reply(self._node.info(self._entry(request)))

    async def kill(self, request: web.Request) -> web.Response:
        """DELETE one; returns when its resources are gone."""
        info = await self._verbs.kill(request.match_info["sandbox"], request.query.get("reason", "killed"))
        return json_reply(info, headers=self._capacity_header())

    async def pause(self, request: web.Request) -> web.Response:
        """POST pause."""
        return json_reply(await self._verbs.pause(request.match_info["sandbox"]))

    async def resume(self, request: web.Request) -> web.Response:
        """POST resume."""
        return json_reply(await self._verbs.resume(request.match_info["sandbox"]))

    async def set_timeout(self, request: web.Request) -> web.Response:
        """PUT timeout."""
        wanted = await read_json(request, SetTimeoutRequest)
        return json_reply(await self._verbs.set_timeout(request.match_info["sandbox"], wanted.timeout_s))

    async def lease(self, request: web.Request) -> web.Response:
        """PUT lease."""
        wanted = await read_json(request, LeaseRequest)
        return json_reply(await self._verbs.lease(request.match_info["sandbox"], wanted.lease_s))

    async def metrics(self, request: web.Request) -> web.Response:
        """GET metrics of one sandbox."""
        return json_reply(await self._verbs.metrics(request.match_info["sandbox"]))

    async def network(self, request: web.Request) -> web.Response:
        """GET the effective network policy."""
        return json_reply(self._verbs.network(request.match_info["sandbox"]))

    async def plan(self, request: web.Request) -> web.Response:
        """GET the operations that make it."""
        return json_reply(self._verbs.plan(request.match_info["sandbox"]))

    async def exec_run(self, request: web.Request) -> web.Response:
        """POST execs: the fast path."""
        entry = self._entry(request)
        body = await read_body(request, max_bytes=MAX_JSON_BYTES)
        try:
            wanted = _decode_exec(body)
        except DECODE_ERRORS as error:
            raise usage_from_decode(error, "ExecRequest") from error
        if wanted.stdin_open:
            raise UsageError(
                "stdin_open", "a whole exec has no open stdin", field="stdin_open", hint="use execs/stream, or stdin"
            )
        return json_reply(await self._execs.run(entry, wanted))

    async def exec_list(self, request: web.Request) -> web.Response:
        """GET execs."""
        return json_reply(ExecList(execs=await self._execs.ls(self._entry(request))))

    async def exec_get(self, request: web.Request) -> web.Response:
        """GET one exec with its kept output."""
        return json_reply(await self._execs.get(self._entry(request), request.match_info["exec_id"]))

    async def exec_signal(self, request: web.Request) -> web.Response:
        """POST a signal to an exec."""
        wanted = await read_json(request, SignalRequest)
        await self._execs.signal(self._entry(request), request.match_info["exec_id"], wanted)
        return json_reply(Ok())

    async def exec_spawn(self, request: web.Request) -> web.WebSocketResponse:
        """GET execs/stream: spawn."""
        return await exec_stream.spawn(request, self._execs, self._entry(request))

    async def exec_attach(self, request: web.Request) -> web.WebSocketResponse:
        """GET execs/{exec_id}/stream: attach."""
        since = query_int(request, "since", 0) or 0
        if since < 0:
            raise UsageError("bad_query", "since can't be negative", field="since")
        return await exec_stream.attach(
            request, self._execs, self._entry(request), request.match_info["exec_id"], since
        )

    async def node_info(self, _request: web.Request) -> web.Response:
        """GET /v1/node."""
        return json_reply(await self._fingerprint.info())

    async def drain(self, request: web.Request) -> web.Response:
        """POST /v1/node/drain; remembered across restarts."""
        wanted = await read_json(request, DrainRequest)
        await self._node.journal.put_fact("draining", "1" if wanted.on else "")
        self._supervisor.drain(on=wanted.on, deadline_s=wanted.deadline_s)
        return json_reply(await self._fingerprint.info())

    async def images(self, _request: web.Request) -> web.Response:
        """GET /v1/images."""
        return json_reply(ImageList(images=await self._node.images.ls()))

    async def prometheus(self, _request: web.Request) -> web.Response:
        """GET /metrics."""
        metrics, queue = self._node.metrics, self._node.queue
        counts = self._fingerprint.counts()
        for state in ("creating", "running", "paused", "stopping"):
            metrics.state.labels(state).set(counts.get(state, 0))
        metrics.starting.set(queue.starting)
        metrics.waiting.set(queue.waiting)
        self._fncall.observe()
        return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(self, _request: web.Request) -> web.Response:
        """GET /healthz: the event loop turns."""
        return json_reply(Ok())

    async def readyz(self, _request: web.Request) -> web.Response:
        """GET /readyz: recovered, and able to write the journal."""
        node = self._node
        problems: dict[str, Any] = {}
        if not node.ready:
            problems["recovery"] = "the journal is being recovered"
        if node.journal.broken:
            problems["journal"] = node.journal.broken
        return json_reply({"ok": not problems, "problems": problems}, status=503 if problems else 200)
