"""Tasks of a cluster as its driver plugins meet them: a real daemon, on the fake backend and on real containers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from libdsec.wire_tasks import task_key

from tests.kit.abilities import needs
from tests.kit.leaks import clean_after
from tests.kit.node_daemon import CONTAINER_NEEDS, NodeDaemon
from tests.kit.tasks import Collector, task_client

if TYPE_CHECKING:
    from collections.abc import Iterator

# One daemon serves the whole file and mounts its image at the first create: its leftovers are looked for at its end.
pytestmark = [needs("root", "overlay", "cc"), pytest.mark.timeout(120), pytest.mark.leaks_ok]
SLEEP = ("sleep", "1000")


@pytest.fixture(scope="module", params=["fake", pytest.param("container", marks=needs(*CONTAINER_NEEDS))])
def daemon(request, tmp_path_factory) -> Iterator[NodeDaemon]:
    directory = tmp_path_factory.mktemp("n")
    roots = directory / "allocs"
    roots.mkdir()
    made = NodeDaemon(directory, backend=request.param, flags=("--mount-roots", str(roots)))
    made.roots = roots
    with clean_after():
        made.start()
        yield made
        made.remove()


@pytest.fixture
async def client(daemon):
    async with task_client(daemon) as made:
        yield made


@pytest.fixture
def logs(tmp_path):
    made = Collector(tmp_path)
    yield made
    made.close()


def paths(logs: Collector) -> dict[str, str]:
    return {f"{name}_path": str(path) for name, path in logs.paths.items()}


def pid_of(argv: str) -> int | None:
    """The host's pid of a program with exactly this command line."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip() == argv:
                return int(directory.name)
        except OSError:
            continue
    return None


async def test_runs_once_logs_and_tells_its_true_end(client, logs):
    task_id = client.new_id()
    argv = ("sh", "-c", "echo out $A; echo err >&2; exit 7")
    info = await client.start(*argv, task_id=task_id, env={"A": "1"}, **paths(logs))
    again = await client.start("sh", "-c", "exit 9", task_id=task_id)
    assert again["sandbox"] == info["sandbox"]
    ended = await client.wait(info["key"])
    assert (ended["exit_code"], ended.get("signal"), ended.get("error", "")) == (7, None, "")
    assert ended["completed_at"] >= ended["started_at"] > 0
    assert (logs.read("stdout"), logs.read("stderr")) == (b"out 1\n", b"err\n")
    for _ in range(2):
        assert await client.wait(info["key"], timeout_s=0) == ended
    await client.destroy(info["key"])
    assert (await client.call("GET", f"/v1/tasks/{info['key']}")).error["code"] == "task_not_found"
    assert (await client.call("GET", f"/v1/sandboxes/{info['sandbox']}")).ok()["state"] == "exited"


async def test_stop_signals_waits_and_kills(client):
    polite = await client.start("sh", "-c", "trap 'exit 3' TERM; while :; do sleep 0.05; done")
    assert (await client.stop(polite["key"], 10.0))["exit_code"] == 3
    stubborn = await client.start("sh", "-c", "trap '' TERM; while :; do sleep 0.05; done")
    async with asyncio.timeout(10):
        assert (await client.stop(stubborn["key"], 0.5))["signal"] == 9
    at_once = await client.start(*SLEEP)
    assert (await client.stop(at_once["key"], 0))["signal"] == 9
    assert await client.stop(at_once["key"], 5)  # of one that has ended is fine
    slow = await client.start("sh", "-c", "trap '' TERM; while :; do sleep 0.05; done")
    async with asyncio.timeout(10):  # a second stop shortens the first one's patience
        first = asyncio.create_task(client.stop(slow["key"], 60.0))
        await asyncio.sleep(0.2)
        assert (await client.stop(slow["key"], 0.1))["signal"] == 9
        assert (await first)["signal"] == 9
    for info in (polite, stubborn, at_once, slow):
        await client.destroy(info["key"])


async def test_signals_stats_and_unknown_tasks(client, logs):
    info = await client.start("sh", "-c", "trap 'echo got' HUP; while :; do sleep 0.02; done", **paths(logs))
    await asyncio.sleep(0.2)
    (await client.call("POST", f"/v1/tasks/{info['key']}/signal", {"signal": 1})).ok()
    await logs.read_until(b"got\n")
    assert (await client.call("GET", f"/v1/tasks/{info['key']}/stats")).ok()["pids"] >= 1
    assert (await client.call("DELETE", f"/v1/tasks/{info['key']}")).error["code"] == "task_running"
    await client.destroy(info["key"])
    for method, verb in (("GET", ""), ("GET", "/wait"), ("POST", "/stop"), ("GET", "/stats"), ("DELETE", "")):
        assert (await client.call(method, f"/v1/tasks/{'0' * 32}{verb}")).status == 404


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"argv": ["/no/such/program"]}, "command_not_found", "cmd"),
        ({"cwd": "/no/such/place"}, "cwd_missing", "cwd"),
        ({"policy": "nonsense"}, None, "policy"),
        ({"qos": "best"}, "bad_request", "qos"),
        ({"stdout_path": "/nowhere/alloc/logs/x"}, "log_path_missing", "stdout_path"),
        ({"stdout_path": "/etc/passwd"}, "bad_log_path", "stdout_path"),
        ({"mounts": [{"host_path": "/etc", "task_path": "/x"}]}, "mount_not_allowed", "mounts[0].source"),
    ],
)
async def test_what_can_not_start_says_why_and_leaves_nothing(client, change, code, field):
    task_id = client.new_id()
    path = f"/v1/tasks/{task_key(task_id)}"
    error = (await client.call("PUT", path, client.body(task_id, *SLEEP) | change)).error
    assert code is None or error["code"] == code
    assert field in error["field"]
    assert (await client.call("GET", path)).status == 404
    live = (await client.call("GET", "/v1/sandboxes")).ok()["sandboxes"]
    assert not [info for info in live if info["labels"].get("nomad.alloc") == task_id.partition("/")[0]]


async def test_a_wrong_key_is_refused(client):
    task_id = client.new_id()
    assert (await client.call("PUT", f"/v1/tasks/{'0' * 32}", client.body(task_id, *SLEEP))).error["field"] == "key"


async def test_a_stuck_collector_never_stalls_the_program(client, logs):
    flood = "i=0; while [ $i -lt 200 ]; do head -c 4096 /dev/zero; i=$((i+1)); done; echo end >&2; sleep 1000"
    info = await client.start("sh", "-c", flood, **paths(logs))
    await logs.read_until(b"end\n", "stderr")  # it came through, though nobody reads stdout
    logs.read()
    ended = await client.stop(info["key"], 0)
    assert ended["log_bytes_dropped"] >= 200 * 4096 - 65536 - 65536 * 2
    told = (await client.call("GET", "/v1/tasks/events", since=0, timeout_s=0)).ok()["events"]
    assert any("dropped" in event["message"] for event in told if event["task_id"] == info["task_id"])
    await client.destroy(info["key"])


async def test_a_collector_that_comes_back_gets_new_lines(client, logs):
    script = "head -c 300000 /dev/zero; while :; do echo tick; sleep 0.05; done"
    info = await client.start("sh", "-c", script, **paths(logs))
    await asyncio.sleep(2.5)  # longer than the pump's patience
    await logs.read_until(b"tick\n")
    await logs.read_until(b"tick\ntick\n")
    await client.destroy(info["key"])


async def test_a_log_path_through_a_link_is_refused(client, tmp_path):
    real, home = Collector(tmp_path / "real"), tmp_path / "home"
    (home / "alloc").mkdir(parents=True)
    (home / "alloc/logs").symlink_to(real.logs)
    task_id = client.new_id()
    body = client.body(task_id, *SLEEP, stdout_path=str(home / "alloc/logs/.t.stdout.fifo"))
    error = (await client.call("PUT", f"/v1/tasks/{task_key(task_id)}", body)).error
    assert error["code"] == "bad_log_path"
    real.close()


async def test_a_newer_invocation_ends_the_older(client):
    alloc = client.new_id().partition("/")[0]
    old = await client.start("sleep", "1001", task_id=f"{alloc}/t/1", alloc_id=alloc)
    new = await client.start("sleep", "1002", task_id=f"{alloc}/t/2", alloc_id=alloc)
    assert (await client.wait(old["key"], timeout_s=0))["signal"] == 9
    assert pid_of("sleep 1001") is None
    assert pid_of("sleep 1002") is not None
    for info in (old, new):
        await client.destroy(info["key"])


async def test_only_root_on_this_machine_reaches_tasks(daemon):
    async with daemon.client() as tcp:
        assert (await tcp.call("GET", f"/v1/tasks/{'0' * 32}")).status == 404
        assert (await tcp.call("GET", "/v1/grants")).status == 404
    assert os.stat(daemon.data / "node.sock").st_mode & 0o077 == 0


async def test_a_sandbox_that_dies_under_its_task_is_told_in_words(client):
    info = await client.start(*SLEEP)
    (await client.call("DELETE", f"/v1/sandboxes/{info['sandbox']}", reason="evicted")).ok()
    ended = await client.wait(info["key"])
    assert "evicted" in ended["error"]
    assert ended.get("exit_code") is None
    await client.destroy(info["key"])


async def test_events_can_be_polled(client):
    waiting = asyncio.create_task(client.call("GET", "/v1/tasks/events", since=-1, timeout_s=20))
    await asyncio.sleep(0.1)
    info = await client.start(*SLEEP)
    news = (await waiting).ok()
    assert [event["task_id"] for event in news["events"]] == [info["task_id"]]
    assert info["sandbox"] in news["events"][0]["message"]
    assert (await client.call("GET", "/v1/tasks/events", since=news["next"], timeout_s=0)).ok().get("events", []) == []
    await client.destroy(info["key"])
