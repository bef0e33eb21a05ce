"""The node's HTTP API of fncall; shapes and paths are those of libdsec.wire_fncall."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web
from libdsec.errors import UsageError
from libdsec.wire import Ok
from libdsec.wire_fncall import (
    DIGEST_HEADER,
    MAX_CALL_BYTES,
    NAMESPACE_HEADER,
    CancelRequest,
    FnRequest,
    SubmitRequest,
)

from nomad_dsec.httpd import json_reply, read_json

if TYPE_CHECKING:
    from nomad_dsec.node.lanes import Lanes


class FncallRoutes:
    """Handlers over the lanes of one node."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def table(self) -> list[web.RouteDef]:
        """The paths."""
        return [
            web.post("/v1/fncall", self.run),
            web.post("/v1/fncall/submit", self.submit),
            web.post("/v1/fncall/cancel", self.cancel),
            web.get("/v1/fncall/languages", self.languages, allow_head=False),
        ]

    def observe(self) -> None:
        """Bring the gauges of GET /metrics up to date."""
        self._lanes.observe()

    async def run(self, request: web.Request) -> web.Response:
        """POST: one call. A connection that ends first cancels it."""
        wanted = await read_json(request, FnRequest, max_bytes=MAX_CALL_BYTES)
        return json_reply(await self._lanes.run(wanted, namespace=_namespace(request), digest=_digest(request)))

    async def submit(self, request: web.Request) -> web.Response:
        """POST: a program and its tests."""
        wanted = await read_json(request, SubmitRequest, max_bytes=MAX_CALL_BYTES)
        return json_reply(await self._lanes.submit(wanted, namespace=_namespace(request), digest=_digest(request)))

    async def cancel(self, request: web.Request) -> web.Response:
        """POST: end a call by its id."""
        wanted = await read_json(request, CancelRequest)
        self._lanes.cancel(_namespace(request), wanted.call_id)
        return json_reply(Ok())

    async def languages(self, request: web.Request) -> web.Response:
        """GET: what an image can run."""
        image = request.query.get("image", "")
        if not image:
            raise UsageError("bad_query", "no image is named", field="image", hint="give image=NAME or a digest")
        found = await self._lanes.languages(image, namespace=_namespace(request), digest=_digest(request))
        return json_reply(found)


def _namespace(request: web.Request) -> str:
    return request.headers.get(NAMESPACE_HEADER, "")


def _digest(request: web.Request) -> str:
    return request.headers.get(DIGEST_HEADER, "")
