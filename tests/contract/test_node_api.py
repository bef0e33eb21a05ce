"""The node's HTTP API as a client meets it: a real daemon process, on the fake backend and on real containers."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import TYPE_CHECKING

import aiohttp
import pytest

from tests.kit.abilities import needs
from tests.kit.leaks import clean_after
from tests.kit.node_daemon import CONTAINER_NEEDS, NodeDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator

# One daemon serves the whole file and mounts its image at the first create: its leftovers are looked for at its end.
pytestmark = [needs("root", "overlay", "cc"), pytest.mark.timeout(120), pytest.mark.leaks_ok]


@pytest.fixture(scope="module", params=["fake", pytest.param("container", marks=needs(*CONTAINER_NEEDS))])
def daemon(request, tmp_path_factory) -> Iterator[NodeDaemon]:
    made = NodeDaemon(tmp_path_factory.mktemp("n"), backend=request.param, flags=("--starting-max", "8"))
    with clean_after():
        made.start()
        yield made
        made.remove()


@pytest.fixture
async def client(daemon):
    async with daemon.client() as made:
        yield made


@pytest.fixture
async def box(client):
    (info,) = await client.create()
    yield info["id"]
    await client.call("DELETE", f"/v1/sandboxes/{info['id']}")


async def test_create_list_info_kill(client):
    ids = client.daemon.new_ids(2)
    reply = await client.call("POST", "/v1/sandboxes", client.body(ids, labels={"run": "7"}, timeout_s=50.0))
    infos = reply.ok()["sandboxes"]
    assert [info["id"] for info in infos] == ids
    assert {info["state"] for info in infos} == {"running"}
    assert infos[0]["expires_at"] == pytest.approx(infos[0]["ready_at"] + 50)
    assert {"queue", "journal", "launch", "start"} <= set(infos[0]["timings_ms"])
    assert json.loads(reply.headers["X-Dsec-Node"])["sandboxes"] >= 2
    again = await client.call("POST", "/v1/sandboxes", client.body(ids))
    assert again.ok()["sandboxes"] == infos
    assert set(await client.ls(label="run=7", namespace="test")) == set(ids)
    assert await client.ls(label="run=8") == {}
    assert await client.ls(namespace="other") == {}
    for sandbox in ids:
        for _ in range(2):
            ended = (await client.call("DELETE", f"/v1/sandboxes/{sandbox}")).ok()
            assert (ended["state"], ended["reason"]) == ("exited", "killed")
    assert await client.ls(label="run=7") == {}
    assert set(await client.ls(label="run=7", state="exited")) == set(ids)


async def test_exec_returns_what_the_program_did(client, box):
    done = await client.exec(box, ["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (done["exit_code"], done["stdout"], done["stderr"]) == (7, "b3V0Cg==", "ZXJyCg==")
    done = await client.exec(box, "cat; echo $X; pwd", stdin="aGk=", env={"X": "1"}, cwd="/tmp")
    assert done["stdout"] == "aGkxCi90bXAK"
    assert (await client.exec(box, "kill -TERM $$"))["signal"] == 15
    slow = await client.exec(box, "sleep 60 & sleep 60", timeout_s=0.3)
    assert slow["timed_out"]
    assert "exit_code" not in slow
    assert (await client.exec(box, "exit 255"))["exit_code"] == 255


async def test_a_program_that_can_not_be_started_is_an_error_and_names_the_field(client, box):
    for request, status, code, field in (
        ({"cmd": ["/no/such"]}, 400, "command_not_found", "cmd"),
        ({"cmd": ["true"], "cwd": "/no/such"}, 400, "cwd_missing", "cwd"),
        ({"cmd": ["true"], "user": "nosuchuser"}, 400, "user_unknown", "user"),
        ({"cmd": []}, 400, "bad_argv", "argv"),
        ({"cmd": ["true"], "cwd": "x"}, 400, "bad_cwd", "cwd"),
        ({"cmd": ["true"], "rlimits": {"nofiles": 1}}, 400, "bad_rlimit", "rlimits"),
        ({"cmd": ["true"], "exec_id": "a b"}, 400, "bad_request", "exec_id"),
        ({"cmd": ["true"], "stdin_open": True}, 400, "stdin_open", "stdin_open"),
        ({"cmnd": ["true"]}, 400, "bad_request", "cmnd"),
    ):
        reply = await client.call("POST", f"/v1/sandboxes/{box}/execs", request)
        assert (reply.status, reply.error["code"], reply.error.get("field")) == (status, code, field)


@pytest.mark.parametrize("daemon", [pytest.param("container", marks=needs(*CONTAINER_NEEDS))], indirect=True)
async def test_an_id_outside_of_the_sandbox_is_no_user(client, box):
    url = f"/v1/sandboxes/{box}"
    for reply in (
        await client.call("POST", f"{url}/execs", {"cmd": ["true"], "user": "99999999"}),
        await client.call("GET", f"{url}/files", path="/etc/hostname", user="99999999"),
    ):
        assert (reply.status, reply.error["code"], reply.error["field"]) == (400, "user_unknown", "user")


@pytest.mark.parametrize("daemon", [pytest.param("container", marks=needs(*CONTAINER_NEEDS))], indirect=True)
async def test_timeouts_are_kept_and_files_read_while_programs_want_all_of_the_cpu(client, box):
    """L9. PID 1 competes with each of them for a twentieth of a core; by priority it comes first."""
    nice = await client.exec(box, "for p in 1 $$; do read -r line </proc/$p/stat; set -- $line; echo ${19}; done")
    assert base64.b64decode(nice["stdout"]).split() == [b"-20", b"0"]
    spin = "i=0; while [ $i -lt 20 ]; do (while :; do :; done) & i=$((i + 1)); done; sleep 60"
    assert (await client.exec(box, spin, timeout_s=3))["timed_out"]
    hogs = asyncio.create_task(client.call("POST", f"/v1/sandboxes/{box}/execs", {"cmd": spin, "timeout_s": 60}))
    await asyncio.sleep(2)
    spinning = (await client.call("GET", f"/v1/sandboxes/{box}/metrics")).ok()
    assert spinning["pids"] > 20
    assert (await client.exec(box, ["sleep", "60"], timeout_s=1))["timed_out"]
    assert (await client.call("GET", f"/v1/sandboxes/{box}/files", path="/etc/hostname")).status == 200
    (await client.call("DELETE", f"/v1/sandboxes/{box}")).ok()
    assert (await hogs).error["code"] == "sandbox_ended"


async def test_bodies_that_are_packed_are_refused(client, box):
    async with client.session.put(
        f"/v1/sandboxes/{box}/files?path=/tmp/x", data=b"x" * 20, headers={"Content-Encoding": "gzip"}
    ) as reply:
        error = (await reply.json())["error"]
    assert (reply.status, error["code"], error["field"]) == (400, "content_encoding", "Content-Encoding")


async def test_output_that_could_never_be_kept_is_refused(client):
    """A sixteenth of the memory, at least 4 MiB: beyond it nothing would say why the middle is missing."""
    (info,) = await client.create(memory_mib=128)
    url = f"/v1/sandboxes/{info['id']}/execs"
    body = {"cmd": "exit 0", "max_output_bytes": (8 << 20) + 1}
    refused = await client.call("POST", url, body)
    assert refused.status == 400
    error = refused.error
    assert (error["code"], error["field"]) == ("max_output_too_large", "max_output_bytes")
    assert error["details"]["max_output_bytes"] == 8 << 20
    (await client.call("POST", url, body | {"max_output_bytes": 8 << 20})).ok()
    await client.call("DELETE", f"/v1/sandboxes/{info['id']}")


@pytest.mark.parametrize("daemon", [pytest.param("container", marks=needs(*CONTAINER_NEEDS))], indirect=True)
async def test_an_open_network_shows_its_address(client, box):
    """That of the sandbox's own end; one without a network has none."""
    assert "address" not in (await client.call("GET", f"/v1/sandboxes/{box}/network")).ok()
    (info,) = await client.create(policy={"network": "open"})
    url = f"/v1/sandboxes/{info['id']}"
    shown = (await client.call("GET", f"{url}/network")).ok()
    inside = (await client.exec(info["id"], "cat /proc/net/fib_trie"))["stdout"]
    assert shown["kind"] == "open"
    assert shown["address"].encode() in base64.b64decode(inside)
    await client.call("DELETE", url)


async def test_an_exec_id_runs_once_however_often_it_is_sent(client, box):
    request = {"cmd": "echo x >>/tmp/count; sleep 0.5; echo done", "exec_id": "once-1"}
    path = f"/v1/sandboxes/{box}/execs"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):  # the connection is cut in the middle
            await client.call("POST", path, request)
    replies = await asyncio.gather(*(client.call("POST", path, request) for _ in range(3)))
    assert {reply.ok()["stdout"] for reply in replies} == {"ZG9uZQo="}
    assert (await client.exec(box, "wc -l </tmp/count || cat /tmp/count"))["stdout"] in ("MQo=", "eAo=")
    kept = (await client.call("GET", f"{path}/once-1")).ok()
    assert (kept["exit_code"], kept["stdout"]) == (0, "ZG9uZQo=")
    listed = (await client.call("GET", path)).ok()["execs"]
    assert "once-1" in {each["exec_id"] for each in listed}


async def test_a_stuck_exec_delays_no_other_and_can_be_signalled(client, box):
    path = f"/v1/sandboxes/{box}/execs"
    stuck = asyncio.create_task(client.call("POST", path, {"cmd": "echo begun; sleep 100", "exec_id": "stuck"}))
    async with asyncio.timeout(20):
        while (reply := await client.call("GET", f"{path}/stuck")).status != 200 or not reply.json.get("stdout"):
            await asyncio.sleep(0.02)
    assert reply.json["running"]
    assert (await client.exec(box, "echo ok"))["stdout"] == "b2sK"
    (await client.call("POST", f"{path}/stuck/signal", {"signal": 9})).ok()
    done = (await stuck).ok()
    assert done["signal"] == 9
    assert not done.get("oom_killed")


async def test_a_stream_carries_both_directions(client, box):
    async with client.session.ws_connect(f"/v1/sandboxes/{box}/execs/stream") as ws:
        await ws.send_json(
            {"cmd": "while read line; do echo got $line; done; echo bye >&2; exit 3", "stdin_open": True}
        )
        assert (await ws.receive_json())["type"] == "started"
        await ws.send_bytes(b"one\ntwo\n")
        await ws.send_json({"type": "close_stdin"})
        out, messages = {1: b"", 2: b""}, []
        async for message in ws:
            if message.type is aiohttp.WSMsgType.BINARY:
                stream, _offset = struct.unpack(">BQ", message.data[:9])
                out[stream] += message.data[9:]
            else:
                messages.append(json.loads(message.data))
    assert out == {1: b"got one\ngot two\n", 2: b"bye\n"}
    assert [(m["type"], m.get("exit_code")) for m in messages] == [("exited", 3)]


async def test_a_detached_stream_can_be_attached_again_at_an_offset(client, box):
    url = f"/v1/sandboxes/{box}/execs"
    async with client.session.ws_connect(f"{url}/stream") as ws:
        await ws.send_json({"cmd": "printf 0123456789; read x; printf abc", "exec_id": "again", "stdin_open": True})
        assert (await ws.receive_json())["exec_id"] == "again"
        assert (await ws.receive_bytes())[9:]
    async with client.session.ws_connect(f"{url}/again/stream", params={"since": "4"}) as ws:
        assert (await ws.receive_json())["type"] == "started"
        first = await ws.receive_bytes()
        assert struct.unpack(">BQ", first[:9]) == (1, 4)
        assert first[9:] == b"456789"
        await ws.send_json({"type": "signal", "signal": 9})
        last = await ws.receive_json()
        assert (last["type"], last["signal"]) == ("exited", 9)
    async with client.session.ws_connect(f"{url}/again/stream", params={"since": "0"}) as ws:
        seen = [await ws.receive() for _ in range(3)]
        assert [m.type for m in seen] == [aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT]


async def test_a_bad_stream_request_is_told_inside_it(client, box):
    async with client.session.ws_connect(f"/v1/sandboxes/{box}/execs/stream") as ws:
        await ws.send_json({"cmd": ["/no/such"]})
        messages = [json.loads(m.data) async for m in ws]
    assert messages[-1]["error"]["code"] == "command_not_found"
    with pytest.raises(aiohttp.WSServerHandshakeError):
        await client.session.ws_connect("/v1/sandboxes/sb-none-aaaaaaaaaaaaaaaa/execs/stream")


async def test_pause_stops_time_and_resume_gives_it_back(client, box):
    url = f"/v1/sandboxes/{box}"
    for _ in range(5):
        assert (await client.call("POST", f"{url}/pause")).ok()["state"] == "paused"
        refused = await client.call("POST", f"{url}/execs", {"cmd": "true"})
        assert (refused.status, refused.error["code"]) == (409, "wrong_state")
        assert (await client.call("POST", f"{url}/resume")).ok()["state"] == "running"
        assert (await client.exec(box, "echo on"))["stdout"] == "b24K"
    await client.call("POST", f"{url}/pause")
    assert (await client.call("DELETE", url)).ok()["state"] == "exited"
    refused = await client.call("POST", f"{url}/resume")
    assert (refused.error["code"], refused.error["details"]["reason"]) == ("sandbox_ended", "killed")


async def test_an_exec_in_flight_learns_why_its_sandbox_ended(client, box):
    running = asyncio.create_task(client.call("POST", f"/v1/sandboxes/{box}/execs", {"cmd": "sleep 100"}))
    await client.exec(box, "true")
    await client.call("PUT", f"/v1/sandboxes/{box}/timeout", {"timeout_s": 0.1})
    reply = await running
    assert (reply.status, reply.error["code"]) == (409, "sandbox_ended")
    assert reply.error["details"]["reason"] == "timeout"


async def test_leases_end_what_nobody_renews(client):
    kept, left = [(await client.create(lease_s=1.5))[0]["id"] for _ in range(2)]
    for _ in range(5):
        (await client.call("PUT", f"/v1/sandboxes/{kept}/lease", {"lease_s": 1.5})).ok()
        await asyncio.sleep(0.5)
    assert (await client.wait_state(left, "exited"))["reason"] == "lease_expired"
    assert (await client.info(kept))["state"] == "running"
    await client.call("DELETE", f"/v1/sandboxes/{kept}")


async def test_what_is_shown_of_a_sandbox_and_the_node(client, box):
    url = f"/v1/sandboxes/{box}"
    assert (await client.call("GET", f"{url}/metrics")).ok()["pids"] >= 1
    assert "kind" in (await client.call("GET", f"{url}/network")).ok()
    assert (await client.call("GET", f"{url}/plan")).ok()
    node = (await client.call("GET", "/v1/node")).ok()
    assert node["node"] == client.daemon.node
    assert node["backends"][0]["available"]
    assert node["capacity"]["sandboxes"] >= 1
    assert node["counts"]["running"] >= 1
    assert (await client.call("GET", "/readyz")).ok() == {"ok": True, "problems": {}}
    assert (await client.call("GET", "/v1/images")).status == 200
    for name in ("orphans_found", "stop_failures", "lost"):
        assert await client.metric(f"dsec_node_{name}_total") == 0
    assert await client.metric("dsec_node_step_seconds_count") > 0


@pytest.mark.parametrize("daemon", [pytest.param("container", marks=needs(*CONTAINER_NEEDS))], indirect=True)
async def test_out_of_memory_is_told_from_a_kill(client, box):
    hog = "dd if=/dev/zero of=/dev/null bs=300M count=1"
    done = await client.exec(box, hog.split())
    assert (done.get("signal"), done.get("oom_killed")) == (9, True)
    done = await client.exec(box, f"{hog}; exit $?")
    assert (done.get("exit_code"), done.get("oom_killed")) == (137, True)
    outlived = await client.exec(box, f"{hog}; true")
    assert (outlived.get("exit_code"), outlived.get("oom_killed")) == (0, None)
    for cmd in ("kill -9 $$", "exit 137"):
        assert "oom_killed" not in await client.exec(box, cmd)


@pytest.mark.parametrize("daemon", [pytest.param("container", marks=needs(*CONTAINER_NEEDS))], indirect=True)
async def test_out_of_memory_is_told_alike_to_whoever_asks_again(client, box):
    wanted = {"cmd": "dd if=/dev/zero of=/dev/null bs=300M count=1".split(), "exec_id": "hog"}
    first = (await client.call("POST", f"/v1/sandboxes/{box}/execs", wanted)).ok()
    again = (await client.call("POST", f"/v1/sandboxes/{box}/execs", wanted)).ok()
    later = (await client.call("GET", f"/v1/sandboxes/{box}/execs/hog")).ok()
    (listed,) = (await client.call("GET", f"/v1/sandboxes/{box}/execs")).ok()["execs"]
    assert [end.get("oom_killed") for end in (first, again, later, listed)] == [True] * 4


async def test_a_draining_node_takes_nothing_new_and_keeps_what_runs(client, box):
    assert (await client.call("POST", "/v1/node/drain", {})).ok()["draining"]
    try:
        refused = await client.call("POST", "/v1/sandboxes", client.body(client.daemon.new_ids()))
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert (await client.exec(box, "echo on"))["stdout"] == "b24K"
    finally:
        node = (await client.call("POST", "/v1/node/drain", {"on": False})).ok()
    assert "draining" not in node
    (info,) = await client.create()
    await client.call("DELETE", f"/v1/sandboxes/{info['id']}")


async def test_tokens_and_unknown_things(client, box):
    for headers, code in (({}, "no_credentials"), ({"Authorization": "Bearer x"}, "bad_token")):
        async with aiohttp.ClientSession(client.daemon.facts["http"], headers=headers) as stranger:
            async with stranger.get("/v1/node") as reply:
                assert (reply.status, (await reply.json())["error"]["code"]) == (403, code)
            async with stranger.get("/healthz") as reply:
                assert reply.status == 200
    unknown = await client.call("GET", f"/v1/sandboxes/sb-{client.daemon.node}-zzzzzzzzzzzzzzzz")
    assert (unknown.status, unknown.error["code"]) == (404, "sandbox_not_found")
    assert (await client.call("GET", "/v1/nothing")).status == 404
    for body, field in (
        ({"ids": [], "namespace": "a", "spec": {"image": "x"}}, "ids"),
        ({"ids": ["sb-other-aaaaaaaaaaaaaaaa"], "namespace": "a", "spec": {"image": "x"}}, "ids"),
        ({"ids": ["x"], "namespace": "a", "spec": {"image": "x"}}, "sandbox"),
        ({"ids": client.daemon.new_ids(), "namespace": "a", "spec": {"image": "x", "cpus": 0}}, "spec.cpus"),
        ({"ids": client.daemon.new_ids(), "namespace": "a", "spec": {"image": "x", "polcy": 1}}, "polcy"),
        (
            {
                "ids": client.daemon.new_ids(),
                "namespace": "a",
                "spec": {"image": client.daemon.image, "policy": {"x": 1}},
            },
            "policy.x",
        ),
    ):
        reply = await client.call("POST", "/v1/sandboxes", body)
        assert (reply.status, reply.error["field"]) == (400, field), reply.body
    refused = await client.call("POST", "/v1/sandboxes", client.body(client.daemon.new_ids(), image="missing:1"))
    assert (refused.status, refused.error["code"]) == (503, "image_missing")
