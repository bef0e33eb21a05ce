"""Cases of a sandbox's life through SDK, gateway, node daemon and real containers: L3, L4, L5, L8, L11."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys

import pytest
from libdsec.client import AsyncClient
from libdsec.sandbox import AsyncSandbox

from tests.kit.abilities import needs
from tests.kit.devstack import REPO
from tests.kit.footprint import open_files
from tests.kit.sizes import sized
from tests.system.cases.conftest import IMAGE, ours

# One stack serves the whole file and fills its pools as it likes: what it must not leave is checked at its end.
pytestmark = [
    needs("root", "erofs", "cgroup", "filters", "debootstrap", "debian-packages"),
    pytest.mark.timeout(600),
    pytest.mark.leaks_ok,
]
SMALL = {"cpus": 0.05, "memory_mib": 64, "disk_mib": 16}


async def live_ids(client: AsyncClient, **labels: str) -> set[str]:
    found = await AsyncSandbox.list(client=client, labels=labels)
    return {info.id for info in found if info.state not in ("exited", "lost")}


async def wait_ended(sandbox: AsyncSandbox) -> str:
    """Its reason, once it has ended."""
    async with asyncio.timeout(30):
        while (info := await sandbox.info()).state not in ("exited", "lost"):
            await asyncio.sleep(0.05)
    return info.reason


async def test_l3_a_marker_runs_after_each_pause_and_resume(sandbox):
    async with await sandbox.spawn("i=0; while :; do i=$((i+1)); echo $i > /tmp/ticks; sleep 0.01; done"):
        for number in range(sized(200, 20)):
            assert (await sandbox.pause()).state == "paused"
            assert (await sandbox.resume()).state == "running"
            assert (await sandbox.exec(["echo", str(number)])).stdout == f"{number}\n"
        before = (await sandbox.files.read_text("/tmp/ticks")).strip()
        async with asyncio.timeout(20):
            while (await sandbox.files.read_text("/tmp/ticks")).strip() in (before, ""):
                await asyncio.sleep(0.02)


async def test_l4_creates_with_random_cancels_leave_as_many_as_there_are_handles(client):
    """A trainer's tasks are cancelled at any moment; no clean-up is asked of it."""
    rng, held, lanes = random.Random(4), {}, asyncio.Semaphore(48)

    async def one() -> None:
        async with lanes:
            making = asyncio.ensure_future(AsyncSandbox.create(IMAGE, client=client, labels={"case": "l4"}, **SMALL))
            if rng.random() < 0.5:
                await asyncio.wait({making}, timeout=rng.uniform(0, 0.3))
                making.cancel()
            try:
                made = await making
            except asyncio.CancelledError:
                return
            held[made.id] = made
            if len(held) % 3:  # room for the others; the rest stay to the end
                await made.kill()
                del held[made.id]

    await asyncio.gather(*(one() for _ in range(sized(500, 60))))
    async with asyncio.timeout(30):
        while await live_ids(client, case="l4") != set(held):
            await asyncio.sleep(0.2)
    assert len(held) >= sized(50, 6)
    for batch in range(0, len(held), 16):
        await asyncio.gather(*(made.kill() for made in list(held.values())[batch : batch + 16]))
    assert await live_ids(client, case="l4") == set()


TRAINER = """
import asyncio, sys
from libdsec import AsyncClient, AsyncSandbox

async def main():
    async with AsyncClient(sys.argv[1], sys.argv[2]) as client:
        group = await AsyncSandbox.create_many(int(sys.argv[3]), "debian-dev", client=client, lease_s=2.0,
                                               labels={"case": "l5"}, cpus=0.05, memory_mib=64, disk_mib=16)
        print(*(member.id for member in group), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_l5_sandboxes_of_a_killed_trainer_are_gone_when_their_lease_ends(stack, client):
    count = sized(64, 6)
    kept = await AsyncSandbox.create(IMAGE, client=client, lease_s=2.0, **SMALL)
    argv = [sys.executable, "-c", TRAINER, stack.endpoint, stack.api_key, str(count)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env={"PYTHONPATH": str(REPO / "sdk")}) as trainer:
        assert trainer.stdout is not None
        made = set((await asyncio.to_thread(trainer.stdout.readline)).decode().split())
        assert len(made) == count
        await asyncio.sleep(3)  # a living trainer keeps its own beyond the lease
        assert await live_ids(client, case="l5") == made
        trainer.send_signal(signal.SIGKILL)
    async with asyncio.timeout(60):
        while await live_ids(client, case="l5"):
            await asyncio.sleep(0.2)
    reasons = {info.reason for info in await AsyncSandbox.list(client=client, state="exited", labels={"case": "l5"})}
    assert reasons == {"lease_expired"}
    assert (await kept.info()).state == "running"
    await kept.kill()


async def test_l8_every_end_has_its_true_reason(client):
    killed, timed, leased = [await AsyncSandbox.create(IMAGE, client=client, **SMALL) for _ in range(3)]
    await killed.kill()
    await timed.set_timeout(0.1)
    await leased.renew_lease(0.2)
    assert [await wait_ended(each) for each in (killed, timed, leased)] == ["killed", "timeout", "lease_expired"]


async def test_l11_hundreds_wide_without_an_error_and_flat_descriptors(stack):
    wide, pids = sized(500, 200), ours(stack)
    at_first = open_files(pids["client"])
    async with (
        AsyncClient(stack.endpoint, stack.api_key) as client,
        await AsyncSandbox.create(IMAGE, client=client, cpus=2, memory_mib=512, pids=1024) as sandbox,
    ):
        rounds = []
        for _ in range(6):
            done = await asyncio.gather(*(sandbox.exec(["echo", str(number)]) for number in range(wide)))
            assert [each.stdout for each in done] == [f"{number}\n" for number in range(wide)]
            there = await asyncio.gather(*(sandbox.files.exists("/etc/passwd") for _ in range(wide)))
            assert all(there)
            rounds.append({role: open_files(pid) for role, pid in pids.items()})
        # Connections that stay are opened as far as the widest moment needs them; a leak would add one a call.
        growth = {role: count - max(each[role] for each in rounds[:4]) for role, count in rounds[-1].items()}
        assert max(growth.values()) <= wide // 8, rounds
    assert open_files(pids["client"]) <= at_first + 4
