"""Calls as tasks of a cluster: verdict in the logs, the program's own end, and a daemon that dies."""

from __future__ import annotations

import asyncio
import base64

import pytest
from libdsec.wire_tasks import task_key

from tests.contract.test_node_tasks import paths
from tests.kit.abilities import needs
from tests.kit.leaks import clean_after
from tests.kit.node_daemon import CONTAINER_NEEDS, NodeDaemon
from tests.kit.tasks import Collector, task_client

# One daemon serves the whole file and mounts its image at the first call: its leftovers are looked for at its end.
pytestmark = [needs("cc", *CONTAINER_NEEDS), pytest.mark.timeout(120), pytest.mark.leaks_ok]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = NodeDaemon(tmp_path_factory.mktemp("n"), backend="container")
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


async def start(client, logs, *argv, task_id="", **call):
    task_id = task_id or client.new_id()
    body = {
        "task_id": task_id,
        "alloc_id": "a",
        "task_name": "t",
        "call": {"image": client.daemon.image, "argv": list(argv)} | call,
    }
    return (await client.call("PUT", f"/v1/calls/{task_key(task_id)}", body | paths(logs))).ok()


async def test_the_payload_comes_as_stdin_and_the_end_is_the_programs(client, logs):
    stdin = base64.b64encode(b"word\n").decode()
    info = await start(client, logs, "bash", "-c", "read x; echo got $x; echo e >&2; exit 6", stdin=stdin)
    again = await start(client, logs, "false", task_id=info["task_id"])
    assert again["key"] == info["key"]
    ended = await client.wait(info["key"], "calls")
    assert (ended["exit_code"], ended.get("error", "")) == (6, "")
    assert logs.read() == b"got word\n"
    err = logs.read("stderr").decode()
    assert err.startswith("e\ndsec-fncall: runtime_error")
    await client.destroy(info["key"], "calls")
    assert (await client.call("GET", f"/v1/calls/{info['key']}")).status == 404


async def test_a_verdict_that_no_exit_code_shows_is_told_in_words(client, logs):
    expected = base64.b64encode(b"yes").decode()
    right = await start(client, logs, "bash", "-c", "echo yes", expected=expected)
    assert (await client.wait(right["key"], "calls"))["exit_code"] == 0
    wrong = await start(client, logs, "bash", "-c", "echo no", expected=expected)
    ended = await client.wait(wrong["key"], "calls")
    assert "wrong_answer" in ended["error"]
    for info in (right, wrong):
        await client.destroy(info["key"], "calls")


async def test_a_stop_ends_the_call(client, logs):
    limits = {"wall_s": 100, "cpu_s": 100}
    info = await start(client, logs, "bash", "-c", "sleep 100", limits=limits)
    async with asyncio.timeout(10):
        assert (await client.stop(info["key"], 0.2, kind="calls"))["signal"] == 9
    await client.destroy(info["key"], "calls")


@pytest.mark.leaks_ok  # the module's daemon is another process afterwards
async def test_a_call_is_lost_with_its_daemon_and_says_so(client, daemon, logs):
    info = await start(client, logs, "bash", "-c", "sleep 100", limits={"wall_s": 100})
    daemon.kill9()
    daemon.start()
    async with task_client(daemon) as fresh:
        assert "node daemon ended" in (await fresh.wait(info["key"], "calls"))["error"]
        await fresh.destroy(info["key"], "calls")


async def test_an_unknown_image_is_told_at_once(client, logs):
    task_id = client.new_id()
    body = {"task_id": task_id, "call": {"image": "nowhere", "argv": ["true"]}}
    error = (await client.call("PUT", f"/v1/calls/{task_key(task_id)}", body)).error
    assert "nowhere" in error["message"]
