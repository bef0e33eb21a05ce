"""Capacity lent by Nomad: a grant makes room, stop, drain and preemption take it back with reasons."""

from __future__ import annotations

import asyncio

import pytest

from tests.kit.abilities import needs
from tests.kit.node_daemon import CONTAINER_NEEDS
from tests.kit.nomad_agent import job
from tests.kit.tasks import task_client

pytestmark = [
    needs("nomad", "cc", *CONTAINER_NEEDS),
    pytest.mark.timeout(180),
    pytest.mark.leaks_ok,
]  # see test_crashes
CONFIG = {"cpus": 1.0, "memory_mib": 256}


def pool(name, **more):
    # cpu and memory that Nomad reserves are small here; what is lent is named, so that the test is exact.
    return job(
        name, driver="dsec-pool", kind=more.pop("kind", "service"), config=CONFIG, cpu=500, memory_mib=256, **more
    )


async def grants(cluster):
    async with task_client(cluster.node) as client:
        return (await client.call("GET", "/v1/grants")).ok().get("grants", [])


async def test_a_grant_lends_and_a_stop_takes_back(cluster):
    name, agent = cluster.name(), cluster.agent
    async with cluster.node.client() as tcp:
        refused = await tcp.call("POST", "/v1/sandboxes", tcp.body(cluster.node.new_ids()))
        assert refused.error["code"] == "capacity"
        agent.run(pool(name))
        agent.wait_task(name, "running")
        assert [g["memory_mib"] for g in await grants(cluster)] == [256]
        (eager,) = await tcp.create(qos="best_effort")
        (calm,) = await tcp.create()
        agent.cli("job", "stop", "-detach", name)
        evicted = await tcp.wait_state(eager["id"], "exited")
        assert evicted["reason"] == "evicted"
        assert agent.allocs(name)[-1]["ID"] in evicted["message"]
        assert (await tcp.wait_state(calm["id"], "exited"))["reason"] == "evicted"
        await asyncio.to_thread(agent.wait_task, name, "dead")
        assert any("evicted" in event for event in agent.events(name)), agent.events(name)
        refused = await tcp.call("POST", "/v1/sandboxes", tcp.body(cluster.node.new_ids()))
        assert refused.error["code"] == "capacity"
    async with asyncio.timeout(20):
        while await grants(cluster):
            await asyncio.sleep(0.1)


async def test_grants_outlive_agent_and_daemon(cluster):
    name, agent = cluster.name(), cluster.agent
    agent.run(pool(name))
    agent.wait_task(name, "running")
    before = await grants(cluster)
    await asyncio.to_thread(agent.kill9)
    cluster.node.kill9()
    cluster.node.start()
    await asyncio.to_thread(agent.start)
    assert await grants(cluster) == before
    assert len(agent.allocs(name)) == 1
    async with cluster.node.client() as tcp:
        await tcp.create()


async def test_a_drain_of_the_client_takes_the_grant(cluster):
    name, agent = cluster.name(), cluster.agent
    agent.run(pool(name, kind="system"))
    agent.wait_task(name, "running")
    async with cluster.node.client() as tcp:
        (info,) = await tcp.create()
        node = agent.get("/v1/nodes")[0]["ID"]
        agent.cli("node", "drain", "-enable", "-force", "-detach", "-yes", node)
        try:
            assert (await tcp.wait_state(info["id"], "exited"))["reason"] == "evicted"
        finally:
            agent.cli("node", "drain", "-disable", "-yes", node)
    await asyncio.to_thread(agent.wait, lambda: agent.get("/v1/nodes")[0]["SchedulingEligibility"] == "eligible", 30)


async def test_a_system_job_of_higher_priority_preempts_a_pool(cluster):
    low, high, agent = cluster.name(), cluster.name(), cluster.agent
    resources = {"Resources": {"CPU": 2500, "MemoryMB": 256}}
    agent.run(pool(low, kind="system", more={"Priority": 20}, task=resources))
    agent.wait_task(low, "running")
    async with cluster.node.client() as tcp:
        (info,) = await tcp.create()
        keep = ("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.05; done")
        agent.run(job(high, *keep, kind="system", more={"Priority": 90}, task=resources))
        assert (await tcp.wait_state(info["id"], "exited", timeout_s=60.0))["reason"] == "evicted"
        await asyncio.to_thread(agent.wait_task, high, "running")
    assert agent.task(low)["State"] == "dead"
    assert await grants(cluster) == [] or [g["state"] for g in await grants(cluster)] == ["withdrawn"]
