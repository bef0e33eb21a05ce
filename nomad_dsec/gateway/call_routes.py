"""The handlers of /v1/fncall*: authenticated by Routes, counted in shares, passed on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web
from libdsec.errors import UsageError
from libdsec.wire import Ok
from libdsec.wire_fncall import CancelRequest

from nomad_dsec.gateway.calls import CALL, SUBMIT, body_max
from nomad_dsec.httpd import JSON_TYPE, json_reply, read_body, read_json

if TYPE_CHECKING:
    from nomad_dsec.gateway.calls import Calls
    from nomad_dsec.gateway.keys import Principal


class CallRoutes:
    """One method a route, by the route's name."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def fncall(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        """POST /v1/fncall."""
        return await self._pass_on(request, principal, CALL)

    async def fncall_submit(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        """POST /v1/fncall/submit."""
        return await self._pass_on(request, principal, SUBMIT)

    async def fncall_cancel(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        """POST /v1/fncall/cancel."""
        await self._calls.cancel(principal.namespace, await read_json(request, CancelRequest, max_bytes=4096))
        return json_reply(Ok())

    async def fncall_languages(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        """GET /v1/fncall/languages."""
        del principal
        image = request.query.get("image", "")
        if not image:
            raise UsageError("bad_query", "no image is named", field="image", hint="give ?image=NAME")
        return json_reply(await self._calls.languages(image))

    async def _pass_on(self, request: web.Request, principal: Principal, path: str) -> web.StreamResponse:
        with self._calls.hold(principal.namespace, request.content_length):
            body = await read_body(request, max_bytes=body_max(request.content_length))
            reply, _ = await self._calls.run(principal.namespace, path, body)
        return web.Response(body=reply, content_type=JSON_TYPE)
