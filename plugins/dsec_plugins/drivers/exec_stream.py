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

STDIN_QUIET_S = 0.2  # no more input for so long after the command's end: none comes
STDIN_END_S = 1.0  # input that never ends is waited for so long
_KILL = json.dumps({"type": "signal", "signal": 9, "tree": True})


async def relay_exec(node: NodeApi, sandbox: str, first: Any, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Response frames until the exit frame. A user who leaves takes the command along.

    The stream ends with the exit frame and not a moment later: the user's client hangs up on it, and an agent (1.6.5
    seen) that finds both its sides ending at once panics on a concurrent write to its WebSocket. And it waits for input
    that is on its way: a client (1.6.5 and 2.0.5) whose write meets an ended stream drops the frames it has not read,
    the exit among them, and its user is told of a closed connection only.
    """
    setup = first.setup
    pty = Pty() if setup.tty else None
    body = ExecRequest(cmd=list(setup.command), stdin_open=True, pty=pty, hold=True)
    socket = await node.websocket(f"/v1/sandboxes/{sandbox}/execs/stream")
    ended: list[Any] = []
    feeding: asyncio.Task[None] | None = None
    told = _Input()
    try:
        await socket.send_str(msgspec.json.encode(body).decode())
        await _forward(socket, first, told)
        feeding = asyncio.create_task(_feed(socket, requests, told))
        async for frame in _frames(socket, ended, tty=setup.tty):
            yield frame
        if not setup.tty:  # a terminal's input has no end to wait for
            await told.over(feeding)
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


class _Input:
    """How far the user's input has come."""

    def __init__(self) -> None:
        self.frames = 0
        self.closed = asyncio.Event()

    async def over(self, feeding: asyncio.Task[None]) -> None:
        """Until it was closed, its reader ended, or no more came for STDIN_QUIET_S; STDIN_END_S at most."""
        closing = asyncio.ensure_future(self.closed.wait())
        try:
            async with asyncio.timeout(STDIN_END_S):
                before = -1
                while before != self.frames and not closing.done() and not feeding.done():
                    before = self.frames
                    await asyncio.wait((closing, feeding), timeout=STDIN_QUIET_S, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            closing.cancel()


async def _feed(socket: ClientWebSocketResponse, requests: AsyncIterator[Any], told: _Input) -> None:
    async for request in requests:
        with suppress(ConnectionError, RuntimeError):  # the command has ended: `_frames` tells how
            await _forward(socket, request, told)


async def _forward(socket: ClientWebSocketResponse, request: Any, told: _Input) -> None:
    """One request frame; an empty one is a heartbeat."""
    told.frames += 1
    if request.HasField("stdin") and request.stdin.close:
        told.closed.set()
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
