"""Using up the machine: processes, memory, disk, inodes, descriptors, output. Each has a bound and the rest goes on.

Layers: cgroup pids and memory (cgroup.kill to end what ignores signals), the size and inode count of the upper layer,
RLIMIT_NOFILE, and dsec-init's head-and-tail log.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from libdsec.errors import StateError

from tests.attack.marks import IN_SANDBOX
from tests.kit.attacker import run_bare

if TYPE_CHECKING:
    from tests.kit.sandbox import Box, Machine

pytestmark = IN_SANDBOX
MIB = 1 << 20


def rss_mib(pid: int | str) -> float:
    """Resident memory of a process of the host's."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


async def wait_processes(box: Box, most: int) -> None:
    """The dead are reaped, so that at most this many processes are left; bounded."""
    async with asyncio.timeout(10):
        while (await box.backend.stats(box.started.handle)).pids > most:
            await asyncio.sleep(0.05)


async def test_processes_are_counted(machine: Machine, image: str) -> None:
    async with machine.sandbox(image, pids=64) as box:
        got = await box.attack("forks", 500)
        assert got["errno"] == errno.EAGAIN
        assert 16 <= got["children"] < 64


def test_twin_without_the_count_all_processes_come_to_be(attacker: Path) -> None:
    assert run_bare(attacker, "forks", 200) == {"children": 200, "errno": 0}


async def test_a_fork_bomb_is_over_at_its_timeout(machine: Machine, image: str) -> None:
    """It ignores SIGTERM and never stops forking; meanwhile others are answered, afterwards nothing of it lives."""
    async with machine.sandbox(image, pids=64) as box:
        bomb = asyncio.ensure_future(box.run("/usr/bin/attack", "forkbomb", timeout_s=1.5))
        await asyncio.sleep(0.5)
        await asyncio.wait_for(box.channel.ping(timeout_s=10), timeout=15)
        # An answer at once: the file's size, or that no process can be made for it now. Never silence.
        try:
            assert (await asyncio.wait_for(box.channel.stat("/usr/bin/attack"), timeout=15)).size > 0
        except StateError as busy:
            assert busy.code == "no_processes"
        outcome = await asyncio.wait_for(bomb, timeout=30)
        assert outcome.timed_out
        assert (await box.attack("forks", 10))["children"] == 10
        await wait_processes(box, 2)


@pytest.mark.parametrize(
    "verb",
    [("memory", 256), ("memfd", 256), ("disk", "/dev/shm/flood", 256)],
    ids=["anonymous", "memfd", "shm"],
)
async def test_memory_is_bounded(machine: Machine, image: str, verb: tuple[str | int, ...]) -> None:
    """Killed by the memory cgroup, or refused by the size of /dev/shm; PID 1 lives on."""
    async with machine.sandbox(image, memory_mib=64) as box:
        outcome = await box.run("/usr/bin/attack", *verb)
        if outcome.exit_code == 0:
            assert f"errno {errno.ENOSPC}".encode() in outcome.stdout
        else:
            assert outcome.signal == signal.SIGKILL
            assert (await box.backend.stats(box.started.handle)).oom_kills >= 1
        assert (await box.attack("ids"))["uid"] == 0


def test_twin_without_a_bound_the_memory_is_there(attacker: Path) -> None:
    assert run_bare(attacker, "memory", 256) == {"touched": 256}


async def test_the_disk_is_bounded(machine: Machine, image: str) -> None:
    async with machine.sandbox(image, disk_mib=16, memory_mib=256) as box:
        got = await box.attack("disk", "/work/flood", 64)
        assert got["errno"] in {errno.ENOSPC, errno.EDQUOT}
        assert 8 <= got["written_mib"] <= 17
        assert await box.shell("rm /work/flood && printf x > /work/small && echo done") == "done"


def test_twin_without_a_bound_the_disk_takes_it(attacker: Path, tmp_path: Path) -> None:
    assert run_bare(attacker, "disk", tmp_path / "flood", 64) == {"errno": 0, "written_mib": 64}


@pytest.mark.parametrize("where", ["/work", "/dev/shm"])
async def test_inodes_are_bounded(machine: Machine, image: str, where: str) -> None:
    async with machine.sandbox(image, disk_mib=16, memory_mib=256) as box:
        got = await box.attack("inodes", where, 100_000)
        assert got["errno"] in {errno.ENOSPC, errno.EDQUOT}
        assert got["files"] < 40_000
        assert await box.shell("printf x > /work/one && echo done") == "done"


def test_twin_without_a_bound_inodes_are_there(attacker: Path, tmp_path: Path) -> None:
    assert run_bare(attacker, "inodes", tmp_path, 45_000) == {"files": 45_000, "errno": 0}


@pytest.mark.parametrize(("policy", "bound"), [({}, 4096), ({"nofile": 256}, 256)])
async def test_descriptors_are_bounded(machine: Machine, image: str, policy: dict[str, object], bound: int) -> None:
    async with machine.sandbox(image, policy) as box:
        got = await box.attack("descriptors", 10_000)
        assert got == {"opened": bound - 3, "errno": errno.EMFILE}


async def test_twin_a_policy_for_builds_allows_more(machine: Machine, image: str) -> None:
    async with machine.sandbox(image, {"nofile": 65536}) as box:
        assert (await box.attack("descriptors", 10_000)) == {"opened": 10_000, "errno": 0}


async def test_yes_is_kept_head_and_tail(box: Box) -> None:
    """A quarter of a GiB of output: every byte counted, a bounded part kept, no process of ours grows."""
    before = rss_mib("self"), rss_mib(box.pid)
    outcome = await box.run("/usr/bin/attack", "yes", 256, max_output_bytes=128 * 1024, timeout_s=60)
    assert outcome.exit_code == 0
    assert outcome.truncated
    assert outcome.total_bytes == 256 * MIB
    assert 64 * 1024 <= len(outcome.stdout) <= 128 * 1024
    assert set(outcome.stdout) == set(b"y\n")
    assert rss_mib("self") - before[0] < 32
    assert rss_mib(box.pid) - before[1] < 4


async def test_endless_output_ends_at_the_timeout(box: Box) -> None:
    outcome = await box.run("/usr/bin/attack", "yes", timeout_s=1.0, max_output_bytes=64 * 1024)
    assert outcome.timed_out
    assert outcome.truncated
    assert len(outcome.stdout) <= 64 * 1024


async def test_a_core_dump_is_never_written(box: Box) -> None:
    """RLIMIT_CORE 0: a crash leaves no file as large as the program's memory."""
    await box.shell("cd /work; attack sleep 5 & sleep 0.1; kill -SEGV $!; wait")
    assert "core" not in await box.shell("echo /work/*")
