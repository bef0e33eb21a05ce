"""Nodes that fall silent, come back, lie about themselves, or share a name."""

import asyncio

import pytest
from aiohttp import web
from libdsec import wire

from nomad_dsec.gateway.endpoints import Endpoint, StaticSource
from nomad_dsec.httpd import json_reply
from tests.kit.fakenode import FakeNode
from tests.kit.gateways import CREATE, calling, running_gateway

NODE = "GET /v1/node"


async def until(ask, timeout_s: float = 8.0):
    async with asyncio.timeout(timeout_s):
        while not (value := await ask()):
            await asyncio.sleep(0.03)
        return value


async def standing(admin, node: str) -> dict | None:
    for info in (await admin.ok("GET", "/v1/nodes"))["nodes"]:
        if info["node"] == node:
            return info
    return None


async def test_the_sandboxes_of_a_dead_node_are_stale_then_lost_and_back_when_it_returns(tmp_path):
    async with (
        FakeNode("n1") as one,
        FakeNode("n2") as two,
        running_gateway(tmp_path / "gw", one, two) as gateway,
        calling(gateway) as admin,
    ):
        made = await admin.create(count=4)
        mine = sorted(info["id"] for info in made if info["node"] == "n1")
        await one.stop()

        async def listed(state: str) -> list[dict]:
            reply = await admin.ok("GET", "/v1/sandboxes")
            assert sorted(info["id"] for info in reply["sandboxes"]) == sorted(info["id"] for info in made)
            on_one = [info for info in reply["sandboxes"] if info["node"] == "n1"]
            stale = reply.get("stale_nodes", []) == ["n1"]
            return on_one if stale and {info["state"] for info in on_one} == {state} else []

        await until(lambda: listed("running"))
        error = await admin.error("POST", f"/v1/sandboxes/{mine[0]}/execs", {"cmd": ["id"]})
        assert (error.kind, error.code) == ("platform", "node_unreachable")
        lost = await until(lambda: listed("lost"))
        assert {info["reason"] for info in lost} == {"node_lost"}
        assert (await admin.ok("GET", f"/v1/sandboxes/{mine[0]}"))["reason"] == "node_lost"
        error = await admin.error("POST", f"/v1/sandboxes/{mine[0]}/execs", {"cmd": ["id"]})
        assert (error.code, error.retry_after_s) == ("node_lost", None)
        assert {info["node"] for info in await admin.create(count=4)} == {"n2"}  # and nothing new goes there
        await one.start()

        async def back() -> bool:
            return (await admin.ok("GET", f"/v1/sandboxes/{mine[0]}"))["state"] == "running"

        await until(back)
        assert (await admin.ok("POST", f"/v1/sandboxes/{mine[0]}/execs", {"cmd": ["id"]}))["exit_code"] == 0


async def test_a_wedged_node_is_left_and_those_who_wait_for_it_are_told(tmp_path):
    async with FakeNode("n1") as node, running_gateway(tmp_path / "gw", node) as gateway, calling(gateway) as admin:
        (made,) = await admin.create()

        async def wedge(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(60)
            return web.Response()

        node.script["POST /v1/sandboxes/{id}/execs"] = wedge
        waiting = asyncio.create_task(admin("POST", f"/v1/sandboxes/{made['id']}/execs", {"cmd": ["id"]}))
        await asyncio.sleep(0.1)
        node.script[NODE] = wedge
        status, value = await asyncio.wait_for(waiting, 8)
        assert (status, value["error"]["code"]) == (500, "node_unreachable")


async def test_a_gateway_that_starts_while_a_node_is_down_does_not_deny_its_sandboxes(tmp_path):
    async with FakeNode("n1") as node, FakeNode("n2") as other:
        async with running_gateway(tmp_path / "gw", node, other) as first, calling(first) as admin:
            made = next(info for info in await admin.create(count=4) if info["node"] == "n1")
        await node.stop()
        async with running_gateway(tmp_path / "gw", node, other) as second, calling(second) as admin:
            error = await admin.error("GET", f"/v1/sandboxes/{made['id']}")
            assert (error.kind, error.code) == ("platform", "node_unreachable")
            assert "n1" in (await admin.ok("GET", "/v1/sandboxes"))["stale_nodes"]
            await node.start()

            async def heard() -> bool:
                info = await standing(admin, "n1")
                return info is not None and not info.get("stale")

            await until(heard)
            assert (await admin.ok("GET", f"/v1/sandboxes/{made['id']}"))["state"] == "running"
            absent = await admin.error("GET", f"/v1/sandboxes/sb-n9-{'a' * 16}")
            assert absent.code == "sandbox_not_found"  # now that every node is known


async def test_two_nodes_of_one_name_are_not_mixed(tmp_path):
    async with (
        FakeNode("n1") as one,
        FakeNode("n1") as two,
        running_gateway(tmp_path / "gw", one, two) as gateway,
        calling(gateway) as admin,
    ):

        async def told() -> list[dict]:
            nodes = (await admin.ok("GET", "/v1/nodes"))["nodes"]
            return [info for info in nodes if "both call themselves n1" in info.get("error", "")]

        assert len(await until(told)) == 1
        await admin.create(count=3)
        assert sorted((one.made, two.made)) == [0, 3]


async def test_a_wrong_token_is_named_and_is_not_the_clients_401(tmp_path):
    async with FakeNode("n1") as node:
        wrong = StaticSource([Endpoint(url=node.endpoint.url, token="wrong")])
        async with running_gateway(tmp_path / "gw", node, source=wrong) as gateway, calling(gateway) as admin:
            (info,) = (await admin.ok("GET", "/v1/nodes"))["nodes"]
            assert "does not accept the gateway's token" in info["error"]
            assert (await admin.error("GET", f"/v1/sandboxes/sb-n1-{'a' * 16}")).code == "node_unreachable"


GARBAGE = {
    "not json": lambda request: web.Response(body=b"<html>"),
    "wrong type": lambda request: web.Response(body=b'{"node": 3}'),
    "bad name": lambda request: json_reply(wire.NodeInfo(node="../../etc")),
    "error": lambda request: web.Response(status=500, body=b"oops"),
    "too large": lambda request: web.Response(body=b" " * (9 * 1024 * 1024)),
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_a_node_that_talks_garbage_is_not_used_and_harms_no_other(tmp_path, what):
    async with FakeNode("n1") as bad, FakeNode("n2") as good:

        async def garbage(request: web.Request) -> web.StreamResponse:
            return GARBAGE[what](request)

        bad.script[NODE] = garbage
        async with running_gateway(tmp_path / "gw", bad, good) as gateway, calling(gateway) as admin:
            assert {info["node"] for info in await admin.create(count=3)} == {"n2"}
            assert bad.made == 0


async def test_a_node_with_a_strange_listing_hides_no_other_nodes_sandboxes(tmp_path):
    async with (
        FakeNode("n1") as bad,
        FakeNode("n2") as good,
        running_gateway(tmp_path / "gw", bad, good) as gateway,
        calling(gateway) as admin,
    ):
        await admin.create(count=4)

        async def garbage(request: web.Request) -> web.StreamResponse:
            return web.Response(body=b"[]")

        bad.script["GET /v1/sandboxes"] = garbage
        reply = await admin.ok("GET", "/v1/sandboxes")
        assert len(reply["sandboxes"]) == 4  # the bad node's from memory
        assert reply["stale_nodes"] == ["n1"]


async def test_a_node_renamed_behind_its_endpoint_is_another_node(tmp_path):
    async with FakeNode("n1") as node, running_gateway(tmp_path / "gw", node) as gateway, calling(gateway) as admin:
        await admin.create()
        node.id = "n2"
        node.sandboxes.clear()
        await until(lambda: standing(admin, "n2"))
        assert await standing(admin, "n1") is None
        assert (await admin.create())[0]["node"] == "n2"


async def test_placement_sees_capacity_and_refuses_with_counts_per_reason(tmp_path):
    """Case L7."""
    async with (
        FakeNode("n1", cpus_total=1.0) as one,
        FakeNode("n2", memory_mib_total=100) as two,
        FakeNode("n3") as three,
        FakeNode("n4") as four,
        FakeNode("n5") as five,
    ):
        three.draining = four.draining = True
        five.offers = [wire.BackendFingerprint(name="container", available=False, reason="no user namespaces")]
        async with running_gateway(tmp_path / "gw", one, two, three, four, five) as gateway, calling(gateway) as admin:
            error = await admin.error("POST", "/v1/sandboxes", CREATE | {"cpus": 2})
            expected = {"larger_than_node": 2, "draining": 2, "backend_unavailable": 1}
            assert error.details["refusals"] == expected
            assert error.details["nodes"] == 5
            for reason in expected:
                assert reason in error.message
