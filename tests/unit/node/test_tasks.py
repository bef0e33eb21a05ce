"""Rules of a cluster's tasks, grants and calls that need no sandbox: starts that hang, allocations that are gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from libdsec.errors import DeadlineExceeded, NotFoundError, StateError
from libdsec.wire_tasks import GrantRequest, StopTaskRequest, TaskRequest, task_key

from nomad_dsec.node import tasks as room
from nomad_dsec.node.task_sweep import TaskSweep


def request(task_id: str = "alloc/t/1", **more: object) -> TaskRequest:
    return TaskRequest(task_id=task_id, alloc_id="alloc", task_name="t", image="debian", argv=["true"], **more)


async def test_a_start_that_hangs_ends_by_its_own_limit_and_leaves_nothing(machine, monkeypatch):
    """P16: retryable, and whoever asked was told before it gave up."""
    monkeypatch.setattr(room, "START_SLACK_S", 0.05)
    machine.world.gate = asyncio.Event()
    async with machine.daemon() as parts:
        with pytest.raises(DeadlineExceeded, match="did not run within") as caught:
            await parts.tasks.start(task_key("alloc/t/1"), request(start_timeout_s=0.05))
        assert caught.value.code == "start_timeout"
        assert caught.value.retry_after_s
        assert machine.world.alive == {}
        assert parts.tasks.live == {}
        assert list(parts.node.journal.records("task")) == []


async def test_a_stop_during_a_start_that_hangs_completes(machine):
    """P16: `job stop` does not wait for what never comes."""
    machine.world.gate = asyncio.Event()
    key = task_key("alloc/t/1")
    async with machine.daemon() as parts, asyncio.timeout(20):
        starting = asyncio.ensure_future(parts.tasks.start(key, request()))
        while not machine.world.starting:
            await asyncio.sleep(0)
        await parts.tasks.stop(key, StopTaskRequest(timeout_s=5.0))
        with pytest.raises(StateError, match="stopped while it was started"):
            await starting
        assert machine.world.alive == {}
        with pytest.raises(NotFoundError):
            parts.tasks.get(key)


def sweep_of(parts) -> TaskSweep:
    return TaskSweep(parts.node.clock, parts.tasks, {"task": parts.tasks, "grant": parts.grants})


async def put_grant(parts, name: str, home: Path) -> str:
    key = task_key(name)
    await parts.grants.put(key, GrantRequest(task_id=name, alloc_id=name, home=str(home), cpus=1, memory_mib=512))
    return key


async def test_a_grant_whose_allocation_is_gone_is_withdrawn_at_the_second_look(machine, tmp_path):
    machine.settings["capacity"] = "granted"
    lost, kept = tmp_path / "lost", tmp_path / "kept"
    lost.mkdir()
    kept.mkdir()
    async with machine.daemon() as parts:
        await put_grant(parts, "a", lost)
        await put_grant(parts, "b", kept)
        await put_grant(parts, "c", Path("/"))  # of a host that told no directory of its own
        total = parts.node.capacity.totals.cpus
        sweep = sweep_of(parts)
        assert await sweep.sweep(set()) == set()
        lost.rmdir()
        missing = await sweep.sweep(set())
        assert missing == {("grant", task_key("a"))}
        assert len(parts.grants.ls().grants) == 3  # a client may make its directories anew
        assert await sweep.sweep(missing) == set()
        assert sorted(grant.task_id for grant in parts.grants.ls().grants) == ["b", "c"]
        assert parts.node.capacity.totals.cpus == pytest.approx(total * 2 / 3)


async def test_one_that_will_not_go_does_not_hold_up_the_others(machine, tmp_path):
    class Stubborn:
        def homes(self) -> dict[str, str]:
            return {"x": str(tmp_path / "gone")}

        async def destroy(self, key: str, *, force: bool) -> None:
            raise StateError("stuck", f"{key} stays, {force=}")

    machine.settings["capacity"] = "granted"
    async with machine.daemon() as parts:
        key = await put_grant(parts, "a", tmp_path / "gone")
        sweep = TaskSweep(parts.node.clock, parts.tasks, {"stubborn": Stubborn(), "grant": parts.grants})
        await sweep.sweep(await sweep.sweep(set()))
        with pytest.raises(NotFoundError):
            parts.grants.get(key)


async def test_ended_tasks_are_forgotten_in_time(machine):
    async with machine.daemon() as parts:
        tasks = parts.tasks
        for number, age_s in enumerate((1.0, 8 * 24 * 3600.0)):
            row = room.TaskRow(key=f"k{number}", task_id=f"t{number}", sandbox="", state="exited")
            task = tasks.live[row.key] = room.LiveTask(row=row)
            task.exited.set()
            await tasks.save(task, completed_at=machine.clock.now() - age_s)
        await sweep_of(parts)._forget_ended()
        assert list(tasks.live) == ["k0"]
