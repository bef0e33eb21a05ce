"""dsec-fncall under a real agent: a dispatch is one call, its payload stdin, its verdict in logs, events and end."""

from __future__ import annotations

import pytest

from tests.kit.abilities import needs
from tests.kit.node_daemon import CONTAINER_NEEDS
from tests.kit.nomad_agent import job

pytestmark = [needs("nomad", "cc", *CONTAINER_NEEDS), pytest.mark.timeout(240)]
SCRIPT = "read x; echo got $x $NOMAD_META_N; exit $NOMAD_META_N"
DISPATCHES = 100


def dispatched(agent, name, payload, n):
    body = {"Payload": payload, "Meta": {"N": str(n)}}
    return agent.get(f"/v1/job/{name}/dispatch", "PUT", body)["DispatchedJobID"].replace("/", "%2F")


def test_dispatches_are_calls(cluster):
    name, agent = cluster.name(), cluster.agent
    agent.run(
        job(
            name,
            driver="dsec-fncall",
            config={"image": "small", "args": ["bash", "-c", SCRIPT], "stdin_file": "local/in"},
            cpu=20,
            memory_mib=32,
            more={"ParameterizedJob": {"Payload": "required", "MetaRequired": ["N"]}},
            task={"DispatchPayload": {"File": "in"}, "LogConfig": {"MaxFiles": 1, "MaxFileSizeMB": 1}},
        )
    )
    children = [dispatched(agent, name, "d29yZA==", n) for n in range(DISPATCHES)]
    for n, child in enumerate(children):
        agent.wait_task(child, "dead", timeout_s=180)
        details = agent.terminated(child)
        assert (details["exit_code"], details["signal"]) == (str(n), "0"), agent.events(child)
        assert agent.wait_log(child, "got") == f"got word {n}\n"
    # An event that comes after its task's end is dropped by the client, so not every one is there.
    assert any("Driver: dsec-fncall: runtime_error" in event for child in children[1:] for event in agent.events(child))
    assert "runtime_error" in agent.wait_log(children[1], "dsec-fncall", "stderr")
    agent.purge(*children)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"args": ["true"], "stdin_file": "../../../../../../etc/shadow"}, "leads out"),
        ({"args": ["true"], "stdin_file": "local/none"}, "local/none"),
        ({"code": "print(1)"}, "language"),
        ({"code": "print(1)", "language": "klingon"}, "klingon"),
    ],
)
def test_a_wrong_call_is_told_why(cluster, config, said):
    name, agent = cluster.name(), cluster.agent
    agent.run(job(name, driver="dsec-fncall", config={"image": "small"} | config))
    agent.wait_task(name, "dead")
    assert any(said in event for event in agent.events(name)), agent.events(name)
    assert agent.task(name)["Failed"]
