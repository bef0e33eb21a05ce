"""`dsec dev --nomad`: one command to a cluster on this machine, in which sandboxes live from what Nomad lends."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

import pytest

from tests.kit.abilities import needs
from tests.kit.devstack import DevStack
from tests.kit.node_daemon import CONTAINER_NEEDS

pytestmark = [needs("nomad", "consul", "cc", *CONTAINER_NEEDS), pytest.mark.timeout(240)]

DRIVERS = ("dsec-container", "dsec-fncall", "dsec-pool")
DOCTOR = ("consul", "consul token", "nomad", "nomad plugin_dir", *(f"nomad driver {name}" for name in DRIVERS))


def get(url: str):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


def passing(consul: str, service: str, timeout_s: float = 30.0):
    """Its instances; a daemon serves before it is registered, and is registered before its first heartbeat."""
    deadline = time.monotonic() + timeout_s
    while not (found := get(f"{consul}/v1/health/service/{service}?passing")):
        assert time.monotonic() < deadline, get(f"{consul}/v1/health/service/{service}")
        time.sleep(0.1)
    return found


def settled_nodes(stack: DevStack, timeout_s: float = 30.0):
    """The gateway's rows; an address that Consul has just told of is a row of its own until it has answered once."""
    deadline = time.monotonic() + timeout_s
    while len(rows := json.loads(stack.dsec("node", "ls", "--json").stdout)) != 1:
        assert time.monotonic() < deadline, rows
    return rows


def test_one_command_to_a_cluster(tmp_path_factory):
    stack = DevStack(tmp_path_factory.mktemp("d"))
    stack.start("--nomad")
    try:
        nomad = stack.state()["nomad"]
        (node,) = get(f"{nomad}/v1/nodes")
        assert all(node["Drivers"][name]["Healthy"] for name in DRIVERS)
        assert get(f"{stack.state()['consul']}/v1/status/leader")
        (pool,) = get(f"{nomad}/v1/job/dsec-pool/allocations")
        assert pool["ClientStatus"] == "running"
        for service in ("dsec-node", "dsec-gateway"):
            (entry,) = passing(stack.state()["consul"], service)
            assert "prometheus" in entry["Service"]["Tags"]
        # told of by Consul and by the settings, and one all the same
        (row,) = settled_nodes(stack)
        assert row["capacity"]["memory_mib_total"] > 0  # all of it lent
        told = stack.dsec("doctor", "--json", "--nomad-address", nomad, "--consul-address", stack.state()["consul"])
        rows = {row["name"]: row for row in json.loads(told.stdout)}
        assert not [rows[name] for name in DOCTOR if not rows[name]["ok"]]
        assert rows["nomad plugin_dir"]["reason"].startswith(str(stack.data))
    finally:
        stack.stop()
    assert stack.dsec("dev", "status").returncode == 1
    assert str(stack.data) not in Path("/proc/self/mountinfo").read_text()
    assert not list((stack.data / "nomad/alloc").iterdir())


def test_what_is_not_on_path_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    stack = DevStack(tmp_path)
    done = stack.dsec("dev", "--nomad")
    assert done.returncode == 2
    assert b"nomad" in done.stderr
