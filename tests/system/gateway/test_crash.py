"""kill -9 of the gateway at each step of a create: nothing orphaned, nothing lost (cases L4 and L1 of the gateway)."""

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from nomad_dsec.gateway.failpoints import NAMES
from tests.kit.fakenode import TOKEN, FakeNode
from tests.kit.gateways import ADMIN, CREATE, Caller

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def gateway_process(data: Path, *nodes: FakeNode, failpoint: str = ""):
    """`python -m nomad_dsec.gateway`; yields (process, caller)."""
    argv = [sys.executable, "-m", "nomad_dsec.gateway", "--data", str(data), "--port", "0", "--admin-key", ADMIN]
    argv += ["--nodes", ",".join(f"{node.endpoint.url}#{TOKEN}" for node in nodes)]
    argv += ["--failpoint", failpoint] if failpoint else []
    env = os.environ | {"PYTHONPATH": f"{ROOT}/sdk:{ROOT}"}
    child = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, env=env)
    try:
        async with asyncio.timeout(30):
            ready = json.loads(await child.stdout.readline())
        caller = Caller(ready["address"])
        try:
            yield child, caller
        finally:
            await caller.session.close()
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        child._transport.close()


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("step", NAMES)
async def test_killed_in_the_middle_of_a_create_leaves_nothing_and_a_repeat_works(tmp_path, step):
    async with FakeNode("n1") as one, FakeNode("n2") as two:
        body = CREATE | {"count": 4, "idempotency_key": "k1"}
        async with gateway_process(tmp_path / "gw", one, two, failpoint=step) as (child, caller):
            with pytest.raises(aiohttp.ClientError):
                await caller("POST", "/v1/sandboxes", body)
            assert await child.wait() == -signal.SIGKILL
        async with gateway_process(tmp_path / "gw", one, two) as (child, caller):
            reply = await caller.ok("POST", "/v1/sandboxes", body)
            held = {info["id"] for info in reply["sandboxes"]}
            assert len(held) == 4
            await until(lambda: set(one.live) | set(two.live) == held)
            await asyncio.sleep(6)  # the reaper's second pass must not take what is held
            assert set(one.live) | set(two.live) == held
            child.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(child.wait(), 15) == 0
        if step in ("node_replied", "settled"):
            assert one.made + two.made >= 4


async def test_killed_while_the_nodes_still_work_on_it(tmp_path):
    async with FakeNode("n1") as one, FakeNode("n2") as two:
        one.create_s = two.create_s = 1.0
        async with gateway_process(tmp_path / "gw", one, two) as (child, caller):
            asked = asyncio.create_task(caller("POST", "/v1/sandboxes", CREATE | {"count": 4}))
            await until(lambda: one.calls["POST /v1/sandboxes"] and two.calls["POST /v1/sandboxes"])
            child.kill()
            with pytest.raises(aiohttp.ClientError):
                await asked
        async with gateway_process(tmp_path / "gw", one, two):
            await until(lambda: one.made + two.made == 4 and not one.live and not two.live)


async def test_what_a_client_holds_survives_the_kill(tmp_path):
    async with FakeNode("n1") as node:
        async with gateway_process(tmp_path / "gw", node) as (child, caller):
            held = {(await caller.create())[0]["id"] for _ in range(20)}
            child.kill()
            await child.wait()
        async with gateway_process(tmp_path / "gw", node) as (child, caller):
            await asyncio.sleep(1)
            assert set(node.live) == held
            for name in held:
                assert (await caller.ok("GET", f"/v1/sandboxes/{name}"))["state"] == "running"


async def test_settings_at_fault_are_named_and_end_with_2(tmp_path):
    argv = [sys.executable, "-m", "nomad_dsec.gateway", "--data", str(tmp_path), "--nodes", "ftp://x"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}/sdk:{ROOT}"}
    child = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE, env=env)
    _, stderr = await asyncio.wait_for(child.communicate(), 30)
    assert child.returncode == 2
    assert b"gateway.nodes" in stderr
    assert b"Traceback" not in stderr
