"""What we do when it is our side that fails: lanes that die idle, in a call, with their zygote; damaged caches."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.abilities import needs

if TYPE_CHECKING:
    from nomad_dsec.backends.fncall.lane import Lane
    from tests.kit.calls import CallHost

pytestmark = [
    needs("root", "erofs", "cgroup", "filters", "debootstrap", "debian-packages"),
    pytest.mark.leaks_ok,
    pytest.mark.timeout(300),
]


async def idle_lanes(calls: CallHost) -> list[Lane]:
    for _ in range(500):
        lines = calls.lanes.pool._lines.values()
        if not any(line.starting or line.busy for line in lines):
            break
        await asyncio.sleep(0.01)
    return [lane for line in calls.lanes.pool._lines.values() for lane in line.idle]


def processes(lane: Lane, name: str) -> list[int]:
    cgroup = lane._live.cgroup
    assert cgroup is not None
    return [pid for pid in cgroup.pids() if Path(f"/proc/{pid}/comm").read_text().strip() == name]


async def test_idle_lanes_that_died_are_passed_over(calls: CallHost) -> None:
    """PID 1 of every lane is killed from outside: calls go on, on new ones."""
    assert (await calls.python("print(1)")).verdict == "accepted"
    lanes = await idle_lanes(calls)
    for lane in lanes:
        os.kill(lane._live.pid, signal.SIGKILL)
    results = await asyncio.gather(*(calls.python("print(2)") for _ in range(6)))
    assert {result.stdout for result in results} == {b"2\n"}
    assert all(lane.broken for lane in lanes)


async def test_a_call_whose_lane_dies_is_begun_again(calls: CallHost) -> None:
    """Once: it keeps no state. A second death is told as a fault, not as a grade."""
    assert (await calls.python("print(1)")).verdict == "accepted"
    deaths = 0

    async def kill_busy(times: int) -> None:
        nonlocal deaths
        for _ in range(times):
            for _ in range(1000):
                found = [lane for lane in calls.backend._live.values() if spinning(lane)]
                if found:
                    break
                await asyncio.sleep(0.01)
            os.kill(found[0].pid, signal.SIGKILL)
            deaths += 1
            await asyncio.sleep(0.1)

    def spinning(live: object) -> bool:
        pids = live.cgroup.pids() if live.cgroup else []  # type: ignore[attr-defined]
        return any(
            b"marked" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if Path(f"/proc/{pid}").exists()
        )

    again = asyncio.ensure_future(calls.run(argv=["sh", "-c", "sleep 2; echo marked"]))
    await kill_busy(1)
    assert (await again).stdout == b"marked\n"
    lost = asyncio.ensure_future(calls.run(argv=["sh", "-c", "sleep 3; echo marked"]))
    await kill_busy(2)
    result = await lost
    assert (result.verdict, result.exit_code, result.signal) == ("internal_error", None, None)
    assert deaths == 3


async def test_a_dead_zygote_is_no_verdict(calls: CallHost) -> None:
    """The next call finds out, and is run in another lane."""
    assert (await calls.python("print(1)")).verdict == "accepted"
    for lane in await idle_lanes(calls):
        for pid in processes(lane, "python3"):
            os.kill(pid, signal.SIGKILL)
    results = [await calls.python("print(3)") for _ in range(4)]
    assert [result.stdout for result in results] == [b"3\n"] * 4, results


async def test_a_damaged_cache_entry_is_compiled_again(calls: CallHost) -> None:
    """And an empty memory finds on disk what an earlier daemon compiled."""
    source = {"language": "c", "code": "int main(void) { return 0; } /* damaged */"}
    assert (await calls.run(**source)).verdict == "accepted"
    cache = calls.lanes._cache
    cache.close()
    kept = await calls.run(**source)
    assert kept.compile is not None
    assert kept.compile.cached
    cache.close()
    for path in cache._directory.glob("*/*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    again = await calls.run(**source)
    assert again.verdict == "accepted"
    assert again.compile is not None
    assert not again.compile.cached
