"""`nomad alloc exec`: the exit frame waits for input that is on its way, since a client drops it otherwise."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest
from aiohttp import WSMsgType
from dsec_plugins.drivers import exec_stream
from dsec_plugins.proto import driver_pb2 as pb
from libdsec.wire import ExecReply

ENDED = json.loads(msgspec.json.encode(ExecReply(exec_id="e", exit_code=43))) | {"type": "exited"}
CLOSE = pb.ExecTaskStreamingRequest(stdin=pb.ExecTaskStreamingIOOperation(close=True))
DATA = pb.ExecTaskStreamingRequest(stdin=pb.ExecTaskStreamingIOOperation(data=b"x"))


class _EndedCommand:
    """A node's WebSocket whose command has ended: it says so, and takes no more."""

    def __init__(self) -> None:
        self.refused = 0

    async def send_str(self, text: str) -> None:
        if "close_stdin" in text:
            await self.send_bytes(b"")

    async def send_bytes(self, data: bytes) -> None:
        self.refused += 1
        raise ConnectionResetError("closing transport")

    async def receive(self):
        return SimpleNamespace(type=WSMsgType.TEXT, data=json.dumps(ENDED))

    async def close(self) -> None:
        pass


def _relay(socket: _EndedCommand, requests, *, tty: bool = False):
    async def websocket(_path: str) -> _EndedCommand:
        return socket

    setup = pb.ExecTaskStreamingRequest.Setup(task_id="t", command=["true"], tty=tty)
    first = pb.ExecTaskStreamingRequest(setup=setup)
    return exec_stream.relay_exec(SimpleNamespace(websocket=websocket), "sb-n-1", first, requests)


async def test_the_exit_frame_waits_for_input_on_its_way(monkeypatch):
    monkeypatch.setattr(exec_stream, "STDIN_QUIET_S", 600.0)
    monkeypatch.setattr(exec_stream, "STDIN_END_S", 600.0)
    come, order = asyncio.Event(), []

    async def requests():
        yield DATA
        await come.wait()
        order.append("input")
        yield CLOSE
        await asyncio.Event().wait()

    async def read():
        async for frame in _relay(socket, requests()):
            order.append("exited" if frame.exited else "close")
            if frame.exited:
                assert frame.result.exit_code == 43

    socket = _EndedCommand()
    reading = asyncio.ensure_future(read())
    while socket.refused == 0:  # it took the first piece, which the ended command refused
        await asyncio.sleep(0)
    assert not order
    come.set()
    async with asyncio.timeout(10):
        await reading
    assert order == ["input", "close", "close", "exited"]


@pytest.mark.parametrize("tty", [False, True])
async def test_input_that_never_ends_is_not_waited_for(monkeypatch, tty):
    monkeypatch.setattr(exec_stream, "STDIN_QUIET_S", 0.001)
    monkeypatch.setattr(exec_stream, "STDIN_END_S", 0.01)

    async def requests():
        while True:
            await asyncio.sleep(0)
            yield DATA

    async with asyncio.timeout(10):
        frames = [frame async for frame in _relay(_EndedCommand(), requests(), tty=tty)]
    assert frames[-1].exited
