"""Execs that are held by a slow reader (`nomad alloc exec`): every byte arrives, nothing grows, nothing hangs."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from aiohttp import WSMsgType

from tests.kit.abilities import needs
from tests.kit.leaks import clean_after
from tests.kit.node_daemon import CONTAINER_NEEDS, NodeDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator

# One daemon serves the whole file and mounts its image at the first create: its leftovers are looked for at its end.
pytestmark = [needs("root", "overlay", "cc"), pytest.mark.timeout(120), pytest.mark.leaks_ok]
SIZE = 20_000_000


@pytest.fixture(scope="module", params=["fake", pytest.param("container", marks=needs(*CONTAINER_NEEDS))])
def daemon(request, tmp_path_factory) -> Iterator[NodeDaemon]:
    made = NodeDaemon(tmp_path_factory.mktemp("n"), backend=request.param)
    with clean_after():
        made.start()
        yield made
        made.remove()


@pytest.fixture
async def box(daemon):
    async with daemon.client() as client:
        (info,) = await client.create(memory_mib=64)
        yield client, info["id"]
        await client.call("DELETE", f"/v1/sandboxes/{info['id']}")


async def spawn(client, sandbox, *argv, hold=True, **more):
    ws = await client.session.ws_connect(f"/v1/sandboxes/{sandbox}/execs/stream", max_msg_size=0)
    await ws.send_json({"cmd": list(argv), "hold": hold, **more})
    return ws


async def drain(ws):
    """(bytes by stream, gaps, the exit message)."""
    got, gaps, ended = {1: 0, 2: 0}, 0, None
    async for message in ws:
        if message.type is WSMsgType.BINARY:
            got[message.data[0]] += len(message.data) - 9
        else:
            event = json.loads(message.data)
            gaps += event["type"] == "gap"
            ended = event if event["type"] == "exited" else ended
    return got, gaps, ended


async def test_every_byte_arrives(box):
    client, sandbox = box
    ws = await spawn(client, sandbox, "head", "-c", str(SIZE), "/dev/zero")
    got, gaps, ended = await drain(ws)
    assert (got[1], gaps, ended["exit_code"]) == (SIZE, 0, 0)
    assert ended["total_bytes"] == SIZE


async def test_both_streams_and_a_terminal(box):
    client, sandbox = box
    script = f"head -c {SIZE // 4} /dev/zero & head -c {SIZE // 4} /dev/zero >&2; wait; exit 3"
    got, gaps, ended = await drain(await spawn(client, sandbox, "sh", "-c", script))
    assert (got, gaps, ended["exit_code"]) == ({1: SIZE // 4, 2: SIZE // 4}, 0, 3)
    ws = await spawn(client, sandbox, "head", "-c", "2000000", "/dev/zero", pty={"rows": 24, "cols": 80})
    got, gaps, ended = await drain(ws)
    assert (got[1], gaps, ended["exit_code"]) == (2_000_000, 0, 0)


async def test_a_reader_that_stands_still_holds_the_program_and_its_leaving_lets_it_go(box):
    client, sandbox = box
    script = "head -c 60000000 /dev/zero; echo done > /tmp/done"
    ws = await spawn(client, sandbox, "sh", "-c", script)
    await asyncio.sleep(1.0)  # we read nothing: aiohttp stops the socket, the daemon its credit, dsec-init the pipe
    held = (await client.exec(sandbox, "test -e /tmp/done"))["exit_code"] == 1
    await ws.close()
    async with asyncio.timeout(20):
        while (await client.exec(sandbox, "test -e /tmp/done"))["exit_code"] != 0:
            await asyncio.sleep(0.05)
    assert held


async def test_a_held_program_can_be_killed_and_times_out(box):
    client, sandbox = box
    ws = await spawn(client, sandbox, "sh", "-c", "while :; do head -c 1000000 /dev/zero; done", timeout_s=0.5)
    await asyncio.sleep(1.0)
    _, _, ended = await drain(ws)
    assert ended["timed_out"]


async def test_without_it_the_middle_is_dropped_and_told(box):
    """The positive twin: the same program, a reader that stands still, and no hold."""
    client, sandbox = box
    ws = await spawn(client, sandbox, "sh", "-c", f"head -c {SIZE} /dev/zero; sleep 0.5", hold=False)
    await asyncio.sleep(1.0)
    got, gaps, ended = await drain(ws)
    assert gaps >= 1
    assert got[1] < ended["total_bytes"] == SIZE
