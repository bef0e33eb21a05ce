"""SIGKILL of the daemon at every step: what lived lives on, what was half made is gone, nothing is left unowned.

Cases L1 and L2 of the field: a restart lost every sandbox; paused ones could be neither resumed nor deleted after it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3

import aiohttp
import pytest

from tests.kit.abilities import needs
from tests.kit.node_daemon import CONTAINER_NEEDS, NodeDaemon

pytestmark = [needs("root", "overlay", "cc"), pytest.mark.timeout(240)]
CUT = (aiohttp.ClientError, ConnectionError)


@pytest.fixture(params=["fake", pytest.param("container", marks=needs(*CONTAINER_NEEDS))])
def daemon(request, tmp_path):
    made = NodeDaemon(tmp_path, backend=request.param)
    made.start()
    yield made
    made.remove()


async def _die_at(daemon, failpoint, request):
    """Restart the daemon with the failpoint armed and send it what makes it die there."""
    daemon.kill9()
    daemon.start(failpoint=failpoint)
    async with daemon.client() as client:
        with pytest.raises(CUT):
            await request(client)
    assert daemon.wait_death() == -signal.SIGKILL
    daemon.start()


def _send(method, path):
    return lambda client: client.call(method, path)


def _post(path, sandbox):
    return lambda client: client.call("POST", path, client.body([sandbox]))


async def _works(client, sandbox):
    assert (await client.info(sandbox))["state"] == "running"
    assert (await client.exec(sandbox, "echo alive"))["stdout"] == "YWxpdmUK"


async def _nothing_stray(client):
    for name in ("orphans_found", "lost", "stop_failures"):
        assert await client.metric(f"dsec_node_{name}_total") == 0, name


async def test_creates_killed_at_each_step_are_adopted_or_gone(daemon):
    async with daemon.client() as client:
        (live,) = await client.create()
        (paused,) = await client.create()
        await client.call("POST", f"/v1/sandboxes/{paused['id']}/pause")
    for failpoint, survives in (
        ("admitted", None),
        ("journaled", False),
        ("started", False),
        ("running", True),
        ("before_reply", True),
    ):
        (new,) = daemon.new_ids()
        await _die_at(daemon, failpoint, _post("/v1/sandboxes", new))
        async with daemon.client() as client:
            found = await client.call("GET", f"/v1/sandboxes/{new}")
            if survives is None:
                assert found.status == 404
            elif survives:
                await _works(client, new)
            else:
                assert (found.ok()["state"], found.ok()["reason"]) == ("exited", "error(node_restart)")
            again = (await client.call("POST", "/v1/sandboxes", client.body([new]))).ok()["sandboxes"][0]
            assert again["state"] == ("exited" if survives is False else "running")
            await _works(client, live["id"])
            assert (await client.info(paused["id"]))["state"] == "paused"
            await _nothing_stray(client)
    async with daemon.client() as client:
        assert (await client.call("POST", f"/v1/sandboxes/{paused['id']}/resume")).ok()["state"] == "running"
        await _works(client, paused["id"])


async def test_kills_killed_at_each_step_are_finished_with_the_true_reason(daemon):
    for failpoint in ("stopping", "stopped", "ended"):
        async with daemon.client() as client:
            victim, other = [info["id"] for info in await client.create(2)]
            await client.call("POST", f"/v1/sandboxes/{other}/pause")
        await _die_at(daemon, failpoint, _send("DELETE", f"/v1/sandboxes/{victim}?reason=evicted"))
        async with daemon.client() as client:
            info = await client.info(victim)
            assert (info["state"], info["reason"]) == ("exited", "evicted")
            assert (await client.call("DELETE", f"/v1/sandboxes/{other}")).ok()["reason"] == "killed"
            await _nothing_stray(client)


async def test_pauses_killed_at_each_step_can_be_resumed(daemon):
    async with daemon.client() as client:
        (box,) = [info["id"] for info in await client.create()]
    for failpoint, verb in (("pausing", "pause"), ("paused", "pause"), ("resuming", "resume"), ("resumed", "resume")):
        async with daemon.client() as client:
            if verb == "resume":
                (await client.call("POST", f"/v1/sandboxes/{box}/pause")).ok()
        await _die_at(daemon, failpoint, _send("POST", f"/v1/sandboxes/{box}/{verb}"))
        async with daemon.client() as client:
            assert (await client.info(box))["state"] in ("running", "paused")
            (await client.call("POST", f"/v1/sandboxes/{box}/resume")).ok()
            await _works(client, box)
            await _nothing_stray(client)


async def test_a_death_in_the_middle_of_much_loses_nothing(daemon):
    """Live, paused and creating ones at once; a second death in the middle of the recovery too."""
    async with daemon.client() as client:
        running = [info["id"] for info in await client.create(12)]
        paused = [info["id"] for info in await client.create(4)]
        await asyncio.gather(*(client.call("POST", f"/v1/sandboxes/{each}/pause") for each in paused))
        marked = await client.call("PUT", f"/v1/sandboxes/{running[0]}/files", data=b"kept", path="/tmp/mark")
        assert marked.status == 200
        creating = daemon.new_ids(8)
        spec = {"env": {"DSEC_FAKE_DELAY_S": "0.2"}}
        tasks = [asyncio.create_task(client.call("POST", "/v1/sandboxes", client.body([x], **spec))) for x in creating]
        await asyncio.sleep(0.1)
        daemon.kill9()
        made = [task.result().json for task in tasks if task.done() and not task.exception()]
        await asyncio.gather(*tasks, return_exceptions=True)
    daemon.start(failpoint="recovered", expect_death=True)
    daemon.start()
    async with daemon.client() as client:
        live = await client.ls()
        for sandbox in running:
            await _works(client, sandbox)
        assert (await client.call("GET", f"/v1/sandboxes/{running[0]}/files", path="/tmp/mark")).body == b"kept"
        assert {live[sandbox]["state"] for sandbox in paused} == {"paused"}
        handed = {info["id"] for reply in made for info in reply["sandboxes"]}
        assert handed <= set(live), "what a client was told of is there"
        assert set(live) - set(running) - set(paused) <= set(creating)
        assert {info["state"] for info in live.values()} == {"running", "paused"}
        node = (await client.call("GET", "/v1/node")).ok()
        assert node["capacity"]["sandboxes"] == len(live)
        await _nothing_stray(client)
        again = [await client.call("POST", "/v1/sandboxes", client.body([sandbox])) for sandbox in creating]
        assert {reply.ok()["sandboxes"][0]["state"] for reply in again} <= {"running", "exited"}


async def test_execs_go_on_through_a_death_and_their_result_is_kept(daemon):
    async with daemon.client() as client:
        (box,) = [info["id"] for info in await client.create()]
        path = f"/v1/sandboxes/{box}/execs"
        request = {"cmd": "echo begun; sleep 1; echo ended; exit 5", "exec_id": "through"}
        task = asyncio.create_task(client.call("POST", path, request))
        async with asyncio.timeout(20):
            while (await client.call("GET", f"{path}/through")).status != 200:
                await asyncio.sleep(0.02)
        daemon.kill9()
        with pytest.raises(CUT):  # a cut connection is never an exit code (E2)
            await task
    daemon.start()
    async with daemon.client() as client:
        again = (await client.call("POST", path, request)).ok()
        assert (again["exit_code"], again["stdout"]) == (5, "YmVndW4KZW5kZWQK")


@pytest.mark.parametrize("daemon", ["fake"], indirect=True)  # its handle has a pid; the container suite kills its own
async def test_what_died_while_the_daemon_was_dead_is_told_with_its_reason(daemon):
    async with daemon.client() as client:
        victim, other = [info["id"] for info in await client.create(2)]
    daemon.kill9()
    with sqlite3.connect(daemon.data / "journal.db") as db:
        (row,) = db.execute("SELECT row FROM sandbox WHERE id = ?", (victim,)).fetchone()
    db.close()
    os.kill(json.loads(row)["handle"]["data"]["pid"], signal.SIGKILL)
    daemon.start()
    async with daemon.client() as client:
        info = await client.info(victim)
        assert (info["state"], info["reason"]) == ("exited", "init_exited")
        await _works(client, other)


def test_a_second_daemon_on_the_same_data_is_refused(daemon):
    first = daemon.process
    daemon.process = None
    try:
        daemon.start(expect_death=True)
        assert "already_running" in daemon.log()
    finally:
        daemon.process = first


async def test_a_stop_leaves_sandboxes_and_kill_on_exit_does_not(daemon):
    async with daemon.client() as client:
        (box,) = [info["id"] for info in await client.create()]
    assert daemon.stop() == 0
    daemon.start(more=("--kill-on-exit",))
    async with daemon.client() as client:
        await _works(client, box)
    assert daemon.stop() == 0
    daemon.start()
    async with daemon.client() as client:
        info = await client.info(box)
        assert (info["state"], info["reason"]) == ("exited", "killed")
