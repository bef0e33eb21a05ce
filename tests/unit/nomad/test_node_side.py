"""The pure parts below tasks, calls and grants: events, room, ends, mounts."""

from __future__ import annotations

import asyncio

import pytest
from libdsec.errors import CapacityError, PlatformError, UsageError
from libdsec.wire_fncall import FnResult
from libdsec.wire_tasks import HostMount

from nomad_dsec.clock import SYSTEM
from nomad_dsec.node.capacity import Capacity, Need, Totals
from nomad_dsec.node.task_calls import ending, summary
from nomad_dsec.node.task_events import KEPT, EventRing
from nomad_dsec.node.task_logs import LogSink
from nomad_dsec.node.tasks import checked_mounts

NEED = Need(cpus=1.0, memory_mib=100)


async def test_events_are_bounded_and_numbered():
    """P38: who never reads costs a bounded amount, and learns of the gap by the numbers."""
    ring = EventRing(SYSTEM)
    start = (await ring.since(-1, timeout_s=0)).next
    for number in range(KEPT + 50):
        ring.add("t", "a", "n", f"event {number}")
    found = await ring.since(start, timeout_s=0)
    assert len(found.events) == KEPT
    assert found.events[0].seq == start + 50
    assert found.next == start + KEPT + 50
    assert (await ring.since(found.next, timeout_s=0)).events == []


async def test_a_waiting_reader_is_woken():
    ring = EventRing(SYSTEM)
    waiting = asyncio.create_task(ring.since(-1, timeout_s=30))
    await asyncio.sleep(0)
    ring.add("t", "a", "n", "news")
    assert [event.message for event in (await waiting).events] == ["news"]


def test_a_restarted_ring_goes_on_above_the_old_one():
    class At:
        def __init__(self, now: float) -> None:
            self._now = now

        def now(self) -> float:
            return self._now

        def monotonic(self) -> float:
            return self._now

    before, after = EventRing(At(100.0)), EventRing(At(101.0))
    for _ in range(10):
        before.add("t", "a", "n", "x")
    assert before._next < after._next


def granted() -> Capacity:
    made = Capacity(Totals(cpus=64, memory_mib=9999, sandboxes=10), granted=True, cpu_factor=2.0, memory_factor=1.5)
    made.lend(cpus=0.0, memory_mib=0)
    return made


def test_granted_room_is_what_is_lent_times_overcommit():
    room = granted()
    with pytest.raises(CapacityError):
        room.promise_group(["a"], NEED, all_or_none=True)
    room.lend(cpus=1.0, memory_mib=200)
    assert (room.totals.cpus, room.totals.memory_mib) == (2.0, 300)
    assert room.promise_group(["a", "b"], NEED, all_or_none=True) == ["a", "b"]
    assert not room.is_over
    room.lend(cpus=0.5, memory_mib=200)
    assert room.is_over
    assert room.room_for(NEED, 1) == 0  # no new starts at once
    room.release("a")
    assert not room.is_over


def test_a_tasks_own_sandbox_is_not_counted_in_a_granted_room():
    room = granted()
    assert room.promise_group(["t"], NEED, all_or_none=True, outside=True) == ["t"]
    assert (room.cpus_used, room.memory_mib_used, room.sandboxes) == (0.0, 0, 1)
    room.release("t")
    assert room.sandboxes == 0


def test_in_a_static_room_it_is():
    room = Capacity(Totals(cpus=1, memory_mib=100, sandboxes=10))
    room.lend(cpus=50, memory_mib=5000)  # changes nothing
    assert room.promise_group(["t"], NEED, all_or_none=True, outside=True) == ["t"]
    with pytest.raises(CapacityError):
        room.promise_group(["u"], NEED, all_or_none=True, outside=True)


@pytest.mark.parametrize(
    ("result", "exit_code", "signal", "oom", "error"),
    [
        (FnResult(verdict="accepted", exit_code=0), 0, None, False, ""),
        (FnResult(verdict="runtime_error", exit_code=3), 3, None, False, ""),
        (FnResult(verdict="memory_limit", signal=9), None, 9, True, ""),
        (FnResult(verdict="wrong_answer", exit_code=0), 0, None, False, "verdict wrong_answer"),
        (FnResult(verdict="compile_error", message="bad"), None, None, False, "verdict compile_error: bad"),
    ],
)
def test_a_calls_end_is_the_programs_own(result, exit_code, signal, oom, error):
    changes = ending(result)
    assert (changes["exit_code"], changes["signal"], changes["oom_killed"]) == (exit_code, signal, oom)
    assert changes.get("error", "") == error
    assert summary(result).startswith(f"dsec-fncall: {result.verdict}")


def test_mounts_are_judged_by_their_true_path(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "a").mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (good,) = checked_mounts([HostMount(host_path=str(root / "a"), task_path="/a")], (str(root),))
    assert good.host_path == str((root / "a").resolve())
    for path in (root / "link", outside, root / "a/../../outside"):
        with pytest.raises(UsageError, match="allowed root"):
            checked_mounts([HostMount(host_path=str(path), task_path="/a")], (str(root),))
    with pytest.raises(PlatformError) as caught:
        checked_mounts([HostMount(host_path=str(root / "none"), task_path="/a")], (str(root),))
    assert caught.value.retry_after_s is not None
    with pytest.raises(UsageError):
        checked_mounts([HostMount(host_path=str(root / "a"), task_path="/proc/x")], (str(root),))


@pytest.mark.parametrize("path", ["relative", "/a/../b"])
def test_log_paths_are_absolute(path):
    with pytest.raises(UsageError, match="absolute"):
        LogSink.open(path, "stdout_path")
