"""Nodes that Consul tells of, as the gateway takes them: fake nodes, and a view that the test sets."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace

import pytest
from libdsec.errors import DsecError

from nomad_dsec.cluster.consul import Service
from nomad_dsec.cluster.discovery import View
from nomad_dsec.cluster.secrets import SecretSource
from nomad_dsec.gateway.discovered import ConsulSource, NodeTokens
from tests.kit.fakenode import TOKEN, FakeNode
from tests.kit.gateways import ADMIN, QUICK, calling, running_gateway


class Told:
    """What a Discovery shows, without a Consul."""

    def __init__(self, *services: Service, stale: bool = False) -> None:
        self.changed = asyncio.Event()
        self.view = View(services=services, stale=stale)

    def age_s(self) -> float | None:
        return None if self.view.stale else 0.0

    def set(self, *services: Service, **more) -> None:
        self.view = replace(self.view, services=services, **more)
        self.changed.set()


class Still:
    """A clock for the tokens that the test moves."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at


def service(node: FakeNode, **changes) -> Service:
    port = int(node.endpoint.url.rpartition(":")[2])
    row = Service(
        node="machine",
        service_id=f"dsec-node-{node.id}",
        address="127.0.0.1",
        port=port,
        tags=(),
        meta={"node": node.id},
        passing=True,
    )
    return replace(row, **changes)


def source(told: Told, template: str = TOKEN, *, static=(), clock=None, **environ: str) -> ConsulSource:
    return ConsulSource(told, NodeTokens(template, SecretSource(environ=environ), clock or Still()), static=static)


async def until(ask, timeout_s: float = 8.0):
    async with asyncio.timeout(timeout_s):
        while not (value := await ask()):
            await asyncio.sleep(0.03)
        return value


async def live(admin) -> set[str]:
    return {row["node"] for row in (await admin.ok("GET", "/v1/nodes"))["nodes"] if not row.get("stale")}


async def test_nodes_come_when_they_are_told_of_and_critical_ones_count(tmp_path):
    told = Told()
    async with FakeNode("n1") as one, FakeNode("n2") as two, FakeNode("n3") as fixed:
        found = source(told, static=[fixed.endpoint])
        async with running_gateway(tmp_path / "gw", source=found) as gateway, calling(gateway) as admin:
            assert await live(admin) == {"n3"}
            told.set(service(one), service(two, passing=False))
            await until(lambda: _are(admin, {"n1", "n2", "n3"}))
            assert {row["node"] for row in await admin.create(count=9)} == {"n1", "n2", "n3"}


async def _are(admin, wanted: set[str]) -> bool:
    return await live(admin) == wanted


async def test_a_node_that_only_consul_lost_keeps_its_sandboxes(tmp_path):
    async with FakeNode("n1") as node:
        told = Told(service(node))
        async with (
            running_gateway(tmp_path / "gw", source=source(told)) as gateway,
            calling(gateway) as admin,
        ):
            (made,) = await admin.create()
            told.set()
            await asyncio.sleep(0.3)
            assert (await admin.ok("POST", f"/v1/sandboxes/{made['id']}/execs", {"cmd": ["id"]}))["exit_code"] == 0
            await node.stop()  # now it is silent too: lost, with its sandboxes, not unknown

            async def lost() -> bool:
                (row,) = (await admin.ok("GET", "/v1/sandboxes?state=running,lost"))["sandboxes"]
                assert row["id"] == made["id"]
                return row["state"] == "lost"

            await until(lost)
            told.changed.set()
            await asyncio.sleep(0.3)
            assert await lost()
            await node.start()
            await until(lambda: _are(admin, {"n1"}))
            assert not await lost()


async def test_a_lost_node_is_forgotten_in_the_end(tmp_path):
    async with FakeNode("n1") as node:
        told = Told(service(node))
        pace = replace(QUICK, lost_s=0.5, forget_s=0.8)
        async with (
            running_gateway(tmp_path / "gw", source=source(told), pace=pace) as gateway,
            calling(gateway) as admin,
        ):
            await node.stop()
            told.set()

            async def forgotten() -> bool:
                return not (await admin.ok("GET", "/v1/nodes"))["nodes"]

            await until(forgotten)


async def test_the_same_node_by_settings_and_by_consul_is_one(tmp_path):
    async with FakeNode("n1") as node:
        other_name = f"http://localhost:{service(node).port}"
        static = replace(node.endpoint, url=other_name)
        told = Told(service(node))
        async with (
            running_gateway(tmp_path / "gw", source=source(told, static=[static])) as gateway,
            calling(gateway) as admin,
        ):

            async def one() -> bool:
                rows = (await admin.ok("GET", "/v1/nodes"))["nodes"]
                return [(row["address"], row.get("error", "")) for row in rows] == [(other_name, "")]

            await until(one)
            (made,) = await admin.create()
            await asyncio.sleep(0.2)
            assert await one()
            assert (await admin.ok("GET", f"/v1/sandboxes/{made['id']}"))["state"] == "running"


async def test_a_node_that_moved_is_followed(tmp_path):
    async with FakeNode("n1") as old:
        told = Told(service(old))
        async with (
            running_gateway(tmp_path / "gw", source=source(told)) as gateway,
            calling(gateway) as admin,
        ):
            (made,) = await admin.create()
            async with FakeNode("n1") as new:
                new.sandboxes = old.sandboxes
                await old.stop()
                told.set(service(new))

                async def moved() -> bool:
                    rows = (await admin.ok("GET", "/v1/nodes"))["nodes"]
                    return [(row["address"], row.get("stale", False)) for row in rows] == [(new.endpoint.url, False)]

                await until(moved)
                assert (await admin.ok("GET", f"/v1/sandboxes/{made['id']}"))["state"] == "running"


async def test_one_that_answers_by_another_name_is_not_used(tmp_path):
    async with FakeNode("n2") as node:
        told = Told(service(node, meta={"node": "n1"}))
        async with running_gateway(tmp_path / "gw", source=source(told)) as gateway, calling(gateway) as admin:
            (row,) = (await admin.ok("GET", "/v1/nodes"))["nodes"]
            assert "calls itself n2, not n1" in row["error"]


STRANGE = {
    "no name": {"meta": {}},
    "a path": {"meta": {"node": "../../etc/shadow"}},
    "no port": {"port": 0},
    "an address with a path": {"address": "127.0.0.1/x?"},
    "an address with a login": {"address": "root@127.0.0.1"},
}


@pytest.mark.parametrize("what", STRANGE)
async def test_strange_entries_are_named_and_harm_no_other(tmp_path, what):
    async with FakeNode("n1") as good, FakeNode("n2") as bad:
        told = Told(service(good), service(bad, **STRANGE[what]))
        async with running_gateway(tmp_path / "gw", source=source(told)) as gateway, calling(gateway) as admin:
            await until(lambda: _are(admin, {"n1"}))
            notes = (await admin.ok("GET", "/v1/nodes"))["notes"]
            assert "dsec-node-n2" in notes[0]
            assert bad.calls.total() == 0


async def test_tokens_come_from_a_secret_source_by_node(tmp_path):
    secrets = tmp_path / "tokens"
    secrets.mkdir()
    (secrets / "n1").touch(mode=0o600)
    (secrets / "n1").write_text(TOKEN)
    async with FakeNode("n1") as one, FakeNode("n2") as two:
        clock, told = Still(), Told(service(one), service(two))
        found = source(told, f"file:{secrets}/{{node}}", clock=clock)
        async with running_gateway(tmp_path / "gw", source=found) as gateway, calling(gateway) as admin:
            await until(lambda: _are(admin, {"n1"}))
            listing = await admin.ok("GET", "/v1/nodes")
            assert "the token of n2 can't be had" in listing["notes"][0]
            assert TOKEN not in str(listing)
            (secrets / "n2").touch(mode=0o600)
            (secrets / "n2").write_text(TOKEN)
            clock.at += 5  # a failure is remembered for some seconds
            told.changed.set()
            await until(lambda: _are(admin, {"n1", "n2"}))


async def test_a_token_is_looked_up_again_after_a_while():
    environ, clock = {"T": "first"}, Still()
    tokens = NodeTokens("env:T", SecretSource(environ=environ), clock)
    assert await tokens.of("n1") == "first"
    environ["T"] = "second"
    assert await tokens.of("n1") == "first"
    clock.at += 61
    assert await tokens.of("n1") == "second"
    del environ["T"]
    clock.at += 61
    assert await tokens.of("n1") == "second"  # what was good stays while its source is away
    environ["T"] = "third"
    clock.at += 5
    assert await tokens.of("n1") == "third"
    with pytest.raises(DsecError, match="NOT_SET"):
        await NodeTokens("env:NOT_SET", SecretSource(environ={}), clock).of("n1")


async def test_until_consul_has_answered_the_nodes_of_the_former_run_stand_in(tmp_path):
    async with FakeNode("n1") as node:
        first = source(Told(service(node)))
        async with running_gateway(tmp_path / "gw", source=first) as gateway, calling(gateway) as admin:
            (made,) = await admin.create()
        silent = Told(stale=True)
        async with running_gateway(tmp_path / "gw", source=source(silent)) as gateway, calling(gateway) as admin:
            assert (await admin.ok("GET", f"/v1/sandboxes/{made['id']}"))["state"] == "running"
            assert "has not answered yet" in (await admin.ok("GET", "/v1/nodes"))["notes"][0]
            error = await admin.error("GET", f"/v1/sandboxes/sb-n9-{'a' * 16}")
            assert error.code == "node_unreachable"
            told, talk = await _node_ls(gateway)
            assert "n1" in told
            assert "Consul has not answered yet" in talk
            silent.set(stale=False)  # it answers: there is none (any more); ours still answers and is kept
            await until(lambda: _quiet(admin))
            assert (await admin.ok("GET", f"/v1/sandboxes/{made['id']}"))["state"] == "running"
            error = await admin.error("GET", f"/v1/sandboxes/sb-n9-{'a' * 16}")
            assert error.code == "sandbox_not_found"


async def _node_ls(gateway) -> tuple[str, str]:
    """What `dsec node ls` writes: data, and talk."""
    env = os.environ | {"DSEC_ENDPOINT": gateway.address, "DSEC_API_KEY": ADMIN}
    argv = [sys.executable, "-m", "nomad_dsec.cli", "node", "ls"]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*argv, env=env, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(child.communicate(), 30)
    assert child.returncode == 0, err
    return out.decode(), err.decode()


async def _quiet(admin) -> bool:
    return not (await admin.ok("GET", "/v1/nodes")).get("notes")
