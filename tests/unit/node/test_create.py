"""Creating: exactly one start per id, gangs whole or gone, clients that leave, limits, refusals."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libdsec.errors import CapacityError, DeadlineExceeded, DsecError, PlatformError, StateError, UsageError

from nomad_dsec.node.core import Limits
from tests.unit.node.conftest import Machine, create_request, sandbox_id


async def _make(parts, *numbers, **spec):
    reply, groups = await parts.creator.create(create_request(*numbers, **spec))
    parts.creator.delivered(groups)
    return reply


async def _settle():
    for _ in range(50):
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)


async def test_a_create_runs_is_journaled_and_says_what_it_took(machine):
    async with machine.daemon() as parts:
        reply = await _make(parts, 1, env={"A": "1"}, timeout_s=10, lease_s=5, labels={"k": "v"})
        (info,) = reply.sandboxes
        assert (info.state, info.node, info.namespace, info.labels) == ("running", "n1", "ns", {"k": "v"})
        assert info.expires_at == machine.clock.at + 10
        assert info.lease_expires_at == machine.clock.at + 5
        assert {"queue", "launch", "journal", "start"} <= set(info.timings_ms)
        assert parts.node.capacity.sandboxes == 1
    async with machine.daemon() as parts:
        assert parts.node.info(parts.node.entry(sandbox_id(1))) == info


async def test_the_same_id_again_joins_the_start_and_never_makes_a_second(machine):
    machine.world.gate = asyncio.Event()
    async with machine.daemon() as parts:
        tasks = [asyncio.create_task(_make(parts, 1, 2)) for _ in range(5)]
        tasks.append(asyncio.create_task(_make(parts, 2)))
        await _settle()
        machine.world.gate.set()
        replies = await asyncio.gather(*tasks)
        assert [len(reply.sandboxes) for reply in replies] == [2] * 5 + [1]
        assert machine.world.log.count(("start", sandbox_id(1))) == 1
        assert (await _make(parts, 1)).sandboxes[0].state == "running"
        await parts.verbs.kill(sandbox_id(1))
        assert (await _make(parts, 1)).sandboxes[0].reason == "killed"
        assert machine.world.log.count(("start", sandbox_id(1))) == 1


@pytest.mark.parametrize(
    "label",
    ["", ":80", "a b:80", "-a:80", "a-:80", "a.b", f"{'a' * 51}:80", "a:", "a:x", "a:0", "a:65536", "a:80:81", "a:٣"],
)
async def test_a_service_label_of_no_form_is_refused(machine, label):
    async with machine.daemon() as parts:
        with pytest.raises(UsageError, match="NAME:PORT") as caught:
            await _make(parts, 1, labels={"consul_service": label})
        assert (caught.value.code, caught.value.field) == ("bad_label", "labels.consul_service")
        assert not parts.node.entries
        for number, good in enumerate(("a", "web:1", "x-1:65535"), start=1):
            await _make(parts, number, labels={"consul_service": good})


async def test_ids_of_another_namespace_or_node_are_refused(machine):
    async with machine.daemon() as parts:
        await _make(parts, 1)
        with pytest.raises(UsageError) as caught:
            await parts.creator.create(create_request(1, namespace="other"))
        assert caught.value.code == "id_in_use"
        request = create_request(2)
        request.ids = ["sb-n2-aaaaaaaaaaaaaaaa"]
        with pytest.raises(UsageError) as caught:
            await parts.creator.create(request)
        assert caught.value.code == "wrong_node"
        for spec, field in (
            ({"policy": {"profil": "default"}}, "policy.profil"),
            ({"policy": "no-such"}, "policy.profile"),
            ({"hostname": "-x"}, "hostname"),
        ):
            with pytest.raises(UsageError) as caught:
                await parts.creator.create(create_request(3, **spec))
            assert caught.value.field == field
        assert list(parts.node.entries) == [sandbox_id(1)]


async def test_a_gang_with_a_failing_member_leaves_nothing_and_tells_why(machine):
    machine.world.fail[f"start:{sandbox_id(3)}"] = PlatformError("launch_failed", "no")
    async with machine.daemon() as parts:
        for _ in range(2):  # a repeat gets the same answer
            with pytest.raises(PlatformError) as caught:
                await _make(parts, 1, 2, 3, 4)
            assert caught.value.code == "launch_failed"
            assert caught.value.details["step"] == "launch"
        assert machine.world.alive == {}
        assert parts.node.capacity.sandboxes == 0
        assert machine.world.log.count(("start", sandbox_id(3))) == 1
        failed = parts.node.entry(sandbox_id(3)).row
        assert (failed.state, failed.reason) == ("exited", "error(launch)")


async def test_a_loose_group_keeps_what_could_be_made(machine):
    machine.world.fail[f"start:{sandbox_id(2)}"] = PlatformError("launch_failed", "no")
    machine.settings |= {"sandboxes_max": 3}
    async with machine.daemon() as parts:
        reply = await _make(parts, 1, 2, 3, 4, all_or_none=False)
        assert [info.id for info in reply.sandboxes] == [sandbox_id(1), sandbox_id(3)]
        assert {failure.id: failure.error["code"] for failure in reply.failures} == {
            sandbox_id(2): "launch_failed",
            sandbox_id(4): "capacity",
        }
        assert parts.node.capacity.sandboxes == 2


async def test_starts_are_limited_and_each_refusal_has_its_name(machine):
    machine.settings |= {"starting_max": 2, "queue_max": 6, "sandboxes_max": 20}
    machine.world.gate = asyncio.Event()
    async with machine.daemon() as parts:
        task = asyncio.create_task(_make(parts, 1, 2, 3, 4))
        await _settle()
        assert machine.world.starting == 2
        codes = {}
        for name, spec in {
            "queue_full": {"numbers": range(10, 18)},
            "capacity": {"numbers": (20,), "cpus": 1000.0},
            "image_missing": {"numbers": (21,), "image": "missing"},
            "backend_unavailable": {"numbers": (22,), "backend": "vm"},
            "queue_deadline": {"numbers": (23,), "wait_s": 0.001},
        }.items():
            request = create_request(*spec.pop("numbers"))
            for field, value in spec.items():
                setattr(request.spec, field, value)
            with pytest.raises(CapacityError) as caught:
                await parts.creator.create(request)
            codes[name] = caught.value.code
        assert codes == {name: name for name in codes}
        parts.supervisor.drain(on=True, deadline_s=None)
        with pytest.raises(CapacityError) as caught:
            await parts.creator.create(create_request(30))
        assert caught.value.code == "draining"
        parts.supervisor.drain(on=False, deadline_s=None)
        parts.supervisor.disk_mib_free = 1
        with pytest.raises(CapacityError) as caught:
            await parts.creator.create(create_request(31))
        assert caught.value.code == "disk"
        machine.world.gate.set()
        await task
        assert machine.world.starting_most == 2
        assert sorted(parts.node.entries) == sorted(sandbox_id(n) for n in (1, 2, 3, 4))
        assert parts.node.capacity.sandboxes == 4


async def test_a_start_that_hangs_is_given_up_and_cleaned(machine):
    machine.world.gate = asyncio.Event()
    machine.limits = Limits(start_s=0.01)
    async with machine.daemon() as parts:
        with pytest.raises(DeadlineExceeded) as caught:
            await _make(parts, 1)
        assert caught.value.code == "start_timeout"
        assert machine.world.alive == {}
        assert parts.node.entry(sandbox_id(1)).row.reason == "error(launch)"


async def test_a_kill_in_the_middle_of_a_create_wins(machine):
    machine.world.gate = asyncio.Event()
    async with machine.daemon() as parts:
        task = asyncio.create_task(_make(parts, 1))
        await _settle()
        info = await parts.verbs.kill(sandbox_id(1))
        assert (info.state, info.reason) == ("exited", "killed")
        with pytest.raises(PlatformError, match="ended while it was made"):
            await task
        assert machine.world.alive == {}


async def test_who_leaves_before_the_reply_leaves_nothing_unless_another_asks_in_time(machine):
    machine.world.gate = asyncio.Event()
    async with machine.daemon() as parts:
        gone = asyncio.create_task(_make(parts, 1))
        stays = asyncio.create_task(_make(parts, 2))
        left = asyncio.create_task(_make(parts, 2))
        await _settle()
        for task in (gone, left):
            task.cancel()
        await asyncio.gather(gone, left, return_exceptions=True)
        await _settle()
        assert (parts.node.entry(sandbox_id(1)).row.state) == "exited"
        machine.world.gate.set()
        assert (await stays).sandboxes[0].state == "running"
        await _settle()
        assert list(machine.world.alive) == [sandbox_id(2)]
        # and one whose reply could not be written
        _, groups = await parts.creator.create(create_request(3))
        parts.creator.leave(groups)
        await _settle()
        assert list(machine.world.alive) == [sandbox_id(2)]
        assert "went away" in parts.node.entry(sandbox_id(3)).row.message


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_bursts_with_random_cancels_leave_exactly_what_was_handed_over(seed, tmp_path_factory):
    async def scenario():
        rng = random.Random(seed)
        machine = Machine(tmp_path_factory.mktemp("burst"))
        machine.settings |= {"starting_max": 4}
        machine.world.fail = {f"start:{sandbox_id(n)}": PlatformError("launch_failed", "no") for n in range(0, 60, 7)}
        async with machine.daemon() as parts:

            async def client(number):
                reply = await _make(parts, number)
                return reply.sandboxes[0].id

            tasks = [asyncio.create_task(client(number)) for number in range(60)]
            for task in tasks:
                if rng.random() < 0.5:
                    for _ in range(rng.randrange(4)):
                        await asyncio.sleep(0)
                    task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            held = {result for result in results if isinstance(result, str)}
            assert all(isinstance(r, str | DsecError | asyncio.CancelledError) for r in results)
            for _ in range(100):
                if set(machine.world.alive) == held:
                    break
                await asyncio.sleep(0.01)
            assert set(machine.world.alive) == held
            assert {e.row.id for e in parts.node.live()} == held
            assert parts.node.capacity.sandboxes == len(held)
            assert parts.node.queue.starting == parts.node.queue.waiting == 0

    asyncio.run(scenario())


async def test_exec_on_what_does_not_run_is_a_state_error(machine):
    async with machine.daemon() as parts:
        await _make(parts, 1)
        await parts.verbs.kill(sandbox_id(1))
        with pytest.raises(StateError) as caught:
            await parts.execs.open(parts.node.entry(sandbox_id(1)))
        assert caught.value.code == "sandbox_ended"
        assert caught.value.details["reason"] == "killed"
