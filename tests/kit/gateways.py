"""A gateway in this process with a plain HTTP client, for contract tests."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from libdsec.errors import ErrorBody

from nomad_dsec.gateway.endpoints import StaticSource
from nomad_dsec.gateway.nodes import Pace
from nomad_dsec.gateway.server import Gateway, GatewayOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.kit.fakenode import FakeNode

ROOT = Path(__file__).parents[2]
ADMIN = "dsk_test_admin_key_0123456789"
QUICK = Pace(heartbeat_s=0.05, timeout_s=0.3, stale_s=0.3, lost_s=1.0, roster_s=0.05, source_s=1.0)
CREATE = {"image": "debian:12"}


class Caller:
    """HTTP with one key; replies are (status, decoded JSON)."""

    def __init__(self, address: str, key: str = ADMIN) -> None:
        self.session = aiohttp.ClientSession(
            base_url=address, headers={"Authorization": f"Bearer {key}"}, connector=aiohttp.TCPConnector(limit=0)
        )

    async def __call__(self, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        if body is not None:
            more["data"] = msgspec.json.encode(body)
        async with self.session.request(method, path, **more) as reply:
            raw = await reply.read()
            return reply.status, msgspec.json.decode(raw) if raw else None

    async def ok(self, method: str, path: str, body: Any = None) -> Any:
        status, value = await self(method, path, body)
        assert status == 200, value
        return value

    async def error(self, method: str, path: str, body: Any = None) -> ErrorBody:
        status, value = await self(method, path, body)
        assert status >= 400, value
        return msgspec.convert(value["error"], ErrorBody)

    async def create(self, **fields: Any) -> list[dict[str, Any]]:
        return (await self.ok("POST", "/v1/sandboxes", CREATE | fields))["sandboxes"]


@asynccontextmanager
async def running_gateway(data: Path, *nodes: FakeNode, **options: Any) -> AsyncIterator[Gateway]:
    """A gateway that serves on a free port with quick heartbeats."""
    chosen = {"pace": QUICK, "admin_key": ADMIN, "source": StaticSource([node.endpoint for node in nodes])} | options
    async with Gateway(GatewayOptions(data=data, **chosen)) as gateway:
        yield gateway


@asynccontextmanager
async def spawned_gateway(
    data: Path, *flags: str, **env: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Caller]]:
    """`python -m nomad_dsec.gateway`, killed at the end if it still runs; its log is <data>.log."""
    argv = [
        sys.executable,
        "-m",
        "nomad_dsec.gateway",
        "--data",
        str(data),
        "--port",
        "0",
        "--admin-key",
        ADMIN,
        *flags,
    ]
    variables = os.environ | {"PYTHONPATH": f"{ROOT}/sdk:{ROOT}"} | env
    with data.with_suffix(".log").open("ab") as log:
        child = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, stderr=log, env=variables)
    try:
        assert child.stdout is not None
        async with asyncio.timeout(30):
            line = await child.stdout.readline()
        assert line, data.with_suffix(".log").read_text()[-3000:]
        caller = Caller(json.loads(line)["address"])
        try:
            yield child, caller
        finally:
            await caller.session.close()
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        child._transport.close()  # type: ignore[attr-defined]  # else its pipe is closed by the collector, with a warning


@asynccontextmanager
async def calling(gateway: Gateway, key: str = ADMIN) -> AsyncIterator[Caller]:
    caller = Caller(gateway.address, key)
    try:
        yield caller
    finally:
        await caller.session.close()


async def tenant_key(admin: Caller, namespace: str) -> str:
    """A plain key of a namespace."""
    return (await admin.ok("POST", "/v1/keys", {"namespace": namespace}))["key"]
