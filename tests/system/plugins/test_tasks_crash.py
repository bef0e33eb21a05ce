"""SIGKILL of the node daemon under tasks and grants: same pid, right exit code, no second start, no orphan."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from libdsec.wire_tasks import task_key

from tests.contract.test_node_tasks import paths, pid_of
from tests.kit.abilities import needs
from tests.kit.node_daemon import CONTAINER_NEEDS, NodeDaemon
from tests.kit.tasks import Collector, task_client

pytestmark = [needs("root", "overlay", "cc"), pytest.mark.timeout(120)]


@pytest.fixture(params=["fake", pytest.param("container", marks=needs(*CONTAINER_NEEDS))])
def daemon(request, tmp_path):
    made = NodeDaemon(tmp_path, backend=request.param, flags=("--mount-roots", str(tmp_path / "allocs")))
    (tmp_path / "allocs").mkdir()
    made.start()
    yield made
    made.remove()


async def test_a_task_outlives_the_daemon_and_its_logs_go_on(daemon, tmp_path):
    logs = Collector(tmp_path / "c")
    script = "i=0; while [ ! -e /tmp/stop ]; do echo line $i; i=$((i+1)); sleep 0.02; done; echo last; exit 5"
    async with task_client(daemon) as client:
        info = await client.start("sh", "-c", script, **paths(logs))
        await logs.read_until(b"line 5\n")
    pid = pid_of(f"sh -c {script}")
    assert pid is not None
    daemon.kill9()
    daemon.start()
    async with task_client(daemon) as client:
        assert pid_of(f"sh -c {script}") == pid
        again = await client.start("sh", "-c", "exit 1", task_id=info["task_id"])
        assert again["sandbox"] == info["sandbox"]
        async with daemon.client() as tcp:
            await tcp.exec(info["sandbox"], ": > /tmp/stop")
        ended = await client.wait(info["key"])
        assert ended["exit_code"] == 5
        got = await logs.read_until(b"last\n")
        numbers = [int(line.split()[1]) for line in got.decode().splitlines() if line.startswith("line ")]
        assert sorted(set(numbers)) == list(range(min(numbers), max(numbers) + 1))  # none missing; a few may come twice
        await client.destroy(info["key"])
    logs.close()


async def test_an_end_while_the_daemon_is_away_is_told_truly(daemon, tmp_path):
    logs = Collector(tmp_path / "c")
    async with task_client(daemon) as client:
        info = await client.start(
            "sh", "-c", "while [ ! -e /tmp/go ]; do sleep 0.02; done; echo bye; exit 41", **paths(logs)
        )
        sleeper = await client.start("sh", "-c", "while [ ! -e /tmp/go ]; do sleep 0.02; done; kill -TERM $$")
        async with daemon.client() as tcp:
            for one in (info, sleeper):
                await tcp.exec(one["sandbox"], "(sleep 1; : > /tmp/go) >/dev/null 2>&1 &")
    daemon.kill9()
    await asyncio.sleep(1.5)
    daemon.start()
    async with task_client(daemon) as client:
        assert (await client.wait(info["key"]))["exit_code"] == 41
        assert (await client.wait(sleeper["key"]))["signal"] == 15
        assert b"bye\n" in logs.read()
        for one in (info, sleeper):
            await client.destroy(one["key"])
        assert (await client.call("GET", "/v1/sandboxes")).ok()["sandboxes"] == []
    logs.close()


@pytest.mark.parametrize("failpoint", ["admitted", "journaled", "started", "running"])
async def test_a_daemon_killed_while_it_starts_a_task_leaves_one_or_none(daemon, failpoint):
    daemon.kill9()
    daemon.start(failpoint=failpoint)
    async with task_client(daemon) as client:
        task_id = client.new_id()
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await client.start("sleep", "1003", task_id=task_id)
    daemon.wait_death()
    daemon.start()
    async with task_client(daemon) as client:
        assert pid_of("sleep 1003") is None
        assert (await client.call("GET", f"/v1/tasks/{task_key(task_id)}")).status == 404
        info = await client.start("sleep", "1003", task_id=task_id)  # the plugin repeats its call
        running = (await client.call("GET", "/v1/sandboxes")).ok()["sandboxes"]
        assert [i["id"] for i in running] == [info["sandbox"]]
        await client.destroy(info["key"])
        async with daemon.client() as tcp:
            assert await tcp.metric("dsec_node_orphans_found_total") == 0


@needs(*CONTAINER_NEEDS)
async def test_oom_is_told_from_other_kills_also_across_a_restart(tmp_path):
    daemon = NodeDaemon(tmp_path, backend="container")
    daemon.start()
    eat = "while [ ! -e /tmp/go ]; do sleep 0.05; done; x=x; while :; do x=$x$x; done"
    try:
        async with task_client(daemon) as client:
            now = await client.start("sh", "-c", eat)
            later = await client.start("sh", "-c", eat)
            async with daemon.client() as tcp:
                await tcp.exec(now["sandbox"], ": > /tmp/go")
                ended = await client.wait(now["key"])
                assert ended["oom_killed"]
                await tcp.exec(later["sandbox"], "(sleep 1; : > /tmp/go) >/dev/null 2>&1 &")
        daemon.kill9()
        await asyncio.sleep(3)
        daemon.start()
        async with task_client(daemon) as client:
            ended = await client.wait(later["key"])
            assert ended["oom_killed"]
            told = await client.start("sh", "-c", "kill -9 $$")
            assert not (await client.wait(told["key"])).get("oom_killed", False)
            for info in (now, later, told):
                await client.destroy(info["key"])
    finally:
        daemon.remove()


@needs(*CONTAINER_NEEDS)
async def test_host_directories_below_the_allowed_roots_only(tmp_path):
    roots = tmp_path / "allocs"
    (roots / "a/local").mkdir(parents=True)
    (roots / "a/local").chmod(0o777)
    (roots / "a/local/in").write_text("given")
    (roots / "out").symlink_to("/etc")
    daemon = NodeDaemon(tmp_path, backend="container", flags=("--mount-roots", str(roots)))
    daemon.start()
    try:
        async with task_client(daemon) as client:
            mounts = [{"host_path": str(roots / "a/local"), "task_path": "/local", "readonly": False}]
            script = "read x < /local/in; echo $x-back > /local/out"
            info = await client.start("sh", "-c", script, mounts=mounts)
            ended = await client.wait(info["key"])
            assert ended["exit_code"] == 0
            assert (roots / "a/local/out").read_text() == "given-back\n"
            assert os.stat(roots / "a/local/out").st_uid >= 1_000_000
            mounts = [{"host_path": str(roots / "out"), "task_path": "/x", "readonly": True}]
            task_id = client.new_id()
            body = client.body(task_id, "true", mounts=mounts)
            error = (await client.call("PUT", f"/v1/tasks/{task_key(task_id)}", body)).error
            assert error["code"] == "mount_not_allowed"
            mounts = [{"host_path": str(roots / "a/local"), "task_path": "/local", "readonly": True}]
            readonly = await client.start("sh", "-c", "echo x > /local/y", mounts=mounts)
            assert (await client.wait(readonly["key"]))["exit_code"] != 0
            assert not Path(roots / "a/local/y").exists()
            for one in (info, readonly):
                await client.destroy(one["key"])
    finally:
        daemon.remove()


@needs(*CONTAINER_NEEDS)
async def test_task_directories_belong_to_the_task(tmp_path):
    """Made by a client: nobody's and open, with files of root's and of a user's. Two tasks of one allocation share."""
    alloc, secret = tmp_path / "allocs/alloc", tmp_path / "allocs/t/secrets"
    for directory in (alloc, secret):
        directory.mkdir(parents=True)
        os.chown(directory, 65534, 65534)
        directory.chmod(0o777)
    for name, uid, mode in (("of-root", 0, 0o600), ("of-user", 1000, 0o600), ("open", 0, 0o644)):
        (secret / name).write_text(name)
        (secret / name).chmod(mode)
        os.chown(secret / name, uid, uid)
    daemon = NodeDaemon(tmp_path, backend="container", flags=("--mount-roots", str(tmp_path / "allocs")))
    daemon.start()
    mounts = [
        {"host_path": str(alloc), "task_path": "/alloc", "readonly": False, "owners": "task"},
        {"host_path": str(secret), "task_path": "/secrets", "readonly": True, "owners": "host"},
    ]
    try:
        async with task_client(daemon) as client:

            async def run(script: str, **more: Any) -> int:
                info = await client.start("sh", "-c", script, mounts=mounts, **more)
                ended = await client.wait(info["key"])
                await client.destroy(info["key"])
                return ended["exit_code"]

            assert await run("[ $(stat -c %u:%g /alloc) = 0:0 ] && umask 077 && echo one > /alloc/made") == 0
            assert ((alloc / "made").stat().st_uid, (alloc / "made").stat().st_gid) == (65534, 65534)
            assert await run("[ $(cat /alloc/made) = one ] && echo two > /alloc/made") == 0  # another range of ids
            assert (alloc / "made").read_text() == "two\n"
            assert await run("cat /secrets/of-root /secrets/of-user /secrets/open") == 0
            assert await run("cat /secrets/of-user && ! cat /secrets/of-root", user="1000") == 0
            assert await run("echo x > /secrets/new") != 0
            assert await run("echo x > /alloc/users && chmod 4755 /alloc/users", user="1000") == 0
            assert (alloc / "users").stat().st_uid >= 1_000_000  # no id that means something on the host
            mounts[1] |= {"readonly": False}
            task_id = client.new_id()
            body = client.body(task_id, "true", mounts=mounts)
            error = (await client.call("PUT", f"/v1/tasks/{task_key(task_id)}", body)).error
            assert (error["code"], error["field"]) == ("bad_mount", "mounts[1].owners")
    finally:
        daemon.remove()


async def test_grants_make_the_room_and_their_end_takes_it(tmp_path):
    daemon = NodeDaemon(tmp_path, flags=("--capacity", "granted", "--cpu-overcommit", "1", "--memory-overcommit", "1"))
    daemon.start()
    try:
        async with task_client(daemon) as client, daemon.client() as tcp:

            async def grant(name: str, cpus: float, memory_mib: int) -> str:
                task_id = client.new_id(name)
                key = task_key(task_id)
                body = {
                    "task_id": task_id,
                    "alloc_id": name,
                    "task_name": "pool",
                    "cpus": cpus,
                    "memory_mib": memory_mib,
                }
                info = (await client.call("PUT", f"/v1/grants/{key}", body)).ok()
                assert info["state"] == "running"
                return key

            refused = await tcp.call("POST", "/v1/sandboxes", tcp.body(daemon.new_ids()))
            assert refused.error["code"] == "capacity"
            one, two = await grant("a", 1.0, 256), await grant("b", 1.0, 256)
            eager = await tcp.create(2, memory_mib=100, qos="best_effort")
            calm = await tcp.create(2, memory_mib=100)
            refused = await tcp.call("POST", "/v1/sandboxes", tcp.body(daemon.new_ids(), memory_mib=128))
            assert refused.error["code"] == "capacity"
            outside = await client.start("sleep", "1005", memory_mib=512)  # Nomad gave it its own resources

            daemon.kill9()
            daemon.start()
            await _withdraw_and_look(client, one, two, eager, calm, outside)
    finally:
        daemon.remove()


async def _withdraw_and_look(client, one, two, eager, calm, outside):
    async with task_client(client.daemon) as client, client.daemon.client() as tcp:
        assert {g["key"] for g in (await client.call("GET", "/v1/grants")).ok()["grants"]} == {one, two}
        stopping = asyncio.create_task(client.stop(one, 30.0, kind="grants"))
        for info in eager:
            assert (await tcp.wait_state(info["id"], "exited"))["reason"] == "evicted"
        for info in calm:  # they fit into what is left
            assert (await tcp.info(info["id"]))["state"] == "running"
        assert (await stopping)["exit_code"] == 0
        assert (await client.wait(one, "grants", 1.0))["state"] == "exited"
        waiting = asyncio.create_task(client.stop(two, 1.0, kind="grants"))
        await asyncio.sleep(0.3)
        for info in calm:  # until the deadline
            assert (await tcp.info(info["id"]))["state"] == "running"
        refused = await tcp.call("POST", "/v1/sandboxes", tcp.body(client.daemon.new_ids(), memory_mib=16))
        assert refused.error["code"] == "capacity"
        await waiting
        for info in calm:
            ended = await tcp.info(info["id"])
            assert (ended["state"], ended["reason"]) == ("exited", "evicted")
            assert "withdrawn" in ended["message"]
        assert (await client.call("GET", f"/v1/tasks/{outside['key']}")).ok()["state"] == "running"
        for key in (one, two):
            await client.destroy(key, "grants")
        await client.destroy(outside["key"])


async def test_a_static_node_refuses_grants_in_words(daemon):
    async with task_client(daemon) as client:
        task_id = client.new_id()
        body = {"task_id": task_id, "cpus": 1.0, "memory_mib": 64}
        error = (await client.call("PUT", f"/v1/grants/{task_key(task_id)}", body)).error
        assert error["code"] == "static_capacity"
        assert "--capacity granted" in error["hint"]
