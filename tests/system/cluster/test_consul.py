"""Against a real Consul: registration, flapping, agent restart, session loss, discovery, locks, ACLs, away."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from libdsec.errors import DeniedError, DsecError

from nomad_dsec.cluster.consul import ConsulClient, Offer, Put
from nomad_dsec.cluster.discovery import Discovery
from nomad_dsec.cluster.health import PREFIX, Transitions
from nomad_dsec.cluster.leader import LeaderLock
from nomad_dsec.cluster.registration import Registration
from nomad_dsec.cluster.services import ID_PREFIX, SandboxServices
from nomad_dsec.cluster.settings import Endpoint
from tests.kit.abilities import needs
from tests.kit.consul import agent

pytestmark = needs("consul")
ME = Offer(name="dsec-node", service_id="dsec-node-n1", address="127.0.0.1", port=4000, meta={"node": "n1"}, ttl_s=10)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One agent for the tests that leave it as it was."""
    with agent(tmp_path_factory.mktemp("consul")) as one:
        yield one


@pytest.fixture
async def client(shared):
    one = ConsulClient(shared.endpoint())
    yield one
    assert await one.registered("dsec-") == {}
    assert await one.read("dsec/nodes") == {}
    await one.close()


@pytest.fixture
def server(tmp_path):
    """One of the test's own, to be killed."""
    with agent(tmp_path / "consul") as one:
        yield one


async def _until(check, *, timeout_s: float = 20.0):
    deadline = time.monotonic() + timeout_s
    while True:
        got = await check()
        if got:
            return got
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.1)


async def test_registers_flaps_and_leaves(client) -> None:
    state = {"healthy": True, "note": "fine"}
    registration = Registration(client, ME, note=lambda: (state["healthy"], state["note"]))
    await registration.step()
    (row,) = (await client.services("dsec-node"))[1]
    assert (row.passing, row.port, row.meta["node"]) == (True, 4000, "n1")
    for round_ in range(3):
        state |= {"healthy": False, "note": f"disk is full {round_}"}
        await registration.step()
        (row,) = (await client.services("dsec-node"))[1]
        assert not row.passing
        assert f"disk is full {round_}" in row.output
        state |= {"healthy": True, "note": "fine"}
        await registration.step()
        assert (await client.services("dsec-node"))[1][0].passing
    await registration.close()
    assert (await client.services("dsec-node"))[1] == []


async def test_an_agent_that_forgot_us_is_told_again_and_one_that_hangs_holds_nobody_up(server) -> None:
    client = ConsulClient(server.endpoint(), timeout_s=0.5)
    registration = Registration(client, ME, note=lambda: (True, ""))
    await registration.step()
    await client.deregister(ME.service_id)  # what an agent without our entry looks like
    await registration.step()
    assert (await client.services("dsec-node"))[1][0].passing
    server.stop()
    await registration.step()
    assert (registration.registered, registration.last_error) == (False, "consul_unreachable")
    server.start()
    await _until(lambda: _steps(registration))
    assert (await client.services("dsec-node"))[1][0].passing
    with server.paused():
        began = time.monotonic()
        await registration.step()
        assert registration.last_error == "consul_timeout"
        discovery = Discovery(client, "dsec-node")
        assert not await discovery.step(wait_s=0)
        assert "0.5 s" in discovery.view.error
        waiting = asyncio.create_task(discovery.run())
        await asyncio.sleep(0)
        waiting.cancel()  # in the middle of a query: no thread or connection stays in it
        await asyncio.wait([waiting], timeout=1)
        assert waiting.cancelled()
        await registration.close()
        assert time.monotonic() - began < 20
    await client.close()


async def _steps(registration: Registration) -> bool:
    await registration.step()
    return registration.registered


async def test_transitions_live_and_die_with_the_session(client) -> None:
    transitions = Transitions(node="n1")
    registration = Registration(client, ME, note=lambda: (True, ""), transitions=transitions)
    transitions.want({f"sb-n1-{number}": "init_exited" for number in range(150)})  # more than two transactions
    await registration.step()
    assert len(await client.read(PREFIX)) == 150
    transitions.want({"sb-n1-149": "init_exited"})
    await registration.step()
    assert await client.read(PREFIX) == {f"{PREFIX}/n1/unhealthy/sb-n1-149": b"init_exited"}
    session = registration._session
    await client.end_session(session)  # what its loss by TTL does
    assert await client.read(PREFIX) == {}
    await registration.step()
    assert len(await client.read(PREFIX)) == 1
    assert registration._session != session
    await registration.close()
    assert await client.read(PREFIX) == {}


async def test_a_successor_takes_over_what_a_killed_daemon_left(client) -> None:
    """Its session still holds the keys for up to a minute, and its sandboxes' services are still registered."""

    def daemon() -> tuple[Registration, Transitions, SandboxServices]:
        transitions = Transitions(node="n1")
        services = SandboxServices(client, owner=ME.service_id, limit=10)
        made = Registration(client, ME, note=lambda: (True, ""), transitions=transitions, services=services)
        return made, transitions, services

    first, transitions, services = daemon()
    transitions.want({"sb-n1-1": "oom", "sb-n1-2": "oom"})
    both = {name: services.offer(name, name="web", address="127.0.0.1", port=80) for name in ("sb-n1-1", "sb-n1-3")}
    services.want(both, {"sb-n1-1": "oom"})
    await first.step()
    assert len(await client.read(PREFIX)) == 2
    second, transitions, services = daemon()  # the first is gone without a word
    transitions.want({"sb-n1-1": "oom"})
    services.want({"sb-n1-1": both["sb-n1-1"]}, {})
    await second.step()
    assert second.last_error == ""
    assert await client.read(PREFIX) == {f"{PREFIX}/n1/unhealthy/sb-n1-1": b"oom"}
    (row,) = await _until(lambda: _instances(client, ID_PREFIX + "web", 1))
    assert (row.meta["sandbox"], row.passing) == ("sb-n1-1", True)  # and no longer in maintenance
    await second.close()
    assert await client.registered("") == {}


async def test_500_sandboxes_on_one_agent(client) -> None:
    """Each a service of its own, as well as its node; some unwell, each with its reason; the cap holds."""
    services = SandboxServices(client, owner=ME.service_id, limit=500)
    registration = Registration(client, ME, note=lambda: (True, ""), services=services)
    offers = {
        f"sb-n1-{number:03}": services.offer(f"sb-n1-{number:03}", name="web", address="10.0.0.1", port=80)
        for number in range(520)
    }
    services.want(offers, {"sb-n1-007": "no_answer"})
    for _ in range(9):  # 64 changes a step
        await registration.step()
    assert services.refused == 20
    rows = await _until(lambda: _instances(client, ID_PREFIX + "web", 500))
    unwell = [row for row in rows if not row.passing]
    assert [(row.meta["sandbox"], row.output) for row in unwell] == [("sb-n1-007", "no_answer")]
    await client.heartbeat(ME.service_id, healthy=False, note="the disk is full")
    await _until(lambda: _all_unwell(client))
    await client.heartbeat(ME.service_id, healthy=True, note="")
    services.want({}, {})
    while not await services.step(anew=False):
        pass
    await _until(lambda: _instances(client, ID_PREFIX + "web", 0))
    await registration.close()


async def _instances(client: ConsulClient, name: str, count: int):
    found = (await client.services(name))[1]
    return len(found) == count and (found or True)


async def _all_unwell(client: ConsulClient) -> bool:
    return not any(row.passing for row in (await client.services(ID_PREFIX + "web"))[1])


async def test_discovery_sees_changes_and_keeps_the_last_view(server) -> None:
    client = ConsulClient(server.endpoint())
    discovery = Discovery(client, "dsec-node")
    assert await discovery.step(wait_s=0)
    assert discovery.view.services == ()
    watching = asyncio.create_task(discovery.step(wait_s=15))
    await asyncio.sleep(0.2)
    registration = Registration(client, ME, note=lambda: (True, ""))
    await registration.step()
    await _until(lambda: _seen(discovery, watching))
    assert not discovery.view.stale
    server.stop()
    assert not await discovery.step(wait_s=0)
    assert discovery.view.stale
    assert [row.service_id for row in discovery.view.services] == ["dsec-node-n1"]
    server.start()
    await _until(lambda: discovery.step(wait_s=0))
    assert not discovery.view.stale
    await client.close()


async def _seen(discovery: Discovery, watching: asyncio.Task[bool]) -> bool:
    if watching.done() and not discovery.view.services:
        return await discovery.step(wait_s=0) and bool(discovery.view.services)
    return bool(discovery.view.services)


async def test_one_leader_at_a_time(client) -> None:
    first = LeaderLock(client, "dsec/leader", "a")
    second = LeaderLock(client, "dsec/leader", "b")
    now = asyncio.get_running_loop().time
    assert await first.step()
    assert not await second.step()
    assert (first.is_leader(now()), second.is_leader(now())) == (True, False)
    assert not first.is_leader(now() + 60)
    await first.close()
    assert await second.step()
    assert not first.is_leader(now())
    await client.end_session(second._session)  # lost: taken by another
    assert await first.step()
    assert not await second.step()
    await first.close()
    await second.close()


async def test_batches_are_whole_or_not_at_all(client) -> None:
    session = await client.open_session("s", ttl_s=10, delete=True)
    with pytest.raises(DsecError):
        await client.write([Put(key="t/1", value=b"x"), Put(key="t/2", value=b"y", session="no-such-session")])
    assert await client.read("t/") == {}
    await client.write([Put(key="t/1", value=b"\xff\x00", session=session), Put(key="t/2", value=b"")])
    assert await client.read("t/") == {"t/1": b"\xff\x00", "t/2": b""}
    await client.end_session(session)


async def test_acls_let_each_component_do_its_own_and_no_more(tmp_path) -> None:
    with agent(tmp_path / "acl", acl=True) as server:
        node, gateway = (ConsulClient(server.endpoint(server.token_of(one))) for one in ("node", "gateway"))
        anonymous = ConsulClient(server.endpoint(""))
        with pytest.raises(DeniedError) as caught:
            await anonymous.register(ME)
        assert "policies/acl" in caught.value.hint
        assert server.token not in str(caught.value)
        assert server.token not in repr(server.endpoint())
        transitions = Transitions(node="n1")
        transitions.want({"sb-n1-1": "oom"})
        services = SandboxServices(node, owner=ME.service_id, limit=1)
        services.want({"sb-n1-1": services.offer("sb-n1-1", name="web", address="10.0.0.1", port=1)}, {"sb-n1-1": "x"})
        registration = Registration(node, ME, note=lambda: (True, ""), transitions=transitions, services=services)
        await registration.step()
        assert registration.last_error == ""
        assert len((await gateway.services("dsec-node"))[1]) == 1
        assert await gateway.read(PREFIX) == {f"{PREFIX}/n1/unhealthy/sb-n1-1": b"oom"}
        denied = [
            gateway.register(ME),  # no gateway may pass itself off as a node
            gateway.write([Put(key=f"{PREFIX}/n1/unhealthy/sb-n1-1", value=None)]),
            gateway.deregister(ME.service_id),
            node.register(replace(ME, name="dsec-gateway", service_id="dsec-gateway-x")),
            node.write([Put(key="dsec/leader/autoscaler", value=b"me")]),
        ]
        for attempt in denied:
            with pytest.raises(DsecError, match="ermission denied"):
                await attempt
        await registration.close()
        assert (await gateway.services("dsec-node"))[1] == []

        async def replaced() -> Endpoint:
            return server.endpoint(server.token_of("gateway"))

        former = ConsulClient(server.endpoint("a-token-that-was-revoked"), refresh=replaced)
        assert (await former.services("dsec-node"))[1] == []  # refused, looked up, asked again
        await former.close()
        for client in (node, gateway, anonymous):
            await client.close()


def test_transitions_are_bounded_and_do_not_churn() -> None:
    transitions = Transitions(node="n")
    unwell = {f"s{number}": "x" * 10_000 for number in range(5000)}
    transitions.want(unwell)
    puts = transitions.pending("session")
    assert len(puts) == 4096
    assert transitions.untold == 904
    assert max(len(put.value or b"") for put in puts) == 512
    transitions.written(puts)
    transitions.want(dict(reversed(unwell.items())))
    assert transitions.pending("session") == []
    del unwell["s0"]
    transitions.want(unwell)
    assert [(put.key.rpartition("/")[2], put.value is None) for put in transitions.pending("session")] == [
        ("s4096", False),
        ("s0", True),
    ]
