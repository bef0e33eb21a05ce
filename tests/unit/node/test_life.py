"""Verbs, timers, ends with true reasons, and recovery after each way in which a daemon may have died."""

from __future__ import annotations

import asyncio

import pytest
from libdsec.errors import CapacityError, PlatformError, StateError, UsageError

from nomad_dsec.node.core import Limits
from nomad_dsec.node.journal import Journal
from nomad_dsec.node.row import replace
from tests.unit.node.conftest import create_request, sandbox_id

ONE = sandbox_id(1)


async def _make(parts, *numbers, **spec):
    reply, groups = await parts.creator.create(create_request(*numbers, **spec))
    parts.creator.delivered(groups)
    return reply


async def _until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_pause_and_resume_are_journaled_and_repeatable(machine):
    async with machine.daemon() as parts:
        await _make(parts)
        for _ in range(3):
            assert (await parts.verbs.pause(ONE)).state == "paused"
            assert (await parts.verbs.pause(ONE)).state == "paused"
            assert machine.world.alive[ONE] == "paused"
            with pytest.raises(StateError) as caught:
                await parts.execs.open(parts.node.entry(ONE))
            assert caught.value.hint == "resume it first"
            assert (await parts.verbs.resume(ONE)).state == "running"
            assert (await parts.verbs.resume(ONE)).state == "running"
        assert parts.node.entry(ONE).row.incarnation == 4
        await parts.verbs.pause(ONE)
    async with machine.daemon() as parts:
        assert parts.node.entry(ONE).row.state == "paused"
        assert (await parts.verbs.resume(ONE)).state == "running"
        await parts.verbs.pause(ONE)
        assert (await parts.verbs.kill(ONE)).reason == "killed"
        assert machine.world.alive == {}


async def test_pause_and_resume_at_once_are_carried_out_in_order(machine):
    async with machine.daemon() as parts:
        await _make(parts)
        for _ in range(20):
            await asyncio.gather(parts.verbs.pause(ONE), parts.verbs.resume(ONE))
            assert machine.world.alive[ONE] == "running"
        acts = [verb for verb, _ in machine.world.log if verb in ("pause", "resume")]
        assert acts == ["pause", "resume"] * 20


async def test_a_failed_pause_leaves_it_running_and_a_failed_resume_paused(machine):
    async with machine.daemon() as parts:
        await _make(parts)
        machine.world.fail["pause"] = OSError(16, "busy")
        with pytest.raises(PlatformError) as caught:
            await parts.verbs.pause(ONE)
        assert caught.value.code == "pause_failed"
        assert parts.node.entry(ONE).row.state == "running"
        machine.world.fail.clear()
        await parts.verbs.pause(ONE)
        machine.world.fail["resume"] = OSError(16, "busy")
        with pytest.raises(PlatformError):
            await parts.verbs.resume(ONE)
        assert parts.node.entry(ONE).row.state == "paused"


async def test_a_verb_goes_on_when_its_client_leaves(machine):
    async with machine.daemon() as parts:
        await _make(parts)
        task = asyncio.create_task(parts.verbs.pause(ONE))
        await asyncio.sleep(0)
        task.cancel()
        await _until(lambda: parts.node.entry(ONE).row.state == "paused")
        task = asyncio.create_task(parts.verbs.kill(ONE))
        await asyncio.sleep(0)
        task.cancel()
        await parts.node.entry(ONE).ended.wait()
        assert machine.world.alive == {}


async def test_concurrent_kills_stop_once_and_the_first_reason_stands(machine):
    async with machine.daemon() as parts:
        await _make(parts)
        infos = await asyncio.gather(*(parts.verbs.kill(ONE, r) for r in ("evicted", "killed", "killed")))
        assert [info.reason for info in infos] == ["evicted"] * 3
        assert machine.world.log.count(("stop", ONE)) == 1
        with pytest.raises(UsageError):
            await parts.verbs.kill(ONE, "boredom")


async def test_what_will_not_go_stays_stopping_and_is_tried_again(machine):
    machine.limits = Limits(stop_retry_max_s=0.0)
    async with machine.daemon() as parts:
        await _make(parts)
        machine.world.fail["stop"] = OSError(16, "busy")
        with pytest.raises(PlatformError) as caught:
            await parts.verbs.kill(ONE)
        assert caught.value.code == "stop_failed"
        assert parts.node.entry(ONE).row.state == "stopping"
        assert parts.node.capacity.sandboxes == 1
        machine.world.fail.clear()
        parts.supervisor._retry_stops()
        await parts.node.entry(ONE).ended.wait()
        assert parts.node.entry(ONE).row.reason == "killed"
        assert b"dsec_node_stop_failures_total 1.0" in parts.node.metrics.render()


async def test_ttl_and_lease_end_it_with_their_reasons_and_renewals_hold(machine):
    async with machine.daemon() as parts:
        await _make(parts, 1, timeout_s=10)
        await _make(parts, 2, timeout_s=100, lease_s=10)
        await _make(parts, 3, timeout_s=100, lease_s=10)
        await parts.verbs.lease(sandbox_id(3), 30)
        machine.clock.at += 11
        await _until(lambda: set(machine.world.alive) == {sandbox_id(3)})
        await _until(lambda: parts.node.entry(ONE).ended.is_set() and parts.node.entry(sandbox_id(2)).ended.is_set())
        assert parts.node.entry(ONE).row.reason == "timeout"
        assert parts.node.entry(sandbox_id(2)).row.reason == "lease_expired"
        await parts.verbs.set_timeout(sandbox_id(3), 1)
        machine.clock.at += 2
        await _until(lambda: not machine.world.alive)
        assert parts.node.entry(sandbox_id(3)).row.reason == "timeout"


async def test_ttls_go_on_while_the_daemon_is_down(machine):
    async with machine.daemon() as parts:
        await _make(parts, 1, timeout_s=10)
        await _make(parts, 2, timeout_s=1000)
        await parts.verbs.pause(ONE)
    machine.clock.at += 20
    async with machine.daemon() as parts:
        await parts.node.entry(ONE).ended.wait()
        assert parts.node.entry(ONE).row.reason == "timeout"
        assert list(machine.world.alive) == [sandbox_id(2)]


async def test_it_ends_by_itself_with_the_reason_that_the_backend_saw(machine):
    async with machine.daemon() as parts:
        await _make(parts, 1, 2)
        machine.world.end(ONE, "oom", "its init was killed by the kernel")
        await parts.node.entry(ONE).ended.wait()
        row = parts.node.entry(ONE).row
        assert (row.state, row.reason, row.message) == ("exited", "oom", "its init was killed by the kernel")
        assert parts.node.capacity.sandboxes == 1
        await parts.verbs.pause(sandbox_id(2))
        machine.world.end(sandbox_id(2), "init_exited")
        await parts.node.entry(sandbox_id(2)).ended.wait()
        assert parts.node.entry(sandbox_id(2)).row.reason == "init_exited"


async def test_a_drain_with_a_deadline_evicts_and_is_remembered(machine):
    async with machine.daemon() as parts:
        await _make(parts, 1, 2)
        await parts.node.journal.put_fact("draining", "1")
        parts.supervisor.drain(on=True, deadline_s=5)
        machine.clock.at += 6
        await parts.supervisor._drain_due()
        assert {entry.row.reason for entry in parts.node.entries.values()} == {"evicted"}
    async with machine.daemon() as parts:
        assert parts.node.draining


async def test_ended_ones_are_forgotten_in_time_also_by_the_journal(machine):
    machine.limits = Limits(keep_ended_s=100)
    async with machine.daemon() as parts:
        await _make(parts, 1, 2)
        await parts.verbs.kill(ONE)
        machine.clock.at += 50
        await parts.supervisor._forget_old()
        assert ONE in parts.node.entries
        machine.clock.at += 51
        await parts.supervisor._forget_old()
        assert list(parts.node.entries) == [sandbox_id(2)]
    async with machine.daemon() as parts:
        assert list(parts.node.entries) == [sandbox_id(2)]


def _rewrite(machine, change):
    """Put the journal into the state that a daemon which died at some step left behind."""
    journal = Journal(machine.data / "journal.db")
    rows = journal.open()

    async def save():
        for row in rows:
            await journal.save(change(row), now=1.0, durable=True)

    asyncio.run(save())
    journal.close()


@pytest.mark.parametrize(
    ("found", "journaled", "state", "reason"),
    [
        ("running", {"state": "creating"}, "exited", "error(node_restart)"),
        (None, {"state": "creating"}, "exited", "error(node_restart)"),
        ("running", {"state": "running"}, "running", ""),
        ("running", {"state": "pausing"}, "running", ""),
        ("paused", {"state": "pausing"}, "paused", ""),
        ("paused", {"state": "paused"}, "paused", ""),
        ("paused", {"state": "resuming"}, "paused", ""),
        ("running", {"state": "resuming"}, "running", ""),
        ("exited", {"state": "running"}, "exited", "oom"),
        (None, {"state": "running"}, "lost", "node_lost"),
        (None, {"state": "paused"}, "lost", "node_lost"),
        ("running", {"state": "stopping", "reason": "timeout"}, "exited", "timeout"),
        (None, {"state": "stopping", "reason": "killed"}, "exited", "killed"),
        (None, {"state": "stopping", "reason": "node_lost", "end_state": "lost"}, "lost", "node_lost"),
    ],
)
def test_recovery_from_every_step(machine, found, journaled, state, reason):
    async def first_life():
        async with machine.daemon() as parts:
            await _make(parts, 1)

    asyncio.run(first_life())
    _rewrite(machine, lambda row: replace(row, **journaled))
    machine.world.alive = {} if found is None else {ONE: found}
    machine.world.alive["sb-n1-stray"] = "running"

    async def second_life():
        async with machine.daemon() as parts:
            row = parts.node.entry(ONE).row
            assert (row.state, row.reason) == (state, reason)
            live = row.state in ("running", "paused")
            assert machine.world.alive == ({ONE: row.state} if live else {})
            assert parts.node.capacity.sandboxes == int(live)
            assert b"dsec_node_orphans_found_total 1.0" in parts.node.metrics.render()
            if live:
                machine.world.end(ONE, "init_exited")
                await parts.node.entry(ONE).ended.wait()

    asyncio.run(second_life())


async def test_what_can_not_be_told_yet_is_kept_and_asked_again(machine, monkeypatch):
    monkeypatch.setattr("nomad_dsec.node.recovery.RETRY_S", 0.01)
    async with machine.daemon() as parts:
        await _make(parts, 1)
    machine.world.fail["recover"] = OSError(11, "try again")
    async with machine.daemon() as parts:
        entry = parts.node.entry(ONE)
        assert entry.row.state == "running"
        assert machine.world.alive == {ONE: "running"}
        machine.world.fail.clear()
        await _until(lambda: entry.watching is not None)
        machine.world.end(ONE, "oom")
        await entry.ended.wait()
        assert entry.row.reason == "oom"


async def test_a_full_disk_keeps_no_sandbox_alive(machine):
    async with machine.daemon() as parts:
        await _make(parts, 1)

        async def full(*_args, **_kwargs):
            raise PlatformError("journal_failed", "disk full")

        parts.node.journal.save = full
        assert (await parts.verbs.kill(ONE)).reason == "killed"
        assert machine.world.alive == {}
        with pytest.raises(PlatformError):
            await _make(parts, 2)
        assert machine.world.alive == {}


async def test_ends_that_a_full_disk_kept_out_are_written_later_and_creates_taken_again(machine):
    async with machine.daemon() as parts:
        await _make(parts)
        journal = parts.node.journal
        journal._db.execute("PRAGMA query_only=1")  # refuses as a full disk does
        await parts.verbs.kill(ONE)
        with pytest.raises(CapacityError) as caught:
            await _make(parts, 2)
        assert caught.value.code == "disk"
        with pytest.raises(PlatformError):
            await parts.supervisor._mend_journal()
        assert journal.unsaved == {ONE}
        journal._db.execute("PRAGMA query_only=0")
        await parts.supervisor._mend_journal()
        assert (journal.broken, journal.unsaved) == ("", set())
        await _make(parts, 2)
    async with machine.daemon() as parts:
        row = parts.node.entry(ONE).row
        assert (row.state, row.reason) == ("exited", "killed")
