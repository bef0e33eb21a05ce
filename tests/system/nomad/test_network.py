"""A group's network: a sandbox has its own, so each mode either means just that or is refused where it belongs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.abilities import needs
from tests.kit.node_daemon import CONTAINER_NEEDS
from tests.kit.nomad_agent import NomadAgent, job

pytestmark = [needs("nomad", "cc", *CONTAINER_NEEDS), pytest.mark.timeout(120)]
SHOW = {"image": "small", "command": "sh", "args": ["-c", "cat /proc/net/dev; echo done"]}


def with_network(name: str, network: dict[str, Any]) -> dict[str, Any]:
    body = job(name, config=SHOW)
    body["TaskGroups"][0]["Networks"] = [network]
    return body


def test_host_is_a_sandbox_of_its_own(cluster):
    """`host` is what a job without the block has: the sandbox stays apart from the host's network all the same."""
    name, agent = cluster.name(), cluster.agent
    agent.run(with_network(name, {"Mode": "host"}))
    agent.wait_task(name, "dead")
    assert agent.terminated(name)["exit_code"] == "0", agent.events(name)
    devices = [line.split(":")[0].strip() for line in agent.wait_log(name, "done").splitlines() if ":" in line]
    assert devices == ["lo"]


def test_ports_are_refused_by_the_driver(cluster):
    name, agent = cluster.name(), cluster.agent
    agent.run(with_network(name, {"Mode": "host", "DynamicPorts": [{"Label": "http"}]}))
    agent.wait_task(name, "dead")
    assert any("port http is of no use" in event for event in agent.events(name)), agent.events(name)


@pytest.mark.parametrize("mode", ["bridge", "none", "cni/dsec"])
def test_other_modes_never_reach_the_driver(cluster, mode):
    """The scheduler (no such network on this client) or the client (our capabilities) says why."""
    name, agent = cluster.name(), cluster.agent
    agent.run(with_network(name, {"Mode": mode}))

    def told() -> str:
        return " ".join(_words(agent, name))

    agent.wait(lambda: any(word in told() for word in ("network", "bridge", "cni")), 60, f"a reason for {mode}")
    assert not agent.task(name).get("StartedAt")


def _words(agent: NomadAgent, name: str) -> list[str]:
    """Everything that is told of a job: its evaluations, and the events of its allocations' tasks."""
    found = []
    for evaluation in agent.get(f"/v1/job/{name}/evaluations") or []:
        for metrics in (evaluation.get("FailedTGAllocs") or {}).values():
            found += [*(metrics.get("ConstraintFiltered") or {}), *(metrics.get("DimensionExhausted") or {})]
    for alloc in agent.allocs(name):
        found.append(alloc.get("ClientDescription") or "")
        for state in (alloc.get("TaskStates") or {}).values():
            found += [event["DisplayMessage"] for event in state.get("Events") or []]
    return found
