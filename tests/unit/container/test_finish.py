"""Work that is finished although its caller is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from nomad_dsec.backends.container.finish import finish


async def test_the_result_and_the_error_come_through():
    async def good():
        return 7

    async def bad():
        raise ValueError("no")

    assert await finish(good()) == 7
    with pytest.raises(ValueError, match="no"):
        await finish(bad())


async def test_a_cancelled_caller_waits_and_is_cancelled_afterwards():
    gate, done = asyncio.Event(), asyncio.Event()

    async def work():
        await gate.wait()
        done.set()

    caller = asyncio.ensure_future(finish(work()))
    for _ in range(3):  # again and again
        await asyncio.sleep(0)
        caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done.is_set()


async def test_a_failure_gives_way_to_the_cancellation():
    gate = asyncio.Event()

    async def work():
        await gate.wait()
        raise ValueError("no")

    caller = asyncio.ensure_future(finish(work()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
