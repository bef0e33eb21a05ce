"""From HTTP to the rooms behind it: one handler a route of api.py. No decisions here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from aiohttp import web
from libdsec.errors import CapacityError, DeniedError, DsecError, UsageError
from libdsec.wire import CreateRequest, DrainRequest, NodeInfo, NodeList, Ok, State

from nomad_dsec.gateway.api import ROUTES, KeyInfo, KeyList, KeyRequest, Ready, WhoAmI
from nomad_dsec.gateway.call_routes import CallRoutes
from nomad_dsec.gateway.doors.sandboxfusion_routes import FusionDoor
from nomad_dsec.gateway.keys import Unauthenticated, check_namespace, require_admin
from nomad_dsec.gateway.metrics import CONTENT_TYPE
from nomad_dsec.gateway.nodes import Standing
from nomad_dsec.gateway.openapi import render_openapi
from nomad_dsec.gateway.quotas import Quota
from nomad_dsec.gateway.relay import relay_http, relay_websocket
from nomad_dsec.httpd import JSON_TYPE, bearer, decode_json, error_reply, json_reply, read_body, read_json

if TYPE_CHECKING:
    from nomad_dsec.gateway.api import Route
    from nomad_dsec.gateway.keys import KeyRow, Principal
    from nomad_dsec.gateway.server import Gateway

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_DRAIN_TIMEOUT_S = 30.0
_STALE = "Consul does not answer: the list of nodes is the last good one"
_MAX_INFO_BYTES = 8 * 1024 * 1024
_SEGMENT = {"exec_id": "{exec_id:[A-Za-z0-9_-]{1,64}}"}


class Routes:
    """The handlers of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._calls = CallRoutes(gateway.calls)
        self._fusion = FusionDoor(
            gateway.calls,
            gateway.keys,
            namespace=gateway.options.fusion_namespace,
            image=gateway.options.fusion_image,
        )
        self._document = msgspec.json.encode(render_openapi())

    def add_to(self, app: web.Application) -> None:
        """Register every route of the table."""
        for route in ROUTES:
            path = route.path
            for name, pattern in _SEGMENT.items():
                path = path.replace(f"{{{name}}}", pattern)
            handler: Handler
            if route.kind in ("relay", "websocket"):
                handler = self._relay(route)
            elif route.kind == "verb":
                handler = self._verb(route)
            else:
                handler = self._local(route, self._act(route))
            app.router.add_route(route.method, path, handler)

    def _act(self, route: Route) -> Callable[[web.Request, Any], Awaitable[web.StreamResponse]]:
        name = route.name.removesuffix("_keyed")
        for home in (self._calls, self._fusion):
            if hasattr(home, name):
                return getattr(home, name)  # type: ignore[no-any-return]  # looked up by the table's name
        return getattr(self, f"_{name}")  # type: ignore[no-any-return]

    def _authenticate(self, request: web.Request) -> Principal:
        try:
            token = bearer(request)
        except DeniedError as error:
            raise Unauthenticated(error.code, error.message, hint=error.hint) from error
        return self._gateway.keys.authenticate(token)

    def _relay(self, route: Route) -> Handler:
        count, sandboxes, metrics = self._gateway.metrics.request, self._gateway.sandboxes, self._gateway.metrics
        template = route.path
        is_websocket = route.kind == "websocket"

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                principal = self._authenticate(request)
                node = await sandboxes.reach(principal, request.match_info["sandbox"])
                path = _path(template, request)
                if is_websocket:
                    response = await relay_websocket(request, node.client, path, metrics=metrics)
                else:
                    response = await relay_http(request, node.client, path, max_bytes=route.max_bytes, metrics=metrics)
            except DsecError as error:
                count(route.name, error.status)
                raise
            count(route.name, response.status)
            return response

        return handle

    def _verb(self, route: Route) -> Handler:
        async def act(request: web.Request, principal: Principal) -> web.StreamResponse:
            body = None
            if route.request is not None:
                body = await read_body(request, max_bytes=route.max_bytes or 0)
                decode_json(body, route.request)
            sandbox = request.match_info["sandbox"]
            info = await self._gateway.sandboxes.verb(
                principal, sandbox, route.method, _path(route.path, request), body
            )
            return json_reply(info)

        return self._local(route, act)

    def _local(self, route: Route, act: Callable[[web.Request, Any], Awaitable[web.StreamResponse]]) -> Handler:
        count = self._gateway.metrics.request

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                principal = None
                if route.kind != "public":
                    principal = self._authenticate(request)
                    if route.admin:
                        require_admin(principal)
                response = await act(request, principal)
            except DsecError as error:
                count(route.name, error.status)
                raise
            count(route.name, response.status)
            return response

        return handle

    async def _create(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        creates = self._gateway.creates
        asked = await read_json(request, CreateRequest)
        flight = await creates.create(principal.namespace, asked)
        response = web.Response(body=flight.done.result(), content_type=JSON_TYPE)
        try:
            await response.prepare(request)
            await response.write_eof()
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the client went away before the reply was out")
        except BaseException:
            creates.undelivered(flight)
            raise
        creates.delivered(flight)
        return response

    async def _create_abandon(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        await self._gateway.creates.abandon(principal.namespace, request.match_info["key"])
        return json_reply(Ok())

    async def _list(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        query = request.query
        states = [part for text in query.getall("state", []) for part in text.split(",") if part]
        for state in states:
            if state not in get_args(State):
                raise UsageError(
                    "bad_query", f"{state[:40]!r} is no state", field="state", hint=", ".join(get_args(State))
                )
        found = await self._gateway.sandboxes.list(
            principal, namespace=query.get("namespace", ""), states=states, labels=query.getall("label", [])
        )
        return json_reply(found)

    async def _info(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        return json_reply(await self._gateway.sandboxes.info(principal, request.match_info["sandbox"]))

    async def _images(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        del request, principal
        await self._gateway.table.refresh_images()
        return json_reply(self._gateway.table.images.listing())

    async def _whoami(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        del request
        quotas = self._gateway.quotas
        used = quotas.usage(principal.namespace)
        return json_reply(
            WhoAmI(
                namespace=principal.namespace,
                key_id=principal.key_id,
                admin=principal.admin,
                quota=quotas.of(principal.namespace),
                sandboxes=used.sandboxes,
                cpus=used.cpus,
                memory_mib=used.memory_mib,
                disk_mib=used.disk_mib,
            )
        )

    async def _nodes(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        del request, principal
        gateway = self._gateway
        return json_reply(NodeList(nodes=gateway.table.infos(), notes=gateway.options.source.notes()))

    async def _drain(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        del principal
        body = await read_body(request, max_bytes=4096)
        decode_json(body, DrainRequest)
        node = self._gateway.table.find(request.match_info["node"])
        info = await node.client.call(
            "POST", "/v1/node/drain", NodeInfo, body=body, timeout_s=_DRAIN_TIMEOUT_S, max_bytes=_MAX_INFO_BYTES
        )
        if node.info is not None and info.node == node.id:
            node.info = msgspec.structs.replace(node.info, draining=info.draining)
            self._gateway.table.refresh_view(node)
        return json_reply(info)

    async def _keys(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        del request, principal
        return json_reply(KeyList(keys=[_key_info(row) for row in self._gateway.keys.rows()]))

    async def _key_create(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        del principal
        asked = await read_json(request, KeyRequest, max_bytes=4096)
        row, token = await self._gateway.keys.create(asked.namespace, admin=asked.admin, label=asked.label)
        return json_reply(_key_info(row, token))

    async def _key_revoke(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        del principal
        return json_reply(_key_info(await self._gateway.keys.revoke(request.match_info["key"])))

    async def _quota(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        del principal
        return json_reply(self._gateway.quotas.of(check_namespace(request.match_info["namespace"])))

    async def _quota_set(self, request: web.Request, principal: Principal) -> web.StreamResponse:
        del principal
        namespace = check_namespace(request.match_info["namespace"])
        quota = await read_json(request, Quota, max_bytes=4096)
        await self._gateway.quotas.set(namespace, quota)
        return json_reply(quota)

    async def _openapi(self, request: web.Request, principal: None) -> web.StreamResponse:
        del request, principal
        return web.Response(body=self._document, content_type=JSON_TYPE)

    async def _metrics(self, request: web.Request, principal: None) -> web.StreamResponse:
        del request, principal
        gateway = self._gateway
        for standing in Standing:
            number = sum(node.standing is standing for node in gateway.table.by_endpoint.values())
            gateway.metrics.nodes.labels(standing.value).set(number)
        gateway.metrics.calls.set(gateway.calls.under_way)
        source = gateway.options.source
        age_s = source.age_s()
        gateway.metrics.nodes_stale.set(source.stale)
        gateway.metrics.nodes_age.set(-1 if age_s is None else age_s)
        body = await asyncio.to_thread(gateway.metrics.render)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _healthz(self, request: web.Request, principal: None) -> web.StreamResponse:
        del request, principal
        return json_reply(Ok())

    async def _readyz(self, request: web.Request, principal: None) -> web.StreamResponse:
        del request, principal
        # for anybody to read: no addresses
        notes = [_STALE] if self._gateway.options.source.stale else []
        if not self._gateway.table.live():
            said = "; ".join(["no node answers", *notes])
            return error_reply(CapacityError("no_nodes", said, hint="see `dsec node ls`", retry_after_s=1.0))
        return json_reply(Ready(notes=notes))


def _path(template: str, request: web.Request) -> str:
    """The node's path: made of checked segments, with the query as it came."""
    path = template
    for name, value in request.match_info.items():
        path = path.replace(f"{{{name}}}", value)
    query = request.rel_url.raw_query_string
    return f"{path}?{query}" if query else path


def _key_info(row: KeyRow, token: str = "") -> KeyInfo:
    return KeyInfo(
        id=row.id,
        namespace=row.namespace,
        admin=row.admin,
        label=row.label,
        created_at=row.created_at,
        revoked_at=row.revoked_at,
        key=token,
    )
