"""What the SDK makes of a broken network, a restarting server and a server that talks nonsense (E2)."""

from __future__ import annotations

import asyncio
import io
import tarfile

import msgspec
import pytest
from aiohttp import web
from libdsec.client import AsyncClient
from libdsec.errors import (
    CapacityError,
    DeniedError,
    PlatformError,
    ProtocolError,
    UsageError,
)
from libdsec.sandbox import AsyncSandbox
from libdsec.wire import CreateRequest, ExecRequest, FileStat, FileWritten

from nomad_dsec.httpd import listen_tcp
from tests.kit.scriptedgateway import (
    SANDBOX,
    always,
    cut,
    cutting,
    executing,
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
        (302, b"moved", ProtocolError),
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
