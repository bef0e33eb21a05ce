"""The door itself: POST /run_code and the health checks, with a key in the header, the path or the query, or none.

A busy or dying platform answers 504, the one status after which verl's client asks again; a fault that passes by no
waiting is 200 `SandboxError`, which no client grades.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from libdsec.errors import CapacityError, DsecError, UsageError
from libdsec.wire import Ok
from libdsec.wire_fncall import FnResult

from nomad_dsec.gateway.calls import CALL, body_max
from nomad_dsec.gateway.doors import sandboxfusion as fusion
from nomad_dsec.gateway.keys import Principal, Unauthenticated
from nomad_dsec.httpd import error_reply, json_reply, read_json

if TYPE_CHECKING:
    from aiohttp import web

    from nomad_dsec.gateway.calls import Calls
    from nomad_dsec.gateway.keys import Keyring

ANONYMOUS = "anonymous"
ASK_AGAIN = 504
UNPROCESSABLE = 422
_PASSES = frozenset({"capacity", "deadline"})
_decoder: msgspec.json.Decoder[FnResult] = msgspec.json.Decoder(FnResult)
_encode = msgspec.json.Encoder().encode


class FusionDoor:
    """namespace: whose calls without a key are ("" refuses them). image: what calls run on when they name none."""

    def __init__(self, calls: Calls, keys: Keyring, *, namespace: str, image: str) -> None:
        self._calls = calls
        self._keys = keys
        self._namespace = namespace
        self._image = image

    async def fusion_run_code(self, request: web.Request, principal: None) -> web.StreamResponse:
        """POST /run_code."""
        del principal
        try:
            namespace = self._authenticate(request).namespace
            with self._calls.hold(namespace, request.content_length):
                longest = body_max(request.content_length)
                asked = await read_json(request, fusion.RunCodeRequest, max_bytes=longest)
                return json_reply(await self._run(namespace, asked, request.query.get("image", "")))
        except DsecError as error:
            return _refused(error)

    async def fusion_ping(self, request: web.Request, principal: None) -> web.StreamResponse:
        """GET /v1/ping: the process answers."""
        del request, principal
        return json_reply("pong")

    async def fusion_health(self, request: web.Request, principal: None) -> web.StreamResponse:
        """GET /health: calls can be taken."""
        del request, principal
        if self._calls.is_ready():
            return json_reply(Ok())
        reply = error_reply(CapacityError("not_ready", "no node takes calls now", hint="`dsec node ls` says why"))
        reply.set_status(503)
        return reply

    def _authenticate(self, request: web.Request) -> Principal:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = (
            request.match_info.get("fusion_key")
            or request.query.get("key")
            or (token if scheme.lower() == "bearer" else "")
        )
        if key:
            return self._keys.authenticate(key.strip())
        if not self._namespace:
            raise Unauthenticated(
                "no_credentials",
                "no API key was given",
                hint="use the URL http://HOST:PORT/fusion/KEY/run_code, or set gateway.fusion_namespace",
            )
        return Principal(key_id=ANONYMOUS, namespace=self._namespace)

    async def _run(self, namespace: str, asked: fusion.RunCodeRequest, image: str) -> fusion.RunCodeReply:
        if fusion.is_unserved(asked.language):
            return fusion.fault(f"language {asked.language} is not served here")
        call = fusion.to_call(asked, image=image or self._image or self._only_image())
        try:
            raw, node = await self._calls.run(namespace, CALL, _encode(call))
        except UsageError as error:
            if error.code != "language_unavailable":
                raise
            return fusion.fault(str(error))  # the image has not got the tool: nothing that the program did
        return fusion.to_reply(asked, _decoder.decode(raw), node=node)

    def _only_image(self) -> str:
        image = self._calls.only_image()
        if not image:
            raise UsageError(
                "no_image",
                "there is not exactly one image, and none was named",
                field="image",
                hint="set gateway.fusion_image, or add ?image=NAME to the URL",
            )
        return image


def _refused(error: DsecError) -> web.Response:
    """Our error in its clothes: `detail` as FastAPI has it, `status` and `message` as a reply has."""
    reply = msgspec.to_builtins(fusion.fault(str(error)))
    body: dict[str, Any] = reply | {"detail": str(error), "error": error.to_body()}
    if error.kind == "usage":
        return json_reply(body, status=UNPROCESSABLE)
    if error.kind in _PASSES or error.retry_after_s is not None:
        after_s = max(1, round(error.retry_after_s or 1.0))
        return json_reply(body, status=ASK_AGAIN, headers={"Retry-After": str(after_s)})
    if error.kind in ("denied", "not_found"):
        return json_reply(body, status=error.status)
    return json_reply(body)
