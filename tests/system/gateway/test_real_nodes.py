"""The gateway over real node daemons (fake backend): what fake nodes can only claim."""

import asyncio
import random

import pytest

from nomad_dsec.gateway.endpoints import Endpoint, StaticSource
from tests.kit.abilities import needs
from tests.kit.gateways import calling, running_gateway
from tests.kit.node_daemon import NodeDaemon

# The daemons serve the whole file; what they must not leave is checked by their own removal at its end.
pytestmark = [needs("root", "overlay", "cc"), pytest.mark.timeout(180), pytest.mark.leaks_ok]
SMALL = {"image": "debian", "cpus": 0.05, "memory_mib": 32, "disk_mib": 16, "timeout_s": 600}


@pytest.fixture(scope="module")
def daemons(tmp_path_factory):
    made = [NodeDaemon(tmp_path_factory.mktemp(f"node{number}")) for number in range(2)]
    for daemon in made:
        daemon.start()
    yield made
    for daemon in made:
        daemon.remove()


@pytest.fixture
async def admin(tmp_path, daemons):
    over_tcp = Endpoint(url=daemons[0].facts["http"], token=daemons[0].token)
    over_unix = Endpoint(unix_path=daemons[1].facts["unix"].removeprefix("unix:"))
    source = StaticSource([over_tcp, over_unix])
    async with running_gateway(tmp_path / "gw", source=source) as gateway, calling(gateway) as caller:
        yield caller
        for info in await running(caller):
            await caller("DELETE", f"/v1/sandboxes/{info['id']}")


async def running(admin) -> list[dict]:
    """What runs, once no node's view is old: an exec may be through to a restarted daemon before its heartbeat is."""
    async with asyncio.timeout(20):
        while True:
            reply = await admin.ok("GET", "/v1/sandboxes?state=creating,running,paused")
            if not reply.get("stale_nodes"):
                return reply["sandboxes"]
            await asyncio.sleep(0.1)


async def say(admin, sandbox: str, word: str) -> str:
    reply = await admin.ok("POST", f"/v1/sandboxes/{sandbox}/execs", {"cmd": f"printf {word}"})
    return reply["stdout"]


async def test_a_group_spans_both_transports_and_each_member_answers(admin, daemons):
    made = (await admin.ok("POST", "/v1/sandboxes", SMALL | {"count": 6}))["sandboxes"]
    assert {info["node"] for info in made} == {daemon.node for daemon in daemons}
    words = await asyncio.gather(*(say(admin, info["id"], "hi") for info in made))
    assert set(words) == {"aGk="}
    for info in made:
        path = f"/v1/sandboxes/{info['id']}"
        status, value = await admin("PUT", f"{path}/files?path=/tmp/x", data=b"\x00\xff" * 50_000)
        assert (status, value) == (200, {"bytes": 100_000})
        async with admin.session.get(f"{path}/files?path=/tmp/x") as reply:
            assert await reply.read() == b"\x00\xff" * 50_000
        assert (await admin.ok("POST", f"{path}/pause"))["state"] == "paused"
        assert (await admin.ok("POST", f"{path}/resume"))["state"] == "running"
        assert (await admin.ok("PUT", f"{path}/timeout", {"timeout_s": 60}))["expires_at"] > 0


async def test_a_node_daemon_killed_and_started_again_keeps_its_sandboxes_in_reach(admin, daemons):
    made = (await admin.ok("POST", "/v1/sandboxes", SMALL | {"count": 4}))["sandboxes"]
    daemon = daemons[1]  # on a Unix socket: it comes back at the same address
    mine = next(info["id"] for info in made if info["node"] == daemon.node)
    daemon.kill9()
    assert (await admin.error("POST", f"/v1/sandboxes/{mine}/execs", {"cmd": "true"})).code == "node_unreachable"
    await asyncio.to_thread(daemon.start)
    async with asyncio.timeout(20):
        while (await admin("POST", f"/v1/sandboxes/{mine}/execs", {"cmd": "true"}))[0] != 200:
            await asyncio.sleep(0.1)
    assert {info["id"] for info in await running(admin)} == {info["id"] for info in made}


async def test_creates_with_random_cancels_leave_as_many_as_there_are_handles(admin):
    """Case L4 on real node daemons."""
    rng, held, lanes = random.Random(11), set(), asyncio.Semaphore(16)

    async def one(number: int) -> None:
        async with lanes:
            asked = asyncio.create_task(admin("POST", "/v1/sandboxes", SMALL | {"idempotency_key": f"c{number}"}))
            if rng.random() < 0.5:
                await asyncio.wait({asked}, timeout=rng.uniform(0, 0.1))
                asked.cancel()
            try:
                status, value = await asked
            except asyncio.CancelledError:
                await admin.ok("DELETE", f"/v1/creates/c{number}")
                return
            assert status == 200, value
            held.update(info["id"] for info in value["sandboxes"])

    await asyncio.gather(*(one(number) for number in range(120)))
    left: set[str] = set()
    for _ in range(100):
        left = {info["id"] for info in await running(admin)}
        if left == held:
            break
        await asyncio.sleep(0.2)
    assert (left - held, held - left) == (set(), set())
    assert len(held) >= 40


async def test_a_sandbox_whose_lease_is_not_renewed_ends(admin):
    """Case L5, seen through the gateway."""
    (kept, left) = (await admin.ok("POST", "/v1/sandboxes", SMALL | {"count": 2, "lease_s": 2.0}))["sandboxes"]
    async with asyncio.timeout(30):
        while (await admin.ok("GET", f"/v1/sandboxes/{left['id']}"))["state"] == "running":
            await admin.ok("PUT", f"/v1/sandboxes/{kept['id']}/lease", {"lease_s": 30.0})
            await asyncio.sleep(0.2)
    assert (await admin.ok("GET", f"/v1/sandboxes/{left['id']}"))["reason"] == "lease_expired"
    assert (await admin.ok("GET", f"/v1/sandboxes/{kept['id']}"))["state"] == "running"
