"""`nomad alloc exec`: frames of Nomad on one side, the node daemon's WebSocket on the other; the exit frame last."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from libdsec.errors import ErrorBody, PlatformError, error_from_body
from libdsec.wire import ExecReply, ExecRequest, Pty

from dsec_plugins.drivers.convert import exec_result
from dsec_plugins.proto import driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import ClientWebSocketResponse

    from dsec_plugins.drivers.nodeapi import NodeApi

_KILL = json.dumps({"type": "signal", "signal": 9, "tree": True})


async def relay_exec(node: NodeApi, sandbox: str, first: Any, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Response frames until the exit frame. A user who leaves takes the command along.

    The stream ends with the exit frame and not a moment later: the user's client hangs up on it, and an agent (1.6.5
    seen) that finds both its sides ending at once panics on a concurrent write to its WebSocket.
    """
    setup = first.setup
    pty = Pty() if setup.tty else None
    body = ExecRequest(cmd=list(setup.command), stdin_open=True, pty=pty, hold=True)
    socket = await node.websocket(f"/v1/sandboxes/{sandbox}/execs/stream")
    ended: list[Any] = []
    feeding: asyncio.Task[None] | None = None
    try:
        await socket.send_str(msgspec.json.encode(body).decode())
        await _forward(socket, first)
        feeding = asyncio.create_task(_feed(socket, requests))
        async for frame in _frames(socket, ended, tty=setup.tty):
            yield frame
    finally:
        if feeding is not None:
            feeding.cancel()
            with suppress(asyncio.CancelledError):
                await feeding
        if not ended:
            with suppress(ConnectionError, RuntimeError):
                await socket.send_str(_KILL)
        await socket.close()
    for frame in ended:
        yield frame


async def _feed(socket: ClientWebSocketResponse, requests: AsyncIterator[Any]) -> None:
    async for request in requests:
        await _forward(socket, request)


async def _forward(socket: ClientWebSocketResponse, request: Any) -> None:
    """One request frame; an empty one is a heartbeat."""
    if request.HasField("tty_size"):
        size = request.tty_size
        message = {"type": "resize", "rows": max(1, size.height), "cols": max(1, size.width)}
        await socket.send_str(json.dumps(message))
    if request.HasField("stdin"):
        if request.stdin.data:
            await socket.send_bytes(request.stdin.data)
        if request.stdin.close:
            await socket.send_str(json.dumps({"type": "close_stdin"}))


async def _frames(socket: ClientWebSocketResponse, ended: list[Any], *, tty: bool) -> AsyncIterator[Any]:
    """Output as it comes; the last frames are left in `ended`."""
    from aiohttp import WSMsgType  # see nodeapi.py

    while True:
        message = await socket.receive()
        if message.type is WSMsgType.BINARY:
            operation = pb.ExecTaskStreamingIOOperation(data=message.data[9:])
            if tty or message.data[0] == 1:
                yield pb.ExecTaskStreamingResponse(stdout=operation)
            else:
                yield pb.ExecTaskStreamingResponse(stderr=operation)
        elif message.type is WSMsgType.TEXT:
            event = json.loads(message.data)
            if event["type"] == "error":
                raise error_from_body(msgspec.convert(event["error"], ErrorBody))
            if event["type"] == "exited":
                ended += _ending(event)
                return
        else:
            raise PlatformError("connection_lost", "the node daemon went away during the command", retry_after_s=1.0)


def _ending(event: dict[str, Any]) -> list[Any]:
    reply = msgspec.convert({key: value for key, value in event.items() if key != "type"}, ExecReply)
    close = pb.ExecTaskStreamingIOOperation(close=True)
    return [
        pb.ExecTaskStreamingResponse(stdout=close),
        pb.ExecTaskStreamingResponse(stderr=close),
        pb.ExecTaskStreamingResponse(exited=True, result=exec_result(reply)),
    ]
