"""Case L1 (with L2) on real containers, with a count of all that the kernel holds for the node before and after."""

from __future__ import annotations

import asyncio
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nomad_dsec.linux.cgroup import CgroupRoot
from nomad_dsec.linux.nft_table import link_prefix
from tests.kit.abilities import needs
from tests.kit.node_daemon import CONTAINER_NEEDS, NodeDaemon
from tests.kit.sizes import sized

pytestmark = [needs("cc", "nft", "ip", *CONTAINER_NEEDS), pytest.mark.timeout(400)]
POOL = 4  # idle cgroup sets that a daemon may keep (--pool-slots of NodeDaemon)
OPEN = {"policy": {"network": "open"}}


@pytest.fixture
def daemon(tmp_path):
    made = NodeDaemon(tmp_path, backend="container")
    made.start()
    yield made
    made.remove()


def held(daemon: NodeDaemon) -> dict[str, Any]:
    """What the kernel holds for the sandboxes of this node."""
    processes, spaces = set(), set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if f"dsec-{daemon.node}" in Path(f"/proc/{name}/cgroup").read_text():
                spaces.add(os.readlink(f"/proc/{name}/ns/net"))
                processes.add(int(name))
    tables = subprocess.run(["nft", "list", "tables"], capture_output=True, check=True, timeout=20, text=True).stdout
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "processes": processes,
        "netns": spaces,
        "mounts": sum(str(daemon.directory) in line for line in mounts),
        "veths": {name for name in os.listdir("/sys/class/net") if name.startswith(link_prefix(daemon.node))},
        "tables": sorted(line for line in tables.splitlines() if "dsec" in line),
    }


def cgroups(daemon: NodeDaemon) -> int:
    return len(CgroupRoot.detect(daemon.node).names())


async def settled(daemon: NodeDaemon, wanted: dict[str, Any]) -> None:
    """The kernel frees some things a moment after their last process."""
    for _ in range(100):
        if held(daemon) == wanted:
            return
        await asyncio.sleep(0.1)
    assert held(daemon) == wanted


async def test_l1_a_killed_daemon_loses_nothing_and_leaves_nothing(daemon):
    live, paused, creating = sized((36, 6, 8), (9, 2, 4))
    async with daemon.client() as client:
        await client.call("DELETE", f"/v1/sandboxes/{(await client.create(**OPEN))[0]['id']}")  # image and table stay
        nothing = held(daemon)
        running = [info["id"] for info in await client.create(live - 3)]
        running += [info["id"] for info in await client.create(3, **OPEN)]
        frozen = [info["id"] for info in await client.create(paused)]
        for box in frozen:
            (await client.call("POST", f"/v1/sandboxes/{box}/pause")).ok()
    before = held(daemon)
    assert len(before["processes"]) == len(before["netns"]) == live + paused
    assert len(before["veths"]) == 3
    for delay_s in (0.0, 0.03, 0.1):
        new = daemon.new_ids(creating)
        async with daemon.client() as client:
            bodies = [client.body([box], **(OPEN if number % 4 == 0 else {})) for number, box in enumerate(new)]
            asked = [asyncio.ensure_future(client.call("POST", "/v1/sandboxes", body)) for body in bodies]
            await asyncio.sleep(delay_s)
            daemon.kill9()
            await asyncio.gather(*asked, return_exceptions=True)
        daemon.start()
        async with daemon.client() as client:
            found = await client.ls()
            assert {found[box]["state"] for box in running} == {"running"}
            assert {found[box]["state"] for box in frozen} == {"paused"}
            assert set(found) - set(running) - set(frozen) <= set(new)
            said = await asyncio.gather(*(client.exec(box, "echo alive") for box in running))
            assert {done["stdout"] for done in said} == {"YWxpdmUK"}
            await asyncio.gather(*(client.call("DELETE", f"/v1/sandboxes/{box}") for box in new if box in found))
            for name in ("orphans_found", "lost", "stop_failures"):
                assert await client.metric(f"dsec_node_{name}_total") == 0, name
        await settled(daemon, before)
        assert cgroups(daemon) <= live + paused + POOL
    async with daemon.client() as client:
        resumed, deleted = frozen[: paused // 2], frozen[paused // 2 :]
        for box in resumed:  # L2: both work
            assert (await client.call("POST", f"/v1/sandboxes/{box}/resume")).ok()["state"] == "running"
            assert (await client.exec(box, "echo thawed"))["stdout"] == "dGhhd2VkCg=="
        for box in [*deleted, *resumed, *running]:
            assert (await client.call("DELETE", f"/v1/sandboxes/{box}")).ok()["reason"] == "killed"
    await settled(daemon, nothing)
    assert cgroups(daemon) <= POOL
