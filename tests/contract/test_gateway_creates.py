"""Creates under faults: idempotency, gangs and their undo, refusals, lies, clients that go away."""

import asyncio
import random

import pytest
from aiohttp import web
from libdsec import wire
from libdsec.errors import CapacityError, PlatformError, UsageError

from nomad_dsec.httpd import json_reply, read_json
from tests.kit.fakenode import FakeNode, cut
from tests.kit.gateways import CREATE, calling, running_gateway, tenant_key

POST = "POST /v1/sandboxes"
GANG = CREATE | {"count": 8, "wait_s": 1.0}


@pytest.fixture
async def nodes():
    async with FakeNode("n1") as one, FakeNode("n2") as two, FakeNode("n3") as three:
        yield one, two, three


@pytest.fixture
async def gateway(tmp_path, nodes):
    async with running_gateway(tmp_path / "gw", *nodes) as gateway:
        yield gateway


@pytest.fixture
async def admin(gateway):
    async with calling(gateway) as caller:
        yield caller


def live(nodes) -> set[str]:
    return {name for node in nodes for name in node.live}


async def until(condition, timeout_s: float = 8.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not become true in time"
        await asyncio.sleep(0.02)


async def test_a_group_is_split_over_the_nodes_and_named_by_them(admin, nodes):
    made = await admin.create(count=9)
    assert sorted(info["node"] for info in made) == ["n1"] * 3 + ["n2"] * 3 + ["n3"] * 3
    assert {info["id"] for info in made} == live(nodes)


async def test_a_refused_portion_goes_to_other_nodes(admin, nodes):
    nodes[0].refuse = CapacityError("starting_limit", "busy")
    made = await admin.create(count=6)
    assert {info["node"] for info in made} == {"n2", "n3"}
    assert len(live(nodes)) == 6


@pytest.fixture
async def small(tmp_path):
    """Two nodes for four sandboxes each, and an admin of their gateway."""
    async with (
        FakeNode("n1", sandboxes_max=4) as one,
        FakeNode("n2", sandboxes_max=4) as two,
        running_gateway(tmp_path / "small", one, two) as gateway,
        calling(gateway) as caller,
    ):
        yield one, two, caller


async def test_a_gang_that_does_not_fit_whole_is_refused_and_leaves_nothing(small):
    one, two, admin = small
    error = await admin.error("POST", "/v1/sandboxes", GANG | {"count": 9})
    assert (error.kind, error.code) == ("capacity", "capacity")
    assert error.details["refusals"] == {"sandboxes_max": 2}
    assert (one.made, two.made) == (0, 0)  # placement knew: no node was asked
    reply = await admin.ok("POST", "/v1/sandboxes", GANG | {"count": 10, "all_or_none": False})
    assert len(reply["sandboxes"]) == 8
    assert [failure["error"]["code"] for failure in reply["failures"]] == ["capacity"] * 2


@pytest.mark.parametrize(
    "refusal",
    [CapacityError("disk", "no disk"), PlatformError("start_failed", "no cgroup"), UsageError("bad_user", "no")],
)
async def test_a_gang_is_undone_on_all_nodes_when_one_refuses_and_none_else_has_room(small, refusal):
    one, two, admin = small
    two.refuse = refusal
    error = await admin.error("POST", "/v1/sandboxes", GANG)
    if refusal.kind == "usage":
        assert error.code == refusal.code
    else:
        assert error.details["refusals"][refusal.code] == 1
    assert one.made == 4  # they ran, and
    assert live([one, two]) == set()  # were gone before the error was told
    assert (await admin.ok("GET", "/v1/whoami")).get("sandboxes", 0) == 0


async def test_a_fault_of_the_only_node_is_told_as_it_was(tmp_path):
    async with FakeNode("n1") as node, running_gateway(tmp_path / "gw", node) as gateway, calling(gateway) as admin:
        node.refuse = PlatformError("start_failed", "clone3: EPERM", details={"step": "launch"})
        error = await admin.error("POST", "/v1/sandboxes", CREATE)
        assert (error.kind, error.code, error.details["step"]) == ("platform", "start_failed", "launch")


async def test_a_passing_refusal_is_asked_again_until_wait_s(tmp_path):
    async with FakeNode("n1") as node, running_gateway(tmp_path / "gw", node) as gateway, calling(gateway) as admin:
        tries = []

        async def twice(request: web.Request) -> web.StreamResponse:
            tries.append(request)
            if len(tries) < 3:
                raise CapacityError("queue_full", "full", retry_after_s=0.1)
            return await node._create(request)

        node.script[POST] = twice
        await admin.create(wait_s=10)
        assert len(tries) == 3
        tries.clear()
        node.script[POST] = _refuse
        error = await admin.error("POST", "/v1/sandboxes", CREATE | {"wait_s": 0.3})
        assert error.details["refusals"] == {"queue_full": 1}


async def _refuse(request: web.Request) -> web.StreamResponse:
    raise CapacityError("queue_full", "full", retry_after_s=0.1)


async def test_a_node_that_restarts_delays_a_create_and_does_not_fail_it(tmp_path):
    async with FakeNode("n1") as node, running_gateway(tmp_path / "gw", node) as gateway, calling(gateway) as admin:
        await node.stop()
        asked = asyncio.create_task(admin.create(wait_s=20))
        await asyncio.sleep(0.4)
        await node.start()
        assert len(await asked) == 1
        await until(lambda: len(node.live) == 1)


# idempotency


async def test_the_same_key_and_body_get_the_same_reply_and_another_body_is_refused(admin, nodes):
    body = CREATE | {"idempotency_key": "k1", "labels": {"a": "1", "b": "2"}}
    first = await admin.ok("POST", "/v1/sandboxes", body)
    reordered = dict(reversed(body.items())) | {"labels": {"b": "2", "a": "1"}}
    assert await admin.ok("POST", "/v1/sandboxes", reordered) == first
    error = await admin.error("POST", "/v1/sandboxes", body | {"cpus": 2})
    assert (error.kind, error.code, error.field) == ("usage", "idempotency_mismatch", "idempotency_key")
    assert len(live(nodes)) == 1


async def test_concurrent_repeats_of_a_key_make_one_sandbox(admin, nodes):
    for node in nodes:
        node.create_s = 0.2
    body = CREATE | {"idempotency_key": "k1", "count": 2}
    replies = await asyncio.gather(
        *(admin("POST", "/v1/sandboxes", body) for _ in range(20)),
        *(admin("POST", "/v1/sandboxes", body | {"cpus": 2}) for _ in range(3)),
    )
    assert [status for status, _ in replies] == [200] * 20 + [400] * 3
    assert all(value == replies[0][1] for _, value in replies[:20])
    assert len(live(nodes)) == 2


async def test_a_key_is_of_its_namespace(admin, gateway, nodes):
    async with calling(gateway, await tenant_key(admin, "team-a")) as tenant:
        mine = await tenant.create(idempotency_key="k1")
        others = await admin.create(idempotency_key="k1", cpus=2)
        assert mine[0]["id"] != others[0]["id"]


async def test_a_key_outlives_the_gateway(tmp_path, nodes):
    body = CREATE | {"idempotency_key": "k1"}
    async with running_gateway(tmp_path / "gw", *nodes) as gateway, calling(gateway) as admin:
        first = await admin.ok("POST", "/v1/sandboxes", body)
    async with running_gateway(tmp_path / "gw", *nodes) as gateway, calling(gateway) as admin:
        assert await admin.ok("POST", "/v1/sandboxes", body) == first
        assert (await admin.error("POST", "/v1/sandboxes", body | {"cpus": 2})).code == "idempotency_mismatch"
    assert len(live(nodes)) == 1


async def test_a_failed_create_does_not_use_up_its_key(admin, nodes):
    for node in nodes:
        node.refuse = CapacityError("disk", "no disk")
    body = CREATE | {"idempotency_key": "k1"}
    assert (await admin("POST", "/v1/sandboxes", body))[0] == 503
    for node in nodes:
        node.refuse = None
    await admin.ok("POST", "/v1/sandboxes", body)
    assert len(live(nodes)) == 1


async def test_one_waiter_of_a_key_may_leave_without_harm_to_the_others(admin, nodes):
    for node in nodes:
        node.create_s = 0.3
    body = CREATE | {"idempotency_key": "k1"}
    leaver = asyncio.create_task(admin("POST", "/v1/sandboxes", body))
    stayer = asyncio.create_task(admin("POST", "/v1/sandboxes", body))
    await asyncio.sleep(0.1)
    leaver.cancel()
    status, value = await stayer
    assert status == 200
    await asyncio.sleep(0.3)
    assert live(nodes) == {value["sandboxes"][0]["id"]}


# clients that go away


async def test_a_create_whose_client_goes_away_is_undone_on_every_node(admin, nodes):
    for node in nodes:
        node.create_s = 0.3
    asked = asyncio.create_task(admin("POST", "/v1/sandboxes", GANG))
    await until(lambda: sum(node.calls[POST] for node in nodes) == 3)
    asked.cancel()
    await until(lambda: sum(node.made for node in nodes) == 8 and not live(nodes))
    assert (await admin.ok("GET", "/v1/whoami"))["sandboxes"] == 0


async def test_an_abandoned_key_removes_what_it_made_and_is_free_again(admin, nodes):
    (made,) = await admin.create(idempotency_key="k1")
    await admin.ok("DELETE", "/v1/creates/k1")
    assert live(nodes) == set()
    await admin.ok("DELETE", "/v1/creates/k1")
    (again,) = await admin.create(idempotency_key="k1")
    assert again["id"] != made["id"]


async def test_500_creates_with_random_cancels_leave_as_many_as_there_are_handles(admin, nodes):
    """Case L4. The node holds each create for a random time; the client gives up after another, and says so."""
    rng = random.Random(4)

    async def hold(request: web.Request) -> web.StreamResponse:
        node = next(one for one in nodes if one.endpoint.url.endswith(f":{request.url.port}"))
        await asyncio.sleep(rng.uniform(0, 0.15))
        return await node._create(request)

    for node in nodes:
        node.script[POST] = hold
    held: set[str] = set()
    lanes = asyncio.Semaphore(60)

    async def one(number: int) -> None:
        key = {"idempotency_key": f"k{number}"}
        async with lanes:
            asked = asyncio.create_task(admin("POST", "/v1/sandboxes", CREATE | key | {"cpus": 0.1, "memory_mib": 16}))
            if rng.random() < 0.5:
                await asyncio.wait({asked}, timeout=rng.uniform(0, 0.15))
                if not asked.done():
                    asked.cancel()
            try:
                status, value = await asked
            except asyncio.CancelledError:
                await admin.ok("DELETE", f"/v1/creates/k{number}")
                return
            assert status == 200, value
            held.update(info["id"] for info in value["sandboxes"])

    await asyncio.gather(*(one(number) for number in range(500)))
    assert len(held) > 200
    try:
        await until(lambda: live(nodes) == held, timeout_s=20)
    except AssertionError:
        raise AssertionError(f"orphans {live(nodes) - held}, lost {held - live(nodes)}") from None
    assert (await admin.ok("GET", "/v1/whoami"))["sandboxes"] == len(held)


# lies


async def _giant(request: web.Request, asked: wire.NodeCreateRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    for _ in range(400):
        await response.write(b" " * 65536)
    return response


async def _cut(request: web.Request, asked: wire.NodeCreateRequest) -> web.StreamResponse:
    cut(request)
    return web.Response()


async def _half(request: web.Request, asked: wire.NodeCreateRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"sandboxes": [')
    cut(request)
    return response


def _answer(**fields):
    async def answer(request: web.Request, asked: wire.NodeCreateRequest) -> web.StreamResponse:
        known = {"node": "n1", "namespace": asked.namespace, "backend": "container", "image": "i", "digest": "d"}
        infos = [wire.SandboxInfo(**({"id": name, "state": "running"} | known | fields)) for name in asked.ids]
        return json_reply(wire.CreateReply(sandboxes=infos))

    return answer


def _raw(body: bytes, status: int = 200):
    async def answer(request: web.Request, asked: wire.NodeCreateRequest) -> web.StreamResponse:
        return web.Response(body=body, status=status, content_type="application/json")

    return answer


LIES = {
    "not json": (_raw(b"<html>"), "bad_node_reply"),
    "wrong type": (_raw(b'{"sandboxes": 3}'), "bad_node_reply"),
    "none of the ids": (_raw(b'{"sandboxes": []}'), "bad_node_reply"),
    "not utf-8": (_raw(b'{"sandboxes": [{"id": "\xff"}]}'), "bad_node_reply"),
    "an error that is none": (_raw(b"oops", 500), "bad_node_reply"),
    "a redirect": (_raw(b"", 302), "bad_node_reply"),
    "giant": (_giant, "bad_node_reply"),
    "another namespace": (_answer(namespace="other"), "bad_node_reply"),
    "another node": (_answer(node="n2"), "bad_node_reply"),
    "another id": (_answer(id="sb-n1-aaaaaaaaaaaaaaaa"), "bad_node_reply"),
    "cut": (_cut, "node_unreachable"),
    "cut in the middle": (_half, "node_unreachable"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_strange_replies_are_faults_and_what_the_node_made_is_removed(tmp_path, lie):
    handler, code = LIES[lie]
    async with FakeNode("n1") as node, running_gateway(tmp_path / "gw", node) as gateway, calling(gateway) as admin:

        async def make_and_lie(request: web.Request) -> web.StreamResponse:
            asked = await read_json(request, wire.NodeCreateRequest)
            for name in asked.ids:
                node.sandboxes[name] = node.make(name, asked)
                node.made += 1
            return await handler(request, asked)

        node.script[POST] = make_and_lie
        error = await admin.error("POST", "/v1/sandboxes", CREATE | {"wait_s": 0.2})
        assert error.code == code
        assert error.kind == ("protocol" if code == "bad_node_reply" else "platform")
        assert node.made >= 1
        await until(lambda: not node.live)
