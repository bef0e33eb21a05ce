"""The queue of calls: bounded, fair between namespaces, with turns that are never lost. And calls joined by id."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from libdsec.errors import CapacityError, StateError

from nomad_dsec.backends.fncall.flights import Flights
from nomad_dsec.backends.fncall.queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any


async def hold(queue: FairQueue, namespace: str, order: list[str], release: asyncio.Event) -> None:
    async with queue.turn(namespace, timeout_s=10):
        order.append(namespace)
        await release.wait()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_one_turn_each_round() -> None:
    queue = FairQueue(running_max=1, waiting_max=100)
    release, order = asyncio.Event(), list[str]()
    first = asyncio.ensure_future(hold(queue, "x", order, release))
    await settle()
    waiting = [asyncio.ensure_future(hold(queue, name, order, release)) for name in ("a", "a", "a", "b", "b", "c")]
    await settle()
    assert (queue.running, queue.waiting) == (1, 6)
    release.set()
    await asyncio.gather(first, *waiting)
    assert order == ["x", "a", "b", "c", "a", "b", "a"]
    assert (queue.running, queue.waiting) == (0, 0)


async def test_a_full_queue_says_when_to_come_back() -> None:
    queue = FairQueue(running_max=1, waiting_max=2)
    release, order = asyncio.Event(), list[str]()
    tasks = [asyncio.ensure_future(hold(queue, "a", order, release)) for _ in range(3)]
    await settle()
    with pytest.raises(CapacityError) as busy:
        async with queue.turn("b", timeout_s=10):
            pass
    assert busy.value.code == "queue_full"
    assert busy.value.retry_after_s is not None
    assert busy.value.retry_after_s > 0
    assert busy.value.details == {"running": 1, "waiting": 2, "waiting_max": 2}
    release.set()
    await asyncio.gather(*tasks)


async def test_a_deadline_and_a_cancel_leave_no_trace() -> None:
    queue = FairQueue(running_max=1, waiting_max=10)
    release, order = asyncio.Event(), list[str]()
    first = asyncio.ensure_future(hold(queue, "a", order, release))
    await settle()
    with pytest.raises(CapacityError) as late:
        async with queue.turn("b", timeout_s=0):
            pass
    assert late.value.code == "queue_deadline"
    gone = asyncio.ensure_future(hold(queue, "c", order, release))
    await settle()
    gone.cancel()
    await settle()
    assert (queue.running, queue.waiting) == (1, 0)
    release.set()
    await first
    assert queue.running == 0


async def test_a_turn_given_to_one_who_leaves_goes_on_to_the_next() -> None:
    queue = FairQueue(running_max=1, waiting_max=10)
    release, order = asyncio.Event(), list[str]()
    release.set()
    async with queue.turn("x", timeout_s=10):
        second = asyncio.ensure_future(hold(queue, "a", order, release))
        third = asyncio.ensure_future(hold(queue, "b", order, release))
        await settle()
    second.cancel()  # the turn is its already, but it has not run since
    await third
    assert order == ["b"]
    assert (queue.running, queue.waiting) == (0, 0)


def spawn(name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work, name=name)


async def test_the_same_id_joins() -> None:
    flights = Flights(spawn)
    ran, release = [], asyncio.Event()

    async def work() -> str:
        ran.append(1)
        await release.wait()
        return "done"

    joined = [asyncio.ensure_future(flights.join("ns", "id", work)) for _ in range(3)]
    other = asyncio.ensure_future(flights.join("other", "id", work))
    await settle()
    joined[0].cancel()  # one of three leaves: the call goes on
    await settle()
    release.set()
    assert await joined[1] == await joined[2] == await other == "done"
    assert len(ran) == 2
    assert not flights.cancel("ns", "id")


async def test_it_ends_with_its_last_waiter_or_by_a_cancel() -> None:
    flights = Flights(spawn)
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    left = asyncio.ensure_future(flights.join("ns", "a", work))
    await settle()
    left.cancel()
    await settle()
    assert ended == [1]
    told = asyncio.ensure_future(flights.join("ns", "b", work))
    await settle()
    assert not flights.cancel("other", "b")
    assert flights.cancel("ns", "b")
    with pytest.raises(StateError) as cancelled:
        await told
    assert cancelled.value.code == "cancelled"
    assert ended == [1, 1]
