"""What Consul costs: a node's registration with 1,000 and 5,000 sandboxes, 1 % unhealthy transitions a minute.

Time is compressed: the steps of some minutes run one after the other, and CPU seconds and writes are divided by the
minutes that they stand for; the agent's own cost at rest is measured apart. The agent (one server that keeps its data),
our client and what it sends are real; the sandboxes are rows.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from nomad_dsec.clock import SYSTEM
from nomad_dsec.cluster import health
from nomad_dsec.cluster.consul import ConsulClient, Offer
from nomad_dsec.cluster.registration import Registration
from nomad_dsec.node.core import Entry
from nomad_dsec.node.health import MISSES, HealthWatch
from nomad_dsec.node.row import Row
from tests.bench.live import _cpu_s
from tests.kit.consul import Agent, agent
from tests.kit.guest import running_guest

TTL_S = 15.0
STEPS_A_MINUTE = int(60 / (TTL_S / 3))
UNWELL_A_MINUTE = 0.01
PROBE_S = 30.0


class Counting(ConsulClient):
    """Counts what it sends."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.keys = self.transactions = self.calls = 0

    async def _call(self, what: str, *given: Any, **more: Any) -> Any:
        self.calls += 1
        return await super()._call(what, *given, **more)

    async def _put_batch(self, payload: list[dict[str, Any]]) -> None:
        self.keys += len(payload)
        self.transactions += 1
        await super()._put_batch(payload)


def run(bench: Any) -> dict[str, Any]:
    """By number of sandboxes; and what one question to a sandbox's PID 1 costs."""
    with agent(bench.data("consul")) as server:
        at_rest = _at_rest(server, bench.size(10, 3))
        minutes = bench.size(30, 5)
        found = {f"sandboxes_{count}": asyncio.run(_measure(server, count, minutes)) for count in (1000, 5000)}
    return {"agent_at_rest_cpu_percent": at_rest, **found, "ping": asyncio.run(_ping(bench.size(5000, 500)))}


def _agent_cpu_s(server: Agent) -> float:
    assert server.process is not None
    return _cpu_s(server.process.pid)


def _at_rest(server: Agent, seconds: float) -> float:
    time.sleep(2.0)  # its start is over
    before = _agent_cpu_s(server)
    time.sleep(seconds)
    return round(100 * (_agent_cpu_s(server) - before) / seconds, 2)


def _watch(count: int) -> HealthWatch:
    entries = {}
    for number in range(count):
        row = Row(
            id=f"sb-n1-{number:016}",
            namespace="bench",
            backend="container",
            image="debian",
            digest="sha256:0",
            cpus=0.1,
            memory_mib=64,
            disk_mib=64,
            pids=64,
            timeout_s=60.0,
            created_at=0.0,
            state="running",
        )
        entries[row.id] = Entry(row=row)
    node: Any = SimpleNamespace(entries=entries, clock=SYSTEM, live=lambda: entries.values())
    return HealthWatch(node, SimpleNamespace(), every_s=0)  # type: ignore[arg-type]  # nobody is asked here


async def _measure(server: Agent, count: int, minutes: int) -> dict[str, Any]:
    watch, transitions = _watch(count), health.Transitions(node="n1")
    names = list(watch._node.entries)

    def note() -> tuple[bool, str]:
        transitions.want(watch.unwell())
        return True, watch.digest()

    offer = Offer(name="dsec-node", service_id="dsec-node-n1", address="127.0.0.1", port=1, ttl_s=TTL_S)
    client = Counting(server.endpoint())
    registration = Registration(client, offer, note=note, transitions=transitions)
    await registration.step()
    a_step = count * UNWELL_A_MINUTE / STEPS_A_MINUTE
    due, at = 0.0, 0
    unwell: list[list[str]] = []
    before = (time.process_time(), _agent_cpu_s(server), client.keys, client.transactions, client.calls)
    for _ in range(minutes * STEPS_A_MINUTE):
        due += a_step
        fresh = [names[(at + number) % count] for number in range(int(due))]
        due -= len(fresh)
        at += len(fresh)
        unwell.append(fresh)
        watch._missed.update(dict.fromkeys(fresh, MISSES))
        for name in unwell.pop(0) if len(unwell) > STEPS_A_MINUTE else []:  # well again after a minute
            watch._missed.pop(name, None)
        await registration.step()
        assert not registration.last_error
    after = (time.process_time(), _agent_cpu_s(server), client.keys, client.transactions, client.calls)
    await registration.close()
    await client.close()
    ours, theirs, keys, transactions, calls = (now - was for now, was in zip(after, before))
    seconds = minutes * 60
    return {
        "minutes": minutes,
        "node_cpu_percent": round(100 * ours / seconds, 3),
        "agent_cpu_percent": round(100 * theirs / seconds, 3),
        "key_writes_per_s": round(keys / seconds, 3),
        "transactions_per_s": round(transactions / seconds, 3),
        "requests_per_s": round(calls / seconds, 3),
    }


async def _ping(count: int) -> dict[str, Any]:
    async with running_guest(cgroup=False) as guest:
        for _ in range(50):
            await guest.channel.ping()
        before, theirs = time.process_time(), _cpu_s(guest.pid)
        for _ in range(count):
            await guest.channel.ping()
        ours_us = 1e6 * (time.process_time() - before) / count
        guest_us = 1e6 * (_cpu_s(guest.pid) - theirs) / count
    both = (ours_us + guest_us) * 1e-6
    return {
        "node_us": round(ours_us, 1),
        "pid1_us": round(guest_us, 1),
        "cpu_percent_5000": round(100 * both * 5000 / PROBE_S, 2),
    }
