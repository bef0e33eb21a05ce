"""The life of sandboxes and clients as the SDK keeps it: leases, groups, kills, cancelled creates (L11)."""

from __future__ import annotations

import asyncio
import os
import warnings

import msgspec
import pytest
from aiohttp import web
from libdsec.client import AsyncClient, default_client
from libdsec.errors import (
    CapacityError,
    DeniedError,
    NotSupported,
)
from libdsec.sandbox import AsyncSandbox
from libdsec.wire import ExecReply, ExecRequest

from tests.kit.scriptedgateway import (
    SANDBOX,
    always,
    info,
    json,
    refusal,
    scripted,
)


async def _sandbox(client: AsyncClient) -> AsyncSandbox:
    return await AsyncSandbox.create("debian", client=client)


async def _refuse(kind: str, code: str, status: int, **more: object) -> web.Response:
    return refusal(kind, code, status, **more)


def _with(client: AsyncClient, **changes: float):
    import dataclasses

    return dataclasses.replace(client.transport.settings, **changes)


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
