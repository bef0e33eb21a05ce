"""One node daemon and one agent for all tests of this room: a start of both takes seconds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.abilities import missing
from tests.kit.node_daemon import NodeDaemon
from tests.kit.nomad_agent import NomadAgent

_numbers = itertools.count(1)


@dataclass
class Cluster:
    """Nomad above, the node daemon below."""

    agent: NomadAgent
    node: NodeDaemon

    def name(self) -> str:
        """A job name of its own."""
        return f"j{next(_numbers)}"


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory):
    if missing("nomad"):
        yield None
        return
    directory = tmp_path_factory.mktemp("n")
    made = start_cluster(directory)
    yield made
    made.agent.clean()
    made.node.remove()


def start_cluster(directory: Path) -> Cluster:
    """Both, ready. Overcommit is 1, so that room is what was granted."""
    home = directory / "agent"
    home.mkdir(exist_ok=True)
    flags = ("--mount-roots", str(home / "data/alloc"), "--capacity", "granted")
    flags += ("--cpu-overcommit", "1", "--memory-overcommit", "1")
    node = NodeDaemon(directory, backend="container", flags=flags)
    node.start()
    agent = NomadAgent(home, node.data / "node.sock")
    agent.configure()
    agent.start()
    return Cluster(agent, node)


@pytest.fixture
def cluster(_cluster):
    """The cluster; what a test has left running is purged, and daemons it killed are back."""
    yield _cluster
    if _cluster.node.process is None:
        _cluster.node.start()
    if _cluster.agent.process is None:
        _cluster.agent.start()
    jobs = [row["ID"] for row in _cluster.agent.get("/v1/jobs")]
    _cluster.agent.purge(*jobs)
