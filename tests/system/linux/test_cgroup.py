"""Cgroups on the real kernel: limits bite, counts are true, kill spares nothing, a reused set remembers nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import pytest_asyncio
from libdsec.errors import DeadlineExceeded

from nomad_dsec.linux import cgroup as cgroup_module
from nomad_dsec.linux.cgroup import Cgroup, CgroupRoot
from nomad_dsec.linux.cgroup_files import Layout, Limits
from nomad_dsec.linux.cgroup_pool import CgroupPool, enable_fast_moves, is_moving_fast
from tests.kit.abilities import needs

pytestmark = needs("root", "cgroup")
MIB = 1 << 20
LIMITS = Limits(cpus=1, memory_bytes=64 * MIB, pids=32)
HOG = "import sys\nblocks=[]\nwhile True: blocks.append(bytearray(b'x')*(4<<20))"
FORKS = (
    "import os,time\nn=0\n"
    "for _ in range(100):\n"
    "  try: p=os.fork()\n"
    "  except OSError: break\n"
    "  if p==0: time.sleep(30); os._exit(0)\n"
    "  n+=1\n"
    "print(n, flush=True); time.sleep(30)"
)


def _v1_only(layout: Layout) -> Layout:
    return Layout(v1=layout.v1, unified="", v2=frozenset())


@pytest_asyncio.fixture(params=["as mounted", "v1 only"])
async def root(request: pytest.FixtureRequest):
    """The node's root on the host's own layout, and as if the unified hierarchy were not there (where v1 can)."""
    layout = cgroup_module.detect_layout()
    if request.param == "v1 only":
        layout = _v1_only(layout)
        if layout.missing() or "freezer" not in layout.v1:
            layout = cgroup_module.detect_layout()
    made = CgroupRoot.detect(f"t{os.getpid()}", layout=layout)
    yield made
    await made.remove()


def start(cgroup: Cgroup, program: str) -> subprocess.Popen[bytes]:
    """A Python program that runs only once it is in the cgroup."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", f"import sys\nsys.stdin.read(1)\n{program}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    cgroup.attach(child.pid)
    assert child.stdin is not None
    child.stdin.write(b"x")
    child.stdin.flush()
    return child


def finish(child: subprocess.Popen[bytes]) -> int:
    """Its status, pipes closed."""
    try:
        return child.wait(timeout=20)
    finally:
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()


async def test_memory_beyond_the_limit_is_an_oom_kill_and_counted(root: CgroupRoot) -> None:
    cgroup = root.create("oom", LIMITS)
    cgroup.start_counting()
    assert cgroup.oom_kills() == 0
    child = start(cgroup, HOG)
    assert await asyncio.to_thread(finish, child) == -signal.SIGKILL
    stats = cgroup.stats()
    assert stats.oom_kills == cgroup.oom_kills() == 1
    assert 32 * MIB < stats.memory_peak_bytes <= 64 * MIB
    assert stats.cpu_usage_s > 0


def test_the_share_of_cpu_is_lifted_and_limited_again(root: CgroupRoot) -> None:
    cgroup = root.create("lift", LIMITS)
    file = Path(cgroup.path_of("cpu"), "cpu.max" if "cpu" in cgroup.layout.v2 else "cpu.cfs_quota_us")
    quota = file.read_text()
    cgroup.lift_cpu_limit()
    assert int(file.read_text().split()[0]) > 100 * int(quota.split()[0])
    cgroup.set_limits(LIMITS)
    assert file.read_text() == quota


async def test_a_plain_sigkill_is_not_an_oom_kill(root: CgroupRoot) -> None:
    cgroup = root.create("kill9", LIMITS)
    cgroup.start_counting()
    child = start(cgroup, "import os\nos.kill(os.getpid(), 9)")
    assert await asyncio.to_thread(finish, child) == -signal.SIGKILL
    assert cgroup.oom_kills() == 0


async def test_forks_beyond_the_limit_are_refused_and_all_killed(root: CgroupRoot) -> None:
    cgroup = root.create("forks", LIMITS)
    cgroup.start_counting()
    child = start(cgroup, FORKS)
    assert child.stdout is not None
    assert int(await asyncio.to_thread(child.stdout.readline)) == LIMITS.pids - 1
    stats = cgroup.stats()
    assert stats.pids_current == LIMITS.pids
    assert stats.pids_refused >= 1
    assert len(cgroup.pids()) == LIMITS.pids
    await cgroup.kill(timeout_s=10)
    assert cgroup.is_empty()
    assert await asyncio.to_thread(finish, child) == -signal.SIGKILL


async def test_frozen_stands_still_and_can_be_killed(root: CgroupRoot) -> None:
    cgroup = root.create("freeze", LIMITS)
    child = start(cgroup, "while True:\n  sys.stdout.write('x'); sys.stdout.flush()")
    await cgroup.freeze(timeout_s=5)
    assert cgroup.is_frozen()
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    while child.stdout.read(65536):
        pass
    await asyncio.sleep(0.05)
    assert not child.stdout.read(65536)
    await cgroup.thaw(timeout_s=5)
    assert not cgroup.is_frozen()
    deadline = time.monotonic() + 10
    while not child.stdout.read(1):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    await cgroup.freeze(timeout_s=5)
    await cgroup.kill(timeout_s=10)
    assert await asyncio.to_thread(finish, child) == -signal.SIGKILL


async def test_freeze_and_thaw_in_tight_cycles(root: CgroupRoot) -> None:
    """L3: pause followed at once by resume must neither be lost nor stick."""
    cgroup = root.create("cycles", LIMITS)
    child = start(cgroup, "while True:\n  sys.stdin.read(1); sys.stdout.write('y'); sys.stdout.flush()")
    assert child.stdin is not None
    assert child.stdout is not None
    for _ in range(50):
        await cgroup.freeze(timeout_s=5)
        await cgroup.thaw(timeout_s=5)
        child.stdin.write(b"z")
        child.stdin.flush()
        assert await asyncio.to_thread(child.stdout.read, 1) == b"y"
    await cgroup.kill(timeout_s=10)
    await asyncio.to_thread(finish, child)


async def test_remove_of_a_busy_cgroup_gives_up_in_time(root: CgroupRoot) -> None:
    cgroup = root.create("busy", LIMITS)
    child = start(cgroup, "import time\ntime.sleep(30)")
    with pytest.raises(DeadlineExceeded) as late:
        await cgroup.remove(timeout_s=0.2)
    assert late.value.code == "cgroup_remove_timeout"
    assert child.pid in late.value.details["pids"]
    await cgroup.kill(timeout_s=10)
    await asyncio.to_thread(finish, child)
    await cgroup.remove(timeout_s=5)
    await cgroup.kill(timeout_s=5)
    await cgroup.remove(timeout_s=5)
    assert "busy" not in root.names()


async def test_sweep_takes_what_nobody_owns(root: CgroupRoot) -> None:
    kept, stray = root.create("kept", LIMITS), root.create("stray", LIMITS)
    children = [start(kept, "import time\ntime.sleep(30)"), start(stray, "import time\ntime.sleep(30)")]
    assert await root.sweep({"kept"}) == ["stray"]
    assert await asyncio.to_thread(finish, children[1]) == -signal.SIGKILL
    assert children[0].poll() is None
    await kept.kill(timeout_s=10)
    await asyncio.to_thread(finish, children[0])


async def test_adopted_from_its_record(root: CgroupRoot) -> None:
    cgroup = root.create("adopt", LIMITS)
    cgroup.start_counting()
    child = start(cgroup, HOG)
    await asyncio.to_thread(finish, child)
    again = CgroupRoot.detect(root.node, layout=root.layout).adopt(cgroup.to_record())
    assert again.oom_kills() == 1
    assert dict(again.paths) == dict(cgroup.paths)


async def test_limits_are_written_and_a_refused_one_leaves_nothing(root: CgroupRoot) -> None:
    with pytest.raises(OSError, match=r"cpu\.(cfs_quota_us|max)"):
        root.create("bad", Limits(cpus=1e12, memory_bytes=64 * MIB, pids=8))
    assert "bad" not in root.names()


async def test_reuse_starts_from_zero(root: CgroupRoot) -> None:
    pool = CgroupPool(root, size=1)
    first = pool.take(LIMITS)
    fd = first.open_delegated(4242, 4242)
    if fd >= 0:
        os.mkdir("exec-1", dir_fd=fd)
        os.close(fd)
        assert Path(first.unified).stat().st_uid == 4242
    child = start(first, HOG)
    await asyncio.to_thread(finish, child)
    assert first.oom_kills() == 1
    await pool.give_back(first)
    assert pool.idle == 1
    second = pool.take(Limits(cpus=0.5, memory_bytes=128 * MIB, pids=64, best_effort=True))
    assert second.name == first.name
    stats = second.stats()
    assert (stats.oom_kills, stats.pids_current) == (0, 0)
    assert stats.cpu_usage_s < 0.05
    if second.unified:
        assert not (Path(second.unified) / "exec-1").exists()
        assert Path(second.unified).stat().st_uid == 0
    await pool.give_back(second)
    await pool.close()
    assert root.names() == []


async def test_a_set_in_use_is_not_reused(root: CgroupRoot) -> None:
    pool = CgroupPool(root, size=4)
    cgroup = pool.take(LIMITS)
    child = start(cgroup, "import time\ntime.sleep(30)")
    with pytest.raises(DeadlineExceeded):
        await pool.give_back(cgroup, timeout_s=0.2)
    assert pool.idle == 0
    await cgroup.kill(timeout_s=10)
    await asyncio.to_thread(finish, child)
    await pool.give_back(cgroup)
    # cgroup.kill spends a cgroup2 directory: clones into it would die at birth
    assert pool.idle == (0 if cgroup.unified else 1)
    await pool.close()


async def test_fast_moves_stay_on() -> None:
    assert enable_fast_moves() == ""
    assert is_moving_fast()
    assert enable_fast_moves() == ""
