"""A disk that is full where the client collects logs: the program goes on, its end is true, and the agent lives."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

import pytest

from tests.kit.abilities import needs
from tests.kit.node_daemon import CONTAINER_NEEDS
from tests.kit.nomad_agent import job
from tests.system.nomad.conftest import start_cluster

pytestmark = [needs("nomad", "cc", *CONTAINER_NEEDS), pytest.mark.timeout(240)]
DISK_MIB = 64


@pytest.fixture
def small(tmp_path):
    """A cluster whose allocations are on a small disk."""
    allocs = tmp_path / "agent/data/alloc"
    allocs.mkdir(parents=True)
    argv = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "dsec-test-disk", str(allocs)]
    subprocess.run(argv, check=True, timeout=20)
    made = None
    try:
        made = start_cluster(tmp_path)
        yield made
        made.agent.purge(*(row["ID"] for row in made.agent.get("/v1/jobs")))
    finally:
        if made is not None:
            made.agent.clean()
            made.node.remove()
        subprocess.run(["umount", "-l", str(allocs)], check=False, timeout=20, capture_output=True)


@pytest.mark.leaks_ok  # the client's collectors end a moment after their tasks
def test_a_full_disk_stalls_no_program_and_hides_no_end(small):
    agent, disk = small.agent, small.agent.directory / "data/alloc"
    script = "until [ -e /alloc/go ]; do sleep 0.05; done; head -c 8000000 /dev/zero | tr '\\0' x; exit 7"
    body = job("full", "bash", "-c", script, task={"LogConfig": {"MaxFiles": 2, "MaxFileSizeMB": 10}})
    body["TaskGroups"][0]["EphemeralDisk"] = {"SizeMB": 30}
    agent.run(body)
    agent.wait_task("full", "running")
    (go,) = (path / "alloc/go" for path in disk.iterdir() if (path / "alloc").is_dir())
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    assert os.statvfs(disk).f_bavail == 0
    os.mkfifo(go)  # takes no block
    agent.wait_task("full", "dead", timeout_s=60)
    assert agent.terminated("full")["exit_code"] == "7", agent.events("full")
    assert len(agent.logs("full")) < 8_000_000  # what found no room is not there, and nothing waited for it
    filler.unlink()
    agent.run(job("after", "sh", "-c", "echo fine"))
    agent.wait_task("after", "dead")
    assert agent.wait_log("after", "fine") == "fine\n"
