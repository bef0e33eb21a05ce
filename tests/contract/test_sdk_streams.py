"""What the SDK makes of streams that are cut, have gaps or are refused (E2); and its synchronous twins."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest
from aiohttp import WSMsgType, web
from libdsec.client import AsyncClient
from libdsec.errors import (
    NotFoundError,
    PlatformError,
)
from libdsec.results import CommandFailed
from libdsec.sandbox import AsyncSandbox
from libdsec.wire import ExecReply, ExecRequest, SandboxInfo

from tests.kit.scriptedgateway import (
    ScriptedGateway,
    cut,
    executing,
    frame,
    json,
    refusal,
    scripted,
)


async def _sandbox(client: AsyncClient) -> AsyncSandbox:
    return await AsyncSandbox.create("debian", client=client)


class Stream:
    """Serves one command's output, cutting the connection at given points; attaches go on from `since`."""

    def __init__(self, whole: bytes, *, cuts: list[int], ask: bool = True) -> None:
        self.whole = whole
        self.cuts = cuts
        self.sinces: list[int] = []
        self.spawns: list[str] = []
        self.stdin = b""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        since = int(request.query.get("since", 0))
        if request.path.endswith("/execs/stream"):
            asked = msgspec.json.decode((await socket.receive()).data, type=ExecRequest)
            self.spawns.append(asked.exec_id)
            if self.cuts and self.cuts[0] < 0:
                self.cuts.pop(0)
                cut(request)
                return socket
            await socket.send_json({"type": "started", "exec_id": asked.exec_id})
        else:
            self.sinces.append(since)
        end = self.cuts.pop(0) if self.cuts else len(self.whole)
        for at in range(since, end, 7):
            await socket.send_bytes(frame(1 + at % 2, at, self.whole[at : min(at + 7, end)]))
        if end < len(self.whole):
            await asyncio.sleep(0.05)
            cut(request)
        else:
            await socket.send_json({"type": "exited", "exec_id": "x", "exit_code": 3})
            await socket.close()
        return socket


def _serve(gateway: ScriptedGateway, stream: Stream) -> None:
    gateway.on("GET /stream", stream)

    async def final(_request: web.Request) -> web.StreamResponse:
        return json(ExecReply(exec_id="x", exit_code=3, stdout=stream.whole))

    gateway._script["GET /execs/x"].append(final)


async def test_a_stream_goes_on_where_it_was_cut():
    whole = os.urandom(3_000)
    async with scripted() as (gateway, client):
        stream = Stream(whole, cuts=[-1, 700, 701, 2_100])
        _serve(gateway, stream)
        sandbox = await _sandbox(client)
        async with await sandbox.spawn(["yes"], exec_id="x") as process:
            got = b"".join([piece.data async for piece in process])
            result = await process.wait()
    assert got == whole
    assert stream.spawns == ["x", "x"], "a spawn cut before `started` is repeated under its id"
    assert stream.sinces == [700, 701, 2_100]
    assert result.exit_code == 3
    assert process.dropped_bytes == 0
    with pytest.raises(CommandFailed):
        result.check()


async def test_wait_leaves_unread_output_readable():
    async with scripted() as (gateway, client):
        _serve(gateway, Stream(b"abc" * 50, cuts=[]))
        sandbox = await _sandbox(client)
        process = await sandbox.attach("x")
        assert (await process.wait()).exit_code == 3
        assert b"".join([piece.data async for piece in process]) == b"abc" * 50


async def test_a_gap_is_counted_and_not_invented():
    async def gappy(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_bytes(frame(1, 0, b"head"))
        await socket.send_json({"type": "gap", "from": 4, "to": 1004})
        await socket.send_bytes(frame(2, 1004, b"tail"))
        await socket.send_json({"type": "exited", "exec_id": "x", "exit_code": 0})
        await socket.close()
        return socket

    async with scripted() as (gateway, client):
        gateway.on("GET /stream", gappy)
        sandbox = await _sandbox(client)
        process = await sandbox.attach("x")
        assert [tuple(piece) async for piece in process] == [("stdout", b"head"), ("stderr", b"tail")]
        assert process.dropped_bytes == 1000


async def test_input_after_a_cut_raises_instead_of_guessing():
    async def once(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if request.path.endswith("/execs/stream"):
            await socket.receive()
            await socket.send_json({"type": "started", "exec_id": "x"})
            message = await socket.receive()
            assert message.type is WSMsgType.BINARY
            cut(request)
            return socket
        await socket.send_bytes(frame(1, 0, b"still here"))
        await socket.receive()
        return socket

    async with scripted() as (gateway, client):
        gateway.on("GET /stream", once)
        sandbox = await _sandbox(client)
        async with await sandbox.spawn(["cat"], stdin=True, exec_id="x") as process:
            await process.write("one")
            assert (await process.read()) == ("stdout", b"still here")
            with pytest.raises(PlatformError) as caught:
                await process.write("two")
            assert caught.value.code == "stdin_lost"


async def test_a_refused_stream_says_why():
    async def gone(_request: web.Request) -> web.StreamResponse:
        return refusal("not_found", "exec_not_found", 404)

    async with scripted() as (gateway, client):
        gateway.on("GET /stream", gone)
        sandbox = await _sandbox(client)
        with pytest.raises(NotFoundError, match="exec_not_found"):
            await sandbox.attach("nope")


@pytest.fixture
def background():
    from libdsec import _loop

    yield
    _loop.stop()


def test_the_synchronous_twins_do_the_same(background):
    from libdsec import sync
    from libdsec._loop import call

    async def start():
        context = scripted()
        gateway, _ = await context.__aenter__()
        return context, gateway

    context, gateway = call(start())
    try:
        _serve(gateway, Stream(b"xyz" * 9, cuts=[]))
        gateway.on("POST /execs", executing({}))
        with (
            sync.Client(gateway.address, "key") as client,
            sync.Sandbox.create("i", client=client) as sandbox,
            sandbox.attach("x") as process,
        ):
            assert b"".join(piece.data for piece in process) == b"xyz" * 9
            assert process.wait().exit_code == 3
            assert sandbox.exec("true").ok
            assert isinstance(sandbox.id, str)
            assert isinstance(sandbox.kill(), SandboxInfo)
    finally:
        call(context.__aexit__(None, None, None))


def test_ctrl_c_cancels_the_call_of_a_twin(background):
    from libdsec._loop import call

    cancelled = []

    async def endless() -> None:
        try:
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(KeyboardInterrupt):
        call(endless())
    call(asyncio.sleep(0.01))
    assert cancelled == [True]
