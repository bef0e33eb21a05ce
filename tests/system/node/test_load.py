"""Bursts: creates whose clients leave (L4), many callers at once (L11), a daemon that stays as big as it was."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from tests.kit.abilities import needs
from tests.kit.node_daemon import CONTAINER_NEEDS, NodeDaemon

pytestmark = [needs("root", "overlay", "cc"), pytest.mark.timeout(240)]


@pytest.fixture(params=["fake", pytest.param("container", marks=needs(*CONTAINER_NEEDS))])
def daemon(request, tmp_path):
    made = NodeDaemon(tmp_path, backend=request.param)
    made.start()
    yield made
    made.remove()


def _open_files(daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


async def _settled(client) -> None:
    """Wait until nothing starts and those whose client left are gone: their grace is two seconds."""
    async with asyncio.timeout(90):
        while True:
            before = await client.ls()
            await asyncio.sleep(3)
            after = await client.ls()
            if before.keys() == after.keys() and {info["state"] for info in after.values()} <= {"running"}:
                return


async def test_a_burst_with_random_cancels_leaves_what_was_handed_over(daemon):
    rng = random.Random(7)
    async with daemon.client() as client:

        async def one(sandbox):
            async with asyncio.timeout(rng.choice((0.02, 0.1, 0.4, 60, 60))):
                reply = await client.call("POST", "/v1/sandboxes", client.body([sandbox]))
            return reply.ok()["sandboxes"][0]["id"]

        ids = daemon.new_ids(150)
        results = await asyncio.gather(*(one(sandbox) for sandbox in ids), return_exceptions=True)
        held = {result for result in results if isinstance(result, str)}
        assert [each for each in results if not isinstance(each, str | TimeoutError)] == []
        assert held
        await _settled(client)
        # A reply that was on its way when its client left counts as delivered: the owner of the ids removes those.
        late = set(await client.ls()) - held
        assert late <= set(ids) - held
        assert held <= set(await client.ls())
        await asyncio.gather(*(client.call("DELETE", f"/v1/sandboxes/{sandbox}") for sandbox in late))
        assert set(await client.ls()) == held
        left = [info for info in (await client.ls(state="exited")).values() if "went away" in info.get("message", "")]
        assert left, "nobody left early: the test shows nothing"
        ends = [client.call("DELETE", f"/v1/sandboxes/{sandbox}") for sandbox in held]
        assert {reply.ok()["state"] for reply in await asyncio.gather(*ends)} == {"exited"}
        node = (await client.call("GET", "/v1/node")).ok()
        assert node["capacity"].get("sandboxes", 0) == 0
        assert node["capacity"].get("starting", 0) == 0


async def test_hundreds_of_callers_meet_no_error_and_leave_no_descriptor(daemon):
    async with daemon.client() as client:
        boxes = [info["id"] for info in await client.create(4, pids=512, memory_mib=256)]
        await client.exec(boxes[0], "true")
    async with daemon.client() as client:
        before = _open_files(daemon)
        done = await asyncio.gather(*(client.exec(boxes[i % 4], "echo ok") for i in range(400)))
        assert {each["stdout"] for each in done} == {"b2sK"}
    async with asyncio.timeout(30):
        while _open_files(daemon) > before + 4:
            await asyncio.sleep(0.1)


async def test_large_output_is_kept_short_and_says_so(daemon):
    async with daemon.client() as client:
        (box,) = [info["id"] for info in await client.create()]
        done = await client.exec(box, "dd if=/dev/zero bs=65536 count=320 2>/dev/null; echo end", max_output_bytes=4096)
        assert done["truncated"]
        assert done["total_bytes"] == 320 * 65536 + 4
        assert done["stdout"].endswith("ZW5kCg==") or done["stdout"].endswith("bmQK")
        assert len(done["stdout"]) < 8192
