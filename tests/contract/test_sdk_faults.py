"""What the SDK makes of a broken network, a restarting server and a server that talks nonsense (E2, L11)."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tarfile
import warnings

import msgspec
import pytest
from aiohttp import WSMsgType, web
from libdsec.client import AsyncClient, default_client
from libdsec.errors import (
    CapacityError,
    DeniedError,
    NotFoundError,
    NotSupported,
    PlatformError,
    ProtocolError,
    UsageError,
)
from libdsec.results import CommandFailed
from libdsec.sandbox import AsyncSandbox
from libdsec.wire import CreateRequest, ExecReply, ExecRequest, FileStat, FileWritten, SandboxInfo

from nomad_dsec.httpd import listen_tcp
from tests.kit.scriptedgateway import (
    SANDBOX,
    ScriptedGateway,
    always,
    cut,
    cutting,
    executing,
    frame,
    info,
    json,
    refusal,
    scripted,
)


async def _sandbox(client: AsyncClient) -> AsyncSandbox:
    return await AsyncSandbox.create("debian", client=client)


async def test_an_exec_cut_in_the_middle_is_asked_for_again_and_runs_once():
    ran: dict[str, int] = {}
    done = executing(ran)

    async def runs_then_cuts(request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=ExecRequest)
        ran[asked.exec_id] = 0
        cut(request)
        return web.Response()

    async with scripted() as (gateway, client):
        gateway.on("POST /execs", runs_then_cuts, cutting(), done)
        sandbox = await _sandbox(client)
        result = await sandbox.exec(["make"])
    assert result.exit_code == 0
    assert result.stdout == "done\n"
    assert gateway.count("POST /execs") == 3
    assert list(ran.values()) == [1], "each attempt must carry the same exec_id"


async def test_a_cut_that_lasts_is_a_platform_error_and_never_an_exit_code():
    async with scripted() as (gateway, client):
        gateway.on("POST /execs", cutting())
        client.transport.settings = _with(client, reconnect_s=0.2)
        sandbox = await _sandbox(client)
        with pytest.raises(PlatformError) as caught:
            await sandbox.exec("true")
    assert caught.value.code == "connection_lost"
    assert gateway.count("POST /execs") > 1


async def test_a_server_that_restarts_is_outlasted():
    async def reply(_request: web.Request) -> web.StreamResponse:
        return json(info())

    app = web.Application()
    app.router.add_get("/v1/sandboxes/{id}", reply)
    first = await listen_tcp(app, "127.0.0.1", 0)
    port = int(first.address.rpartition(":")[2])
    async with AsyncClient(first.address, "key", reconnect_s=10) as client:
        sandbox = await AsyncSandbox.connect(SANDBOX, client=client)
        await first.close(timeout_s=0.1)
        asking = asyncio.ensure_future(sandbox.info())
        await asyncio.sleep(0.3)
        assert not asking.done()
        again = web.Application()
        again.router.add_get("/v1/sandboxes/{id}", reply)
        second = await listen_tcp(again, "127.0.0.1", port)
        assert (await asking).state == "running"
        await second.close(timeout_s=0.1)


async def test_node_unreachable_is_retried_for_repeatable_calls_only():
    fault = lambda _request: _refuse("platform", "node_unreachable", 500, retry_after_s=0.1)  # noqa: E731
    async with scripted() as (gateway, client):
        gateway.on("POST /execs", fault, fault, executing({}))
        gateway.on("POST /files/op", fault)
        sandbox = await _sandbox(client)
        assert (await sandbox.exec("true")).exit_code == 0
        with pytest.raises(PlatformError, match="node_unreachable"):
            await sandbox.files.move("/a", "/b")
    assert gateway.count("POST /files/op") == 1


async def _refuse(kind: str, code: str, status: int, **more: object) -> web.Response:
    return refusal(kind, code, status, **more)


async def test_append_is_never_sent_twice_and_write_is():
    async with scripted() as (gateway, client):
        gateway.on("PUT /files", cutting())
        sandbox = await _sandbox(client)
        with pytest.raises(PlatformError, match="outcome is unknown"):
            await sandbox.files.append("/log", b"line\n")
        assert gateway.count("PUT /files") == 1
    async with scripted() as (gateway, client):
        gateway.on("PUT /files", cutting(), always(FileWritten(bytes=5)))
        sandbox = await _sandbox(client)
        assert await sandbox.files.write("/log", b"line\n") == 5


async def test_a_write_that_stored_less_is_an_error():
    async with scripted() as (gateway, client):
        gateway.on("PUT /files", always(FileWritten(bytes=3)))
        sandbox = await _sandbox(client)
        with pytest.raises(PlatformError, match="5 bytes were sent and 3 were stored"):
            await sandbox.files.write("/x", "hello")


async def test_a_read_that_ends_early_is_an_error_and_not_a_short_file():
    async def short(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"half", headers={"X-Dsec-Size": "8"})

    async with scripted() as (gateway, client):
        client.transport.settings = _with(client, reconnect_s=0.2)
        gateway.on("GET /files", short)
        sandbox = await _sandbox(client)
        with pytest.raises(PlatformError, match="4 of 8 bytes"):
            await sandbox.files.read("/x")
        with pytest.raises(PlatformError, match="4 of 8 bytes"):
            async for _ in sandbox.files.read_stream("/x"):
                pass
        assert await sandbox.files.read("/x", offset=4) == b"half"


async def test_create_repeats_with_the_same_key_after_a_cut():
    keys: list[str] = []

    async def note(request: web.Request) -> web.StreamResponse:
        keys.append(msgspec.json.decode(await request.read(), type=CreateRequest).idempotency_key)
        if len(keys) == 1:
            cut(request)
        return json({"sandboxes": [msgspec.to_builtins(info())]})

    async with scripted() as (gateway, client):
        gateway.on("POST /v1/sandboxes", note)
        sandbox = await _sandbox(client)
    assert sandbox.id == SANDBOX
    assert len(keys) == 2
    assert keys[0] == keys[1] != ""


async def test_a_create_queues_for_room_as_long_as_it_may(caplog):
    full = lambda _request: _refuse("capacity", "capacity", 503, retry_after_s=0.01)  # noqa: E731
    async with scripted() as (gateway, client):
        gateway.on("POST /v1/sandboxes", full, full, always({"sandboxes": [msgspec.to_builtins(info())]}))
        assert (await AsyncSandbox.create("i", client=client)).id == SANDBOX
        assert gateway.count("POST /v1/sandboxes") == 3
    async with scripted() as (gateway, client):
        gateway.on("POST /v1/sandboxes", full)
        with pytest.raises(CapacityError) as refused:
            await AsyncSandbox.create("i", client=client, wait_s=0.2)
        assert refused.value.details["waited_s"] >= 0.2
        told = [record.getMessage() for record in caplog.records if record.name == "libdsec"]
        assert len(told) == 2, "each create says once why it waits"
        assert "capacity" in told[1]
        asked = gateway.count("POST /v1/sandboxes")
        with pytest.raises(CapacityError):
            await AsyncSandbox.create("i", client=client, wait_s=0)
        assert gateway.count("POST /v1/sandboxes") == asked + 1, "without waiting it is asked for once"
    async with scripted() as (gateway, client):
        gateway.on("POST /v1/sandboxes", lambda _: _refuse("capacity", "image_missing", 503))
        with pytest.raises(CapacityError):
            await AsyncSandbox.create("i", client=client)
        assert gateway.count("POST /v1/sandboxes") == 1, "what does not pass is not waited for"


async def test_errors_arrive_as_what_they_are():
    async with scripted() as (gateway, client):
        gateway.on(
            "POST /v1/sandboxes",
            lambda _: _refuse("capacity", "capacity", 503, details={"refusals": {"memory": 2}}),
            lambda _: _refuse("denied", "quota", 403),
            lambda _: _refuse("usage", "bad_request", 400, field="cpus"),
            lambda _: _refuse("a_kind_of_the_future", "new_code", 500),
        )
        with pytest.raises(CapacityError) as full:
            await _sandbox(client)
        assert full.value.details == {"refusals": {"memory": 2}}
        with pytest.raises(DeniedError):
            await _sandbox(client)
        with pytest.raises(UsageError) as bad:
            await _sandbox(client)
        assert bad.value.field == "cpus"
        with pytest.raises(PlatformError, match="new_code"):
            await _sandbox(client)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, b"<html>", ProtocolError),
        (200, b'{"sandboxes": 7}', ProtocolError),
        (500, b"Traceback (most recent call last)", ProtocolError),
        (502, b"<html>bad gateway</html>", PlatformError),
        (500, b"x" * 400_000, ProtocolError),
    ],
)
async def test_nonsense_is_named_as_such(status: int, body: bytes, kind: type[Exception]):
    async def nonsense(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status)

    async with scripted() as (gateway, client):
        client.transport.settings = _with(client, reconnect_s=0.1)
        gateway.on("POST /v1/sandboxes", nonsense)
        with pytest.raises(kind):
            await _sandbox(client)


def _with(client: AsyncClient, **changes: float):
    import dataclasses

    return dataclasses.replace(client.transport.settings, **changes)


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


async def test_a_tree_cut_on_its_way_is_an_error_even_at_a_member_boundary(tmp_path):
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        member = tarfile.TarInfo("a")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"a"))

    async def tree(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=whole.getvalue())

    async with scripted() as (gateway, client):
        client.transport.settings = _with(client, reconnect_s=0.1)
        gateway.on("GET /files/stat", always(FileStat(name="d", kind="dir")))
        gateway.on("GET /files/tree", tree)
        sandbox = await _sandbox(client)
        with pytest.raises(PlatformError, match="short_tree"):
            await sandbox.files.download("/d", tmp_path / "out")


async def test_what_this_version_lacks_is_refused_before_anything_is_sent():
    async with scripted() as (gateway, client):
        sandbox = await _sandbox(client)
        before = len(gateway.calls)
        for refused in (sandbox.snapshot(), sandbox.fork(2), sandbox.rollback("s"), sandbox.network.set({})):
            with pytest.raises(NotSupported) as caught:
                await refused
            assert set(caught.value.details) == {"feature", "backend", "why"}
        with pytest.raises(NotSupported):
            await AsyncSandbox.create("i", snapshot="s", client=client)
        assert len(gateway.calls) == before


async def test_five_hundred_wide_leaves_the_fds_flat():
    async def slowly(request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=ExecRequest)
        await asyncio.sleep(0.02)
        return json(ExecReply(exec_id=asked.exec_id, exit_code=0))

    def fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = fds()
    async with scripted() as (gateway, client):
        gateway.on("POST /execs", slowly)
        gateway.on(f"GET /{SANDBOX}", always(info()))
        sandbox = await _sandbox(client)
        results = await asyncio.gather(*(sandbox.exec("true") for _ in range(500)))
        assert {result.exit_code for result in results} == {0}
        wide = fds()
        await asyncio.gather(*(sandbox.exec("true") for _ in range(500)))
        assert fds() <= wide + 8
    await asyncio.sleep(0.05)
    assert fds() <= before + 4


async def test_waiting_execs_do_not_hold_up_a_kill():
    release = asyncio.Event()

    async def wedged(request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=ExecRequest)
        await release.wait()
        return json(ExecReply(exec_id=asked.exec_id, signal=9))

    async with scripted() as (gateway, client):
        client.transport.settings = _with(client)
        object.__setattr__(client.transport.settings, "max_connections", 4)
        gateway.on("POST /execs", wedged)
        sandbox = await _sandbox(client)
        execs = [asyncio.ensure_future(sandbox.exec("sleep inf")) for _ in range(20)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(5):
            await sandbox.kill()
        release.set()
        assert {result.signal for result in await asyncio.gather(*execs)} == {9}


async def test_a_lease_is_renewed_until_the_kill():
    async with scripted() as (gateway, client):
        gateway.on("PUT /lease", always(info()))
        sandbox = await AsyncSandbox.create("i", lease_s=0.3, client=client)
        await asyncio.sleep(0.5)
        renewed = gateway.count("PUT /lease")
        assert renewed >= 2
        await sandbox.kill()
        settled = gateway.count("PUT /lease")
        await asyncio.sleep(0.3)
        assert gateway.count("PUT /lease") == settled


async def test_a_failed_kill_does_not_hide_the_first_error():
    async with scripted() as (gateway, client):
        gateway.on(f"DELETE /{SANDBOX}", lambda _: _refuse("denied", "no", 403))
        with pytest.raises(ZeroDivisionError) as caught:
            async with await _sandbox(client):
                raise ZeroDivisionError
        assert "could not be killed" in caught.value.__notes__[0]
        with pytest.raises(DeniedError):
            async with await _sandbox(client):
                pass


async def test_a_group_reports_why_members_are_missing():
    async def partial(_request: web.Request) -> web.StreamResponse:
        error = {"kind": "capacity", "code": "starting_limit", "message": "busy"}
        return json({"sandboxes": [msgspec.to_builtins(info())], "failures": [{"id": "sb-x", "error": error}]})

    async with scripted() as (gateway, client):
        gateway.on("POST /v1/sandboxes", partial)
        async with await AsyncSandbox.create_many(2, "i", all_or_none=False, client=client) as group:
            assert len(group) == 1
            assert isinstance(group.failures[0], CapacityError)
            assert group.failures[0].code == "starting_limit"


def test_the_default_client_closes_with_its_loop(monkeypatch):
    monkeypatch.setenv("DSEC_API_KEY", "key")

    async def use() -> AsyncClient:
        async with scripted() as (gateway, _client):
            monkeypatch.setenv("DSEC_ENDPOINT", gateway.address)
            await AsyncSandbox.create("i")
            return await default_client()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        client = asyncio.run(use())
    assert client.transport._closed


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


@pytest.mark.parametrize("key", ["", "mine"])
async def test_a_cancelled_create_is_given_up_unless_the_caller_has_its_key(key):
    async def hangs(_request):
        await asyncio.sleep(30)

    async with scripted() as (gateway, client):
        gateway.on("POST /v1/sandboxes", hangs)
        making = asyncio.create_task(AsyncSandbox.create("i", client=client, idempotency_key=key))
        while gateway.count("POST /v1/sandboxes") == 0:
            await asyncio.sleep(0.01)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        given_up = [path for method, path in gateway.calls if method == "DELETE" and path.startswith("/v1/creates/")]
        assert len(given_up) == (0 if key else 1)


async def test_a_create_cancelled_after_its_client_was_closed_is_a_cancelled_create():
    async def hangs(_request):
        await asyncio.sleep(30)

    async with scripted() as (gateway, client):
        gateway.on("POST /v1/sandboxes", hangs)
        making = asyncio.create_task(AsyncSandbox.create("i", client=client))
        while gateway.count("POST /v1/sandboxes") == 0:
            await asyncio.sleep(0.01)
        client.transport._closed = True
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
