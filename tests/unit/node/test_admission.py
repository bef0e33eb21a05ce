"""Capacity and the start queue: numbers never drift, order is kept, each refusal has its name."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libdsec.errors import CapacityError

from nomad_dsec.node.admission import LATENCY_TURNS, StartQueue
from nomad_dsec.node.capacity import Capacity, Need, Totals, detect_totals

TOTALS = Totals(cpus=8.0, memory_mib=4096, sandboxes=10)


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0.01, 4), st.integers(16, 1024), st.booleans()), max_size=60))
def test_promises_are_the_sum_of_what_stands_and_never_above_the_totals(steps):
    capacity, standing = Capacity(TOTALS), {}
    for number, cpus, memory, give_back in steps:
        name = f"s{number}"
        if give_back:
            capacity.release(name)
            standing.pop(name, None)
            continue
        need = Need(cpus=cpus, memory_mib=memory)
        try:
            taken = capacity.promise_group([name], need, all_or_none=True)
        except CapacityError as refused:
            assert refused.code == "capacity"
            assert refused.details["room"] == 0
            continue
        if taken:
            standing[name] = need
        assert capacity.cpus_used == pytest.approx(sum(n.cpus for n in standing.values()))
        assert capacity.memory_mib_used == sum(n.memory_mib for n in standing.values()) <= TOTALS.memory_mib
        assert capacity.sandboxes == len(standing) <= TOTALS.sandboxes
        assert capacity.cpus_used <= TOTALS.cpus + 1e-6


def test_a_gang_takes_all_or_nothing_and_others_take_what_fits():
    capacity = Capacity(TOTALS)
    need = Need(cpus=1.0, memory_mib=1000)
    names = [f"s{i}" for i in range(6)]
    with pytest.raises(CapacityError) as refused:
        capacity.promise_group(names, need, all_or_none=True)
    assert refused.value.details["room"] == 4
    assert refused.value.details["free"]["memory_mib"] == 4096
    assert capacity.sandboxes == 0
    assert capacity.promise_group(names, need, all_or_none=False) == names[:4]


def test_settings_win_over_the_machine_and_overcommit_multiplies():
    given_ = {"sandboxes": 5, "cpu_overcommit": 4.0, "memory_overcommit": 2.0}
    machine = {"machine_cpus": 2, "machine_memory_mib": 10_000}
    assert detect_totals(cpus=0, memory_mib=0, **given_, **machine) == Totals(cpus=8, memory_mib=18_000, sandboxes=5)
    assert detect_totals(cpus=1.5, memory_mib=100, **given_, **machine) == Totals(cpus=6, memory_mib=200, sandboxes=5)


async def _hold(queue, qos, order, name, release):
    async with queue.turn(qos, timeout_s=30):
        order.append(name)
        await release.wait()


async def test_latency_sensitive_go_first_but_best_effort_is_not_starved():
    queue, order, release = StartQueue(starting_max=1, queue_max=100), [], asyncio.Event()
    tasks = [asyncio.create_task(_hold(queue, "latency_sensitive", order, "first", release))]
    await asyncio.sleep(0)
    lines = [("best_effort", f"b{i}") for i in range(3)] + [("latency_sensitive", f"l{i}") for i in range(20)]
    tasks += [asyncio.create_task(_hold(queue, qos, order, name, release)) for qos, name in lines]
    await asyncio.sleep(0)
    assert queue.waiting == 23
    release.set()
    await asyncio.gather(*tasks)
    assert order[1] == "l0"
    assert [name for name in order if name[0] == "l"] == [f"l{i}" for i in range(20)]
    assert order.index("b0") <= LATENCY_TURNS
    assert queue.starting == queue.waiting == 0


async def test_refusals_of_the_queue_have_names_and_numbers():
    queue, release = StartQueue(starting_max=1, queue_max=1), asyncio.Event()
    holder = asyncio.create_task(_hold(queue, "best_effort", [], "a", release))
    await asyncio.sleep(0)
    with pytest.raises(CapacityError) as refused:
        queue.check(2)
    assert refused.value.code == "queue_full"
    assert refused.value.details == {"starting": 1, "starting_max": 1, "waiting": 0, "queue_max": 1, "asked": 2}
    queue.check(1)
    with pytest.raises(CapacityError) as late:
        async with queue.turn("latency_sensitive", timeout_s=0.001):
            pass
    assert late.value.code == "queue_deadline"
    no_queue = StartQueue(starting_max=0, queue_max=0)
    with pytest.raises(CapacityError) as limit:
        no_queue.check(1)
    assert limit.value.code == "starting_limit"
    release.set()
    await holder
    assert queue.starting == queue.waiting == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), min_size=1, max_size=25), st.integers(1, 3))
def test_slots_survive_any_cancelling(plan, starting_max):
    async def scenario():
        queue, most = StartQueue(starting_max=starting_max, queue_max=1000), 0

        async def work(rounds):
            nonlocal most
            async with queue.turn("best_effort" if rounds % 2 else "latency_sensitive", timeout_s=30):
                most = max(most, queue.starting)
                for _ in range(rounds):
                    await asyncio.sleep(0)

        tasks = []
        for cancel, rounds in plan:
            tasks.append(asyncio.create_task(work(rounds)))
            await asyncio.sleep(0)
            if cancel:
                tasks[rounds % len(tasks)].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert queue.starting == 0
        assert queue.waiting == 0
        assert most <= starting_max

    asyncio.run(scenario())
