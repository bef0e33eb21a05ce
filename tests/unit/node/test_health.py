"""Which sandboxes the node calls unwell, and what it tells Consul of them."""

from __future__ import annotations

import asyncio
import json

import pytest
from libdsec.errors import DeadlineExceeded, DsecError

from nomad_dsec.cluster.consul import ConsulClient
from nomad_dsec.cluster.health import Transitions
from nomad_dsec.cluster.services import SandboxServices
from nomad_dsec.cluster.settings import parse_endpoint
from nomad_dsec.node.health import HealthWatch
from nomad_dsec.node.presence import Presence
from tests.unit.node.conftest import create_request, sandbox_id

ONE, TWO, THREE = (sandbox_id(number) for number in (1, 2, 3))


class Channels:
    """Stands where Execs does: PID 1 of those in `silent` does not answer."""

    def __init__(self) -> None:
        self.silent: set[str] = set()

    async def channel(self, entry):
        silent = entry.row.id in self.silent

        class Channel:
            async def ping(self, *, timeout_s: float) -> None:
                if silent:
                    raise DeadlineExceeded("guest_timeout", "ping: no answer")

        return Channel()


async def _make(parts, *numbers, **spec):
    _, groups = await parts.creator.create(create_request(*numbers, **spec))
    parts.creator.delivered(groups)


def _watch(parts) -> tuple[HealthWatch, Channels]:
    channels = Channels()
    return HealthWatch(parts.node, channels, every_s=30), channels


async def test_one_that_misses_twice_is_unwell_until_it_answers(machine):
    async with machine.daemon() as parts:
        await _make(parts, 1, 2)
        watch, channels = _watch(parts)
        channels.silent.add(ONE)
        for unwell in ([], [ONE], [ONE]):
            for entry in parts.node.live():
                await watch.ask(entry)
            assert list(watch.unwell()) == unwell
        assert watch.unwell()[ONE].startswith("no_answer")
        machine.clock.at += 40
        await watch.ask(parts.node.entry(TWO))
        await watch.ask(parts.node.entry(ONE))
        assert json.loads(watch.digest()) == {
            "states": {"running": 2},
            "backends": {"container": 2},
            "oldest_heartbeat_s": 0.0,  # ONE was never heard
        }
        machine.clock.at += 7
        assert json.loads(watch.digest())["oldest_heartbeat_s"] == 7.0
        await parts.verbs.pause(ONE)  # what is paused can't answer, and is not blamed for it
        assert watch.unwell() == {}
        await parts.verbs.resume(ONE)
        channels.silent.clear()
        await watch.ask(parts.node.entry(ONE))
        assert watch.unwell() == {}


@pytest.mark.parametrize(
    ("reason", "told"), [("oom", "oom: out of memory"), ("init_exited", "init_exited: out of memory")]
)
async def test_an_end_that_nobody_asked_for_is_told_for_a_while(machine, reason, told):
    async with machine.daemon() as parts:
        await _make(parts, 1, 2)
        watch, _ = _watch(parts)
        machine.world.end(ONE, reason, "out of memory")
        async with asyncio.timeout(10):
            await parts.node.entry(ONE).ended.wait()
        await parts.verbs.kill(TWO)
        assert watch.unwell() == {ONE: told}
        machine.clock.at += 301
        assert watch.unwell() == {}


async def test_what_can_not_be_removed_is_told(machine):
    async with machine.daemon() as parts:
        await _make(parts, 1)
        watch, _ = _watch(parts)
        machine.world.fail["stop"] = OSError(16, "busy")
        with pytest.raises(DsecError):
            await parts.verbs.kill(ONE)
        assert watch.unwell()[ONE].startswith("stop_failed")
        machine.world.fail.clear()
        await parts.verbs.kill(ONE)
        assert watch.unwell() == {}


async def test_what_is_told_with_each_heartbeat(machine):
    async with machine.daemon() as parts:
        await _make(parts, 1, labels={"consul_service": "desktop:5901"})
        await _make(parts, 2, labels={"consul_service": "x", "other": "y"})
        await _make(parts, 3)
        watch, channels = _watch(parts)
        channels.silent.add(THREE)
        for _ in range(2):
            await watch.ask(parts.node.entry(THREE))
        transitions = Transitions(node="n1")
        client = ConsulClient(parse_endpoint("127.0.0.1:1", default_port=1, key="consul.address"))
        services = SandboxServices(client, owner="dsec-node-n1", limit=2)
        presence = Presence(parts.node, watch, transitions, services, "10.0.0.7")
        parts.node.ready = True
        healthy, text = presence.note()
        assert healthy
        assert json.loads(text)["states"] == {"running": 3}
        (put,) = transitions.pending("session")
        assert put.key == f"dsec/nodes/n1/unhealthy/{THREE}"
        offers = {offer.name: offer for offer, _ in services._wanted.values()}
        assert {name: (offer.address, offer.port) for name, offer in offers.items()} == {
            "dsec-sandbox-desktop": ("10.0.0.7", 5901),
            "dsec-sandbox-x": ("10.0.0.7", 0),
        }
        await _make(parts, 4, labels={"consul_service": "one-too-many:1"})
        presence.note()
        assert b'dsec_node_consul_untold{what="service"} 1.0' in parts.node.metrics.render()
        parts.node.journal.broken = "disk full"
        assert presence.note() == (False, "the journal can't be written: disk full")
        await client.close()
