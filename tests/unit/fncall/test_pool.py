"""The pool of lanes on lanes of paper: exactly-once hand-out, the marks, replacement."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from libdsec.errors import CapacityError, PlatformError

from nomad_dsec.backends.fncall.pool import LaneKind, LanePool, Marks

if TYPE_CHECKING:
    from collections.abc import Coroutine

A, B = LaneKind(digest="a"), LaneKind(digest="b")


class PaperLane:
    def __init__(self, name: str) -> None:
        self.name = name
        self.broken = ""
        self.calls = 0
        self.closed = False

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed = True


class Paper:
    """A pool and all the lanes it ever made."""

    def __init__(self, **marks: Any) -> None:
        self.made: list[PaperLane] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.fails = False
        values = {"target": 2, "low": 1, "high": 3} | marks
        self.pool: LanePool[PaperLane] = LanePool(Marks(**values), self.start, self.spawn)

    async def start(self, kind: LaneKind) -> PaperLane:
        await asyncio.sleep(0)
        if self.fails:
            raise PlatformError("lane_failed", "on paper")
        self.made.append(PaperLane(f"{kind.digest}{len(self.made)}"))
        return self.made[-1]

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def settle(self) -> None:
        while self.tasks:
            await asyncio.gather(*self.tasks)

    @property
    def open(self) -> int:
        return sum(not lane.closed for lane in self.made)


async def test_a_lane_has_one_user_at_a_time() -> None:
    paper = Paper(target=4, low=4, high=4)
    held: set[str] = set()

    async def use() -> None:
        lane = await paper.pool.take(A, timeout_s=10)
        assert lane.name not in held
        held.add(lane.name)
        await asyncio.sleep(0)
        held.discard(lane.name)
        paper.pool.give_back(A, lane)

    await asyncio.gather(*(use() for _ in range(50)))
    await paper.settle()
    assert paper.open == len(paper.made) <= 4
    assert paper.pool.lanes == paper.open


async def test_refill_stops_at_the_target_and_the_high_mark() -> None:
    paper = Paper(target=2, low=1, high=3)
    first = await paper.pool.take(A, timeout_s=1)
    paper.pool.give_back(A, first)
    again = await paper.pool.take(A, timeout_s=1)
    assert again is first
    await paper.settle()
    assert paper.pool.count(A) == 3
    for _ in range(3):
        lane = await paper.pool.take(A, timeout_s=1)
        paper.pool.give_back(A, lane)
        await paper.settle()
    assert paper.pool.lanes == 3


async def test_another_kind_makes_room() -> None:
    paper = Paper(target=0, low=0, high=2)
    lanes = [await paper.pool.take(A, timeout_s=1) for _ in range(2)]
    with pytest.raises(CapacityError) as full:
        await paper.pool.take(B, timeout_s=0)
    assert full.value.code == "lanes_busy"
    for lane in lanes:
        paper.pool.give_back(A, lane)
    other = await paper.pool.take(B, timeout_s=1)
    await paper.settle()
    assert other.name.startswith("b")
    assert paper.pool.lanes == paper.open == 2


async def test_waiters_get_what_is_given_back() -> None:
    paper = Paper(target=0, low=0, high=1)
    lane = await paper.pool.take(A, timeout_s=1)
    waiting = asyncio.ensure_future(paper.pool.take(A, timeout_s=10))
    await asyncio.sleep(0)
    paper.pool.give_back(A, lane)
    assert await waiting is lane


@pytest.mark.parametrize("why", ["broken", "worn"])
async def test_a_spent_lane_is_replaced(why: str) -> None:
    paper = Paper(target=0, low=0, high=1, calls_max=10)
    lane = await paper.pool.take(A, timeout_s=1)
    lane.broken = "left something" if why == "broken" else ""
    lane.calls = 10
    paper.pool.give_back(A, lane)
    other = await paper.pool.take(A, timeout_s=1)
    assert other is not lane
    assert lane.closed
    assert paper.pool.replaced == (1 if why == "broken" else 0)


async def test_a_failed_start_is_told_and_forgotten() -> None:
    paper = Paper()
    paper.fails = True
    with pytest.raises(PlatformError):
        await paper.pool.take(A, timeout_s=1)
    paper.fails = False
    assert (await paper.pool.take(A, timeout_s=1)).name == "a0"


async def test_what_nobody_asks_for_goes() -> None:
    paper = Paper(target=0, low=0, idle_s=0.0)
    lane = await paper.pool.take(A, timeout_s=1)
    assert paper.pool.cull() == 0
    paper.pool.give_back(A, lane)
    assert paper.pool.cull() == 1
    await paper.settle()
    assert (paper.pool.lanes, paper.open) == (0, 0)


async def test_close_ends_idle_lanes_at_once_and_busy_ones_later() -> None:
    paper = Paper(target=0, low=0)
    busy, idle = [await paper.pool.take(A, timeout_s=1) for _ in range(2)]
    paper.pool.give_back(A, idle)
    await paper.pool.close()
    assert (busy.closed, idle.closed) == (False, True)
    paper.pool.give_back(A, busy)
    await paper.settle()
    assert busy.closed
    with pytest.raises(CapacityError):
        await paper.pool.take(A, timeout_s=1)


async def test_a_lane_that_died_idle_is_passed_over() -> None:
    paper = Paper(target=0, low=0)
    lanes = [await paper.pool.take(A, timeout_s=1) for _ in range(2)]
    for lane in lanes:
        paper.pool.give_back(A, lane)
    lanes[1].broken = "died"
    assert await paper.pool.take(A, timeout_s=1) is lanes[0]
    await paper.settle()
    assert lanes[1].closed
    assert paper.pool.replaced == 1
