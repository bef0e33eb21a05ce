"""kill -9 of plugin, node daemon, agent, and all at once under running tasks: the same pid, the true end, no orphan."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.contract.test_node_tasks import pid_of
from tests.kit.abilities import needs
from tests.kit.node_daemon import CONTAINER_NEEDS
from tests.kit.nomad_agent import job

pytestmark = [needs("nomad", "cc", *CONTAINER_NEEDS), pytest.mark.timeout(240)]
pytestmark.append(pytest.mark.leaks_ok)  # daemons of the whole session are restarted; they are counted at its end


class Running:
    """A task that counts and ends on request with a code of its own."""

    def __init__(self, cluster, kind="batch"):
        self.cluster, self.name = cluster, cluster.name()
        self.script = (
            f": {self.name}; i=0; while [ ! -e /local/stop ]; do echo $i; i=$((i+1)); sleep 0.1; done; exit 17"
        )
        cluster.agent.run(job(self.name, "sh", "-c", self.script, kind=kind))
        cluster.agent.wait_task(self.name, "running")
        cluster.agent.wait_log(self.name, "1\n")
        self.pid = pid_of(f"sh -c {self.script}")
        assert self.pid
        self.alloc = cluster.agent.allocs(self.name)[-1]["ID"]

    def is_same(self):
        agent = self.cluster.agent
        assert pid_of(f"sh -c {self.script}") == self.pid
        assert len(agent.allocs(self.name)) == 1
        assert agent.task(self.name)["State"] == "running"
        assert sum(event.startswith("Started:") for event in agent.events(self.name)) == 1, agent.events(self.name)

    def let_end(self):
        local = self.cluster.agent.directory / f"data/alloc/{self.alloc}/t/local"
        (local / "stop").write_text("")

    def ends_truly(self):
        agent = self.cluster.agent
        agent.wait_task(self.name, "dead")
        details = agent.terminated(self.name)
        assert (details["exit_code"], details["signal"]) == ("17", "0"), agent.events(self.name)
        assert len(agent.allocs(self.name)) == 1

    def answers(self):
        """exec and logs work, and output made now arrives."""
        agent = self.cluster.agent

        def done():  # the agent needs a moment to find a plugin that is new
            code, out, _ = agent.exec(self.alloc, "sh", "-c", "echo in; exit 4")
            return out if code == 4 else None

        assert agent.wait(done, 30, "exec") == b"in\n"
        last = int(agent.logs(self.name).split()[-1])
        agent.wait_log(self.name, f"\n{last + 5}\n")


def only_ours_left(cluster, *runs):
    """No sandbox that no task owns."""
    import http.client
    import json
    import socket

    class Unix(http.client.HTTPConnection):
        def connect(self):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(str(cluster.node.data / "node.sock"))

    connection = Unix("node")
    connection.request("GET", "/v1/sandboxes")
    found = {row["labels"]["nomad.alloc"] for row in json.loads(connection.getresponse().read())["sandboxes"]}
    connection.close()
    assert found == {run.alloc for run in runs}


def kill_plugin(cluster):
    record = cluster.agent.plugins()["dsec-container"]
    os.kill(record.pid, signal.SIGKILL)
    cluster.agent.wait(
        lambda: cluster.agent.plugins().get("dsec-container", record) != record, 60, "a new plugin process"
    )


def kill_agent(cluster):
    cluster.agent.kill9()
    cluster.agent.start()


def kill_node(cluster):
    cluster.node.kill9()
    cluster.node.start()


def stop_agent_in_order(cluster):
    cluster.agent.stop()
    assert cluster.agent.plugins() == {}
    cluster.agent.start()


def kill_all(cluster):
    plugins = cluster.agent.plugins()
    cluster.agent.kill9()
    cluster.node.kill9()
    for record in plugins.values():
        os.kill(record.pid, signal.SIGKILL)
    cluster.node.start()
    cluster.agent.start()


@pytest.mark.parametrize("act", [kill_plugin, kill_node, kill_agent, stop_agent_in_order, kill_all])
def test_a_running_task_goes_on(cluster, act):
    one, two = Running(cluster), Running(cluster, "service")
    act(cluster)
    for run in (one, two):
        cluster.agent.wait(lambda run=run: cluster.agent.task(run.name).get("State") == "running", 60)
        run.answers()
        run.is_same()
    only_ours_left(cluster, one, two)
    one.let_end()
    one.ends_truly()
    stats = cluster.agent.get(f"/v1/client/allocation/{two.alloc}/stats")["Tasks"]
    assert stats.get("t") is not None


@pytest.mark.parametrize("act", ["agent", "plugin and node"])
def test_a_task_that_ends_meanwhile_is_not_run_again(cluster, act):
    run = Running(cluster)
    if act == "agent":
        cluster.agent.stop()
    else:
        cluster.node.kill9()
        os.kill(cluster.agent.plugins()["dsec-container"].pid, signal.SIGKILL)
    run.let_end()
    time.sleep(1)
    if act == "agent":
        cluster.agent.start()
    else:
        cluster.node.start()
    run.ends_truly()
    assert sum(event.startswith("Started:") for event in cluster.agent.events(run.name)) == 1
    only_ours_left(cluster)


def test_many_agent_starts_leave_no_process(cluster):
    for _ in range(3):
        cluster.agent.stop()
        assert cluster.agent.plugins() == {}
        cluster.agent.start()
    assert set(cluster.agent.plugins()) == set(cluster.agent.drivers)


def test_the_plugins_survive_a_dead_agents_pipes(cluster):
    """P06: after the agent's SIGKILL nobody reads fd 2; the reattached plugin must serve on."""
    before = cluster.agent.plugins()
    kill_agent(cluster)
    assert cluster.agent.plugins() == before  # reattached, not started anew
    run = Running(cluster)
    run.answers()
    run.let_end()
    run.ends_truly()


def test_stop_while_the_node_daemon_is_down_ends_when_it_is_back(cluster):
    run = Running(cluster, "service")
    cluster.node.kill9()
    cluster.agent.cli("job", "stop", "-detach", run.name)
    time.sleep(2)
    cluster.node.start()
    cluster.agent.wait_task(run.name, "dead")
    assert pid_of(f"sh -c {run.script}") is None
    only_ours_left(cluster)
