"""The job files on a real agent: each is valid there, and those of our drivers run as their comments say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.abilities import needs
from tests.kit.node_daemon import CONTAINER_NEEDS
from tests.kit.tasks import task_client

pytestmark = [
    needs("nomad", "cc", *CONTAINER_NEEDS),
    pytest.mark.timeout(180),
    pytest.mark.leaks_ok,
]  # see test_crashes
JOBS = sorted((Path(__file__).parents[3] / "jobspecs").glob("*.hcl"))
ROOT = JOBS[0].parent


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_the_agent_accepts_it(cluster, path):
    assert b"validation successful" in cluster.agent.cli("job", "validate", str(path)).stdout
    if path.name not in ("node.nomad.hcl", "gateway.nomad.hcl"):  # raw_exec is off here
        cluster.agent.cli("job", "plan", str(path), check=False)


def test_the_service(cluster):
    agent = cluster.agent
    agent.cli("job", "run", "-detach", "-var", "image=small", str(ROOT / "container.nomad.hcl"))
    agent.wait(lambda: agent.task("dsec-container", "main").get("State") == "running", 60)
    agent.cli("job", "stop", "-detach", "dsec-container")
    agent.wait(lambda: agent.task("dsec-container", "main").get("State") == "dead", 60)
    assert agent.terminated("dsec-container", "main")["exit_code"] == "0"


def test_the_dispatched_sandbox(cluster):
    agent = cluster.agent
    agent.cli("job", "run", "-detach", "-var", "image=small", str(ROOT / "container-batch.nomad.hcl"))
    body = {"Meta": {"command": "exit 21"}}
    child = agent.get("/v1/job/dsec-container-batch/dispatch", "PUT", body)["DispatchedJobID"].replace("/", "%2F")
    agent.wait(lambda: agent.task(child, "main").get("State") == "dead", 60)
    assert agent.terminated(child, "main")["exit_code"] == "21"
    agent.purge(child)


def test_the_dispatched_call(cluster):
    agent = cluster.agent
    agent.cli("job", "run", "-detach", "-var", "image=small", str(ROOT / "fncall-batch.nomad.hcl"))
    body = {"Meta": {"script": "read x; echo $x-$x"}, "Payload": "YWI="}
    child = agent.get("/v1/job/dsec-fncall-batch/dispatch", "PUT", body)["DispatchedJobID"].replace("/", "%2F")
    agent.wait(lambda: agent.task(child, "call").get("State") == "dead", 60)
    agent.wait(lambda: agent.logs(child, task="call") == "ab-ab\n", 20)
    agent.purge(child)


async def test_the_pool_of_every_client(cluster):
    agent = cluster.agent
    argv = ("-var", "cores=1", "-var", "memory_mib=256", str(ROOT / "pool-system.nomad.hcl"))
    agent.cli("job", "run", "-detach", *argv)
    agent.wait(lambda: agent.task("dsec-pool-system", "slice").get("State") == "running", 60)
    async with task_client(cluster.node) as client:
        (grant,) = (await client.call("GET", "/v1/grants")).ok()["grants"]
    assert (grant["cpus"], grant["memory_mib"]) == (1.0, 256)
