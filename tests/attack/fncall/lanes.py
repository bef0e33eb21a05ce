"""The lanes behind the calls of these tests, and what may live in them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nomad_dsec.backends.fncall.lane import Lane
    from nomad_dsec.backends.fncall.pool import LaneKind
    from tests.kit.calls import CallHost

#: dsec-init, the reaper of the next call, and the zygote if there is one.
OWN_PROCESSES = {"dsec-init", "dsec-call", "python3"}


def lanes_of(calls: CallHost) -> list[tuple[LaneKind, Lane]]:
    """Every idle lane."""
    return [(kind, lane) for kind, line in calls.lanes.pool._lines.items() for lane in line.idle]


async def settled(calls: CallHost) -> list[tuple[LaneKind, Lane]]:
    """The idle lanes once nothing is started any more."""
    for _ in range(500):
        if not any(line.starting or line.busy for line in calls.lanes.pool._lines.values()):
            break
        await asyncio.sleep(0.01)
    return lanes_of(calls)


def processes(lane: Lane) -> set[str]:
    """Names of what lives in a lane."""
    cgroup = lane._live.cgroup
    assert cgroup is not None
    return {Path(f"/proc/{pid}/comm").read_text().strip() for pid in cgroup.pids()}


async def assert_clean(calls: CallHost) -> None:
    """Nothing but our own processes lives, and no lane had to be given up."""
    for _, lane in await settled(calls):
        for _ in range(200):
            if processes(lane) <= OWN_PROCESSES and len(lane._live.cgroup.pids()) <= 3:  # type: ignore[union-attr]
                break
            await asyncio.sleep(0.01)
        assert processes(lane) <= OWN_PROCESSES
        assert len(lane._live.cgroup.pids()) <= 3  # type: ignore[union-attr]
    assert calls.lanes.pool.replaced == 0
