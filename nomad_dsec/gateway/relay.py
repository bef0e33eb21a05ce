"""Relays between a client and a node: bytes pass through chunk by chunk, at the pace of the slower side.

Nothing is decoded or kept. A cut on one side is a cut on the other: a body or stream that did not end is never given
an end, so no client takes half a file for a whole one or silence for an exit.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import WSCloseCode, WSMsgType, web
from libdsec.errors import DsecError, UsageError

from nomad_dsec.gateway.clients import WS_MESSAGE_BYTES, Cut
from nomad_dsec.httpd import read_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from nomad_dsec.gateway.clients import NodeClient, NodeReply
    from nomad_dsec.gateway.metrics import GatewayMetrics

SMALL_BYTES = 64 * 1024  # bodies up to this are moved in one piece, which is the exec fast path
_REQUEST_HEADERS = ("Content-Type",)
_REPLY_HEADERS = ("Content-Type", "Retry-After", "Content-Disposition", "Last-Modified")
_OUR_PREFIX = "x-dsec-"
_NODE_ONLY = "x-dsec-node"


async def relay_http(
    request: web.Request, client: NodeClient, path: str, *, max_bytes: int | None, metrics: GatewayMetrics
) -> web.StreamResponse:
    """Send the request on and the reply back. max_bytes bounds the request's body; None: any length.

    Raises node_unreachable while nothing of the reply has been sent; later, the client's connection is cut.
    """
    length = request.content_length
    headers = {name: request.headers[name] for name in _REQUEST_HEADERS if name in request.headers}
    data: bytes | AsyncIterator[bytes] | None = None
    if length is not None and length > SMALL_BYTES:
        if max_bytes is not None and length > max_bytes:
            raise _too_large(max_bytes)
        headers["Content-Length"] = str(length)
        data = _body(request, max_bytes, metrics)
    elif length is None and request.body_exists:
        data = _body(request, max_bytes, metrics)
    elif length:
        data = await read_body(request, max_bytes=SMALL_BYTES)
    async with client.open(request.method, path, data=data, headers=headers) as reply:
        return await _send_back(request, reply, client, metrics)


async def _send_back(
    request: web.Request, reply: NodeReply, client: NodeClient, metrics: GatewayMetrics
) -> web.StreamResponse:
    given = reply.headers
    headers = {name: given[name.lower()] for name in _REPLY_HEADERS if name.lower() in given}
    headers.update(
        (name.title(), value) for name, value in given.items() if name.startswith(_OUR_PREFIX) and name != _NODE_ONLY
    )
    length = reply.content_length
    if length is not None and length <= SMALL_BYTES and request.method != "HEAD":
        return web.Response(body=await client.read(reply, SMALL_BYTES), status=reply.status, headers=headers)
    response = web.StreamResponse(status=reply.status, headers=headers)
    if length is not None:
        response.content_length = length
    try:
        await response.prepare(request)
        async for chunk in reply.chunks():
            await response.write(chunk)
        await response.write_eof()
    except BaseException as error:
        side = "client" if _is_gone(request) else "node"
        _cut(request)
        if isinstance(error, asyncio.CancelledError):
            raise
        metrics.cuts.labels(side).inc()
        raise Cut(f"a relayed reply was cut: {error}") from error
    return response


async def _body(request: web.Request, max_bytes: int | None, metrics: GatewayMetrics) -> AsyncIterator[bytes]:
    """The client's body as it comes; a client that stops short makes the request to the node fail, not end."""
    size = 0
    try:
        async for chunk in request.content.iter_any():
            size += len(chunk)
            if max_bytes is not None and size > max_bytes:
                raise _too_large(max_bytes)
            yield chunk
    except (ConnectionError, web.RequestPayloadError) as error:
        metrics.cuts.labels("client").inc()
        raise Cut("the client's body was cut") from error


def _too_large(max_bytes: int) -> UsageError:
    return UsageError(
        "body_too_large", f"the body is over {max_bytes} bytes", field="body", hint="send large content by files.write"
    )


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


async def relay_websocket(
    request: web.Request, client: NodeClient, path: str, *, metrics: GatewayMetrics
) -> web.StreamResponse:
    """Join the client's WebSocket to one of the node, opened first so that its refusal is a plain HTTP error."""
    async with client.websocket(path) as upstream:
        downstream = web.WebSocketResponse(
            max_msg_size=WS_MESSAGE_BYTES, autoclose=False, autoping=True, heartbeat=20.0, timeout=5.0, compress=False
        )
        await downstream.prepare(request)
        try:
            async with asyncio.TaskGroup() as group:
                down = group.create_task(_pump(upstream, downstream))
                up = group.create_task(_pump(downstream, upstream))
                done, rest = await asyncio.wait((down, up), return_when=asyncio.FIRST_COMPLETED)
                for task in rest:
                    task.cancel()
            ended_by, code = ("node", down.result()) if down in done else ("client", up.result())
        except BaseException:
            _cut(request)
            _abort(upstream)
            raise
        if code is None:
            metrics.cuts.labels(ended_by).inc()
            _cut(request)
            _abort(upstream)
            return downstream
        with suppress(DsecError, ConnectionError):
            if ended_by == "node":
                await downstream.close(code=code)
            else:
                await upstream.close(code=code)
                await downstream.close(code=code)
        return downstream


async def _pump(
    source: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    sink: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
) -> int | None:
    """Move messages until the source ends: its close code, or None when it was cut or the sink is gone."""
    while True:
        message = await source.receive()
        try:
            if message.type is WSMsgType.BINARY:
                await sink.send_bytes(message.data)
            elif message.type is WSMsgType.TEXT:
                await sink.send_str(message.data)
            elif message.type is WSMsgType.CLOSE:
                return int(message.data or WSCloseCode.OK)
            else:
                return None  # CLOSED, CLOSING, ERROR: no close frame came
        except (ConnectionError, RuntimeError):
            return None


def _abort(upstream: aiohttp.ClientWebSocketResponse) -> None:
    transport = upstream.get_extra_info("transport")
    del transport
    response = upstream._response
    response.close()
