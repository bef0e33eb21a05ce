"""A gateway and two node daemons that find each other in a real Consul: ACLs on, each with its own policy's token."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from nomad_dsec.cluster.consul import ConsulClient
from nomad_dsec.cluster.health import PREFIX
from tests.kit.abilities import needs
from tests.kit.consul import agent
from tests.kit.gateways import spawned_gateway
from tests.kit.node_daemon import NodeDaemon

# The daemons serve the whole file; what they must not leave is checked by their own removal at its end.
pytestmark = [needs("consul", "root", "overlay", "cc"), pytest.mark.timeout(180), pytest.mark.leaks_ok]
SMALL = {"image": "debian", "cpus": 0.05, "memory_mib": 32, "disk_mib": 16, "timeout_s": 600}
TOKEN = "the-token-of-all-nodes-0123456789"
TTL_S = 3.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with agent(tmp_path_factory.mktemp("consul"), acl=True) as one:
        yield one


@pytest.fixture(scope="module")
def secrets(tmp_path_factory, server):
    """Files that hold the tokens: of nodes, and of Consul by component."""
    directory = tmp_path_factory.mktemp("secrets")
    texts = {"nodes": TOKEN, "node": server.token_of("node"), "gateway": server.token_of("gateway")}
    for name, text in texts.items():
        (directory / name).touch(mode=0o600)
        (directory / name).write_text(text + "\n")
    return directory


@pytest.fixture(scope="module")
def daemons(tmp_path_factory, server, secrets):
    flags = ("--token", f"file:{secrets}/nodes", "--consul-address", f"127.0.0.1:{server.port}")
    flags += ("--consul-token", f"file:{secrets}/node", "--consul-ttl-s", str(TTL_S), "--consul-probe-s", "1")
    made = [NodeDaemon(tmp_path_factory.mktemp(f"node{number}"), flags=flags, token=TOKEN) for number in range(2)]
    for daemon in made:
        daemon.start()
    yield made
    if server.process is None:
        server.start()
    for daemon in made:
        daemon.remove()


@pytest.fixture
async def consul(server):
    client = ConsulClient(server.endpoint())
    yield client
    await client.close()


def gateway(tmp_path, server, secrets):
    return spawned_gateway(
        tmp_path / "gw",
        "--node-token",
        f"file:{secrets}/nodes",
        DSEC_CONSUL_ADDRESS=f"http://127.0.0.1:{server.port}",
        DSEC_CONSUL_TOKEN="env:GATEWAY_CONSUL_TOKEN",
        GATEWAY_CONSUL_TOKEN=(secrets / "gateway").read_text().strip(),
        DSEC_CONSUL_TTL_S=str(TTL_S),
    )


async def until(ask, timeout_s: float = 30.0):
    async with asyncio.timeout(timeout_s):
        while not (value := await ask()):
            await asyncio.sleep(0.1)
        return value


async def ready_nodes(admin, count: int):
    async def heard():
        found = (await admin.ok("GET", "/v1/nodes"))["nodes"]
        return found if sum(not info.get("stale") for info in found) == count else None

    return await until(heard)


async def say(admin, sandbox: str, word: str) -> str:
    return (await admin.ok("POST", f"/v1/sandboxes/{sandbox}/execs", {"cmd": f"printf {word}"}))["stdout"]


async def metric(admin, name: str) -> float:
    async with admin.session.get("/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " "))


async def test_nodes_are_found_used_and_told_of(tmp_path, server, secrets, daemons, consul):
    async with gateway(tmp_path, server, secrets) as (child, admin):
        await ready_nodes(admin, 2)
        labels = {"labels": {"consul_service": "web:8080"}}
        made = (await admin.ok("POST", "/v1/sandboxes", SMALL | labels | {"count": 4}))["sandboxes"]
        assert {info["node"] for info in made} == {daemon.node for daemon in daemons}
        assert {await say(admin, info["id"], "hi") for info in made} == {"aGk="}
        assert (await admin("GET", "/readyz"))[1].get("notes", []) == []
        assert await metric(admin, "dsec_gateway_nodes_stale") == 0

        async def registered():
            (row,) = (await consul.services("dsec-gateway"))[1] or [None]
            return row

        row = await until(registered)
        assert f":{row.port}" in str(admin.session._base_url)

        async def services():
            found = (await consul.services("dsec-sandbox-web"))[1]
            return found if len(found) == 4 else None

        found = await until(services)
        assert {row.meta["sandbox"] for row in found} == {info["id"] for info in made}
        assert {row.port for row in found} == {8080}
        await until(lambda: _digests_tell(server, daemons, 4))

        # one whose PID 1 hangs for a while
        init = _init(made[1]["id"])
        hangs = f"{PREFIX}/{made[1]['node']}/unhealthy/{made[1]['id']}"
        os.kill(init, signal.SIGSTOP)
        try:
            await until(lambda: _is_told(consul, hangs, b"no_answer"))
            await until(lambda: _is_passing(consul, made[1]["id"], False))
        finally:
            os.kill(init, signal.SIGCONT)
        await until(lambda: _is_told(consul, hangs, None))
        await until(lambda: _is_passing(consul, made[1]["id"], True))

        # an end that nobody asked for
        os.kill(_keeper(made[0]["id"]), signal.SIGKILL)
        ended = f"{PREFIX}/{made[0]['node']}/unhealthy/{made[0]['id']}"
        await until(lambda: _is_told(consul, ended, b"init_exited"))
        for info in made:
            await admin("DELETE", f"/v1/sandboxes/{info['id']}")
        await until(lambda: _none(consul, "dsec-sandbox-web"))
        child.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), 20) == 0
        assert (await consul.services("dsec-gateway"))[1] == []  # deregistered at a clean stop


def _keeper(sandbox: str) -> int:
    """The process that holds a sandbox of the fake backend."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if any(word.startswith(b"--root=") and f"fake-{sandbox}/root".encode() in word for word in words):
                return int(path.parent.name)
    raise AssertionError(sandbox)


def _init(sandbox: str) -> int:
    """Its PID 1, as the host sees it."""
    keeper = _keeper(sandbox)
    return int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])


async def _is_told(consul, key: str, reason: bytes | None) -> bool:
    told = (await consul.read(PREFIX)).get(key)
    return told is None if reason is None else (told or b"").startswith(reason)


async def _is_passing(consul, sandbox: str, passing: bool) -> bool:
    rows = {row.meta["sandbox"]: row for row in (await consul.services("dsec-sandbox-web"))[1]}
    return rows[sandbox].passing is passing


async def _none(consul, name):
    return (await consul.services(name))[1] == []


async def _digests_tell(server, daemons, running: int) -> bool:
    """Whether the notes of the nodes' checks count so many; a check that has just run out has another note."""
    checks = json.loads(_get(server, "/v1/agent/checks"))
    notes = [checks[f"service:dsec-node-{daemon.node}"] for daemon in daemons]
    if any(note["Status"] != "passing" for note in notes):
        return False
    return sum(json.loads(note["Output"])["states"].get("running", 0) for note in notes) == running


def _get(server, path: str) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}")
    request.add_header("X-Consul-Token", server.token)
    with urllib.request.urlopen(request, timeout=5) as reply:
        return reply.read()


async def test_a_killed_node_comes_back_elsewhere_with_its_sandboxes(tmp_path, server, secrets, daemons, consul):
    async with gateway(tmp_path, server, secrets) as (_child, admin):
        await ready_nodes(admin, 2)
        made = (await admin.ok("POST", "/v1/sandboxes", SMALL | {"count": 2}))["sandboxes"]
        one = daemons[0]
        mine = next(info["id"] for info in made if info["node"] == one.node)
        old = one.facts["http"]
        one.kill9()

        async def critical():
            rows = {row.meta["node"]: row for row in (await consul.services("dsec-node"))[1]}
            return not rows[one.node].passing

        await until(critical)
        await ready_nodes(admin, 1)
        listed = (await admin.ok("GET", "/v1/sandboxes"))["sandboxes"]
        assert {info["id"] for info in listed} == {info["id"] for info in made}  # nothing is dropped
        one.start()
        assert one.facts["http"] != old  # a free port again
        await ready_nodes(admin, 2)
        assert await say(admin, mine, "back") == "YmFjaw=="
        for info in made:
            await admin("DELETE", f"/v1/sandboxes/{info['id']}")


async def test_consul_away_is_told_and_harms_nothing(tmp_path, server, secrets, daemons, consul):
    data = tmp_path
    async with gateway(data, server, secrets) as (child, admin):
        await ready_nodes(admin, 2)
        (held,) = (await admin.ok("POST", "/v1/sandboxes", SMALL))["sandboxes"]
        server.stop()

        async def stale():
            return (await admin("GET", "/readyz"))[1].get("notes")

        (note,) = await until(stale)
        assert "Consul does not answer" in note
        assert await metric(admin, "dsec_gateway_nodes_stale") == 1
        notes = (await admin.ok("GET", "/v1/nodes"))["notes"]
        assert "last good one" in notes[0]
        assert TOKEN not in str(notes)
        more = (await admin.ok("POST", "/v1/sandboxes", SMALL | {"count": 4}))["sandboxes"]
        assert {info["node"] for info in more} == {daemon.node for daemon in daemons}
        assert await say(admin, held["id"], "hi") == "aGk="
        unknown = await admin.error("GET", f"/v1/sandboxes/sb-elsewhere-{'a' * 16}")
        assert unknown.code == "node_unreachable"  # not "there is none": Consul may know better
        child.kill()
        await child.wait()
    async with gateway(data, server, secrets) as (child, admin):  # a gateway that starts meanwhile
        await ready_nodes(admin, 2)
        assert await say(admin, held["id"], "hi") == "aGk="
        one = daemons[0]
        one.kill9()
        one.start()  # a node that starts meanwhile, on another port: nobody can tell the gateway
        await ready_nodes(admin, 1)
        server.start()  # an agent that restarts
        await until(lambda: _fresh(admin))
        await until(lambda: _all_passing(consul, 2))
        await ready_nodes(admin, 2)
        assert {await say(admin, info["id"], "hi") for info in [held, *more]} == {"aGk="}
        for info in [held, *more]:
            await admin("DELETE", f"/v1/sandboxes/{info['id']}")


async def _fresh(admin):
    return not (await admin("GET", "/readyz"))[1].get("notes")


async def _all_passing(consul, count: int):
    rows = (await consul.services("dsec-node"))[1]
    return len(rows) == count and all(row.passing for row in rows)


async def test_a_node_that_is_stopped_leaves_at_once(daemons, consul):
    await until(lambda: _all_passing(consul, 2))
    assert daemons[1].stop() == 0
    rows = (await consul.services("dsec-node"))[1]
    assert [row.meta["node"] for row in rows] == [daemons[0].node]
    assert not any(daemons[1].node in key for key in await consul.read(PREFIX))
    daemons[1].start()
    await until(lambda: _all_passing(consul, 2))
