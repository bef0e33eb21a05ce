"""`dsec dev`: one supervisor a directory, daemons that come back, a takeover after its death, a stop that is clean."""

from __future__ import annotations

import json
import os
import time

import pytest
from libdsec.client import AsyncClient
from libdsec.sandbox import AsyncSandbox

from nomad_dsec.dev.processes import record_of
from tests.kit.abilities import needs
from tests.kit.devstack import DevStack, processes_naming

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def stack(tmp_path):
    """A stack on the fake backend, stopped whatever the test did."""
    made = DevStack(tmp_path / "d")
    made.start("--backends", "fake", "--node-id", "t1")
    yield made
    made.stop()
    assert made.pids() == []


def _create(stack: DevStack) -> str:
    done = stack.dsec("sandbox", "create", "anything")
    assert done.returncode == 0, done.stderr.decode() + stack.logs()
    return done.stdout.decode().strip()


@needs("root")
def test_a_second_instance_is_refused_and_names_the_first(stack):
    done = stack.dsec("dev", "--backends", "fake")
    assert done.returncode == 1
    assert str(stack.state()["supervisor"]["pid"]) in done.stderr.decode()
    assert "dsec dev stop" in done.stderr.decode()


@needs("root")
def test_the_key_is_for_root_only_and_in_no_command_line(stack):
    assert os.stat(stack.data / "dev.json").st_mode & 0o077 == 0
    assert processes_naming(stack.api_key) == []


@needs("root")
def test_daemons_that_die_come_back_and_clients_go_on(stack):
    sandbox = _create(stack)
    for which in ("node", "gateway"):
        old = stack.kill(which)
        assert stack.dsec("sandbox", "exec", sandbox, "--", "echo", which).stdout == which.encode() + b"\n"
        assert stack.wait_other_pid(which, old) != old
    assert stack.state()["restarts"] == {"node": 1, "gateway": 1}


@needs("root")
def test_a_killed_supervisor_is_taken_over_with_its_sandboxes(stack):
    sandbox = _create(stack)
    before = stack.state()
    stack.kill("supervisor")
    status = stack.dsec("dev", "status")
    assert status.returncode == 1
    assert b"still run" in status.stderr
    stack.start("--backends", "fake", "--node-id", "t1")
    after = stack.state()
    assert after["endpoint"] == before["endpoint"], "clients of before must still find it"
    assert after["children"]["node"]["pid"] != before["children"]["node"]["pid"]
    assert record_of(before["children"]["node"]["pid"]) is None, "a zombie is ended: who reaps is not ours"
    assert stack.dsec("sandbox", "exec", sandbox, "--", "echo", "alive").stdout == b"alive\n"


@needs("root")
def test_stop_ends_the_daemons_of_a_killed_supervisor(stack):
    sandbox = _create(stack)
    stack.kill("supervisor")
    stack.stop()
    assert stack.pids() == []
    assert processes_naming(sandbox) == []
    assert b"nothing runs" in stack.dsec("dev", "stop").stderr


@needs("root")
def test_keep_leaves_sandboxes_for_the_next_start(stack):
    sandbox = _create(stack)
    assert stack.dsec("sandbox", "exec", sandbox, "--", "true").returncode == 0
    stack.stop("--keep")
    assert not (stack.state()["children"])
    stack.start("--backends", "fake", "--node-id", "t1")
    assert stack.dsec("sandbox", "exec", sandbox, "--", "echo", "kept").stdout == b"kept\n"


@needs("root")
def test_a_daemon_that_can_not_start_is_reported_with_its_words(tmp_path):
    stack = DevStack(tmp_path / "d")
    began = time.monotonic()
    done = stack.dsec("dev", "--backends", "nonsense", timeout=100)
    assert done.returncode == 1
    assert "nonsense" in done.stderr.decode()
    assert time.monotonic() - began < 60
    assert stack.pids() == []


@needs("root")
def test_the_whole_cli_speaks_json(stack):
    made = json.loads(stack.dsec("sandbox", "create", "i", "--json", "--label", "a=b", "-n", "2").stdout)
    ids = sorted(info["id"] for info in made)
    listed = json.loads(stack.dsec("sandbox", "ls", "--json", "--label", "a=b").stdout)
    assert sorted(info["id"] for info in listed) == ids
    result = json.loads(stack.dsec("sandbox", "exec", "--json", ids[0], "--", "sh", "-c", "echo x; exit 3").stdout)
    assert (result["exit_code"], result["stdout"]) == (3, "x\n")
    assert json.loads(stack.dsec("node", "ls", "--json").stdout)[0]["node"] == "t1"
    assert json.loads(stack.dsec("top", "--json").stdout)["sandboxes"]
    killed = json.loads(stack.dsec("sandbox", "kill", "--json", *ids).stdout)
    assert {info["state"] for info in killed} == {"exited"}
    assert json.loads(stack.dsec("sandbox", "ls", "--json").stdout) == []


@needs("root")
def test_exec_gives_streams_input_and_the_programs_exit_code(stack):
    sandbox = _create(stack)
    both = stack.dsec("sandbox", "exec", sandbox, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (both.returncode, both.stdout, both.stderr) == (7, b"out\n", b"err\n")
    data = os.urandom(300_000)
    assert stack.dsec("sandbox", "exec", "-i", sandbox, "cat", stdin=data).stdout == data
    assert stack.dsec("sandbox", "exec", sandbox, "cat").returncode == 0, "no stdin of ours: EOF at once"
    assert stack.dsec("sandbox", "exec", "-i", sandbox, "cat", stdin=None).stdout == b"", "/dev/null ends at once"
    script = stack.dsec("sandbox", "shell", sandbox, stdin=b"echo said\nexit 6\n")
    assert (script.returncode, script.stdout) == (6, b"said\n")
    assert stack.dsec("sandbox", "exec", "-t", sandbox, "cat", stdin=b"a line\n").returncode == 0, "Ctrl-D ends it"
    gone = stack.dsec("sandbox", "exec", sandbox, "no-such-program")
    assert gone.returncode == 127
    assert b"Traceback" not in gone.stderr
    assert stack.dsec("sandbox", "exec", "--timeout-s", "0.5", sandbox, "sleep", "60").returncode == 124
    assert stack.dsec("sandbox", "exec", sandbox, "--", "sh", "-c", "kill -9 $$").returncode == 137
    assert stack.dsec("sandbox", "exec", "sb-t1-aaaaaaaaaaaaaaaa", "true").returncode == 125
    exec_id = json.loads(stack.dsec("sandbox", "logs", "--json", sandbox).stdout)[0]["exec_id"]
    assert stack.dsec("sandbox", "logs", sandbox, exec_id).returncode == 0


@needs("root")
def test_an_admin_sees_all_namespaces_and_sets_their_bounds(stack):
    ours = _create(stack)
    key = json.loads(stack.dsec("key", "create", "--namespace", "team", "--json").stdout)["key"]
    assert stack.dsec("quota", "set", "team", "--sandboxes", "1").returncode == 0
    theirs = stack.dsec("sandbox", "create", "i", "--api-key", key).stdout.decode().strip()
    refused = stack.dsec("sandbox", "create", "i", "--wait-s", "0.1", "--api-key", key)
    assert refused.returncode == 3
    assert b"quota" in refused.stderr
    mine = json.loads(stack.dsec("quota", "show", "--json", "--api-key", key).stdout)
    assert (mine["sandboxes"], mine["quota"]["sandboxes"]) == (1, 1)
    assert stack.dsec("quota", "set", "team", "--unlimited", "--api-key", key).returncode == 4
    assert stack.dsec("sandbox", "ls", "--namespace", "*", "--api-key", key).returncode == 4
    assert theirs not in stack.dsec("sandbox", "ls").stdout.decode()
    seen = json.loads(stack.dsec("sandbox", "ls", "--namespace", "*", "--json").stdout)
    assert {info["id"] for info in seen} == {ours, theirs}
    assert len(json.loads(stack.dsec("top", "--json").stdout)["sandboxes"]) == 2


@needs("root")
def test_env_is_that_of_the_running_one(stack, tmp_path):
    told = stack.dsec("dev", "env").stdout.decode()
    assert told == f"export DSEC_ENDPOINT={stack.endpoint}\nexport DSEC_API_KEY={stack.api_key}\n"
    assert stack.dsec("dev", "env", "--data", str(tmp_path / "none")).returncode == 2


@needs("root")
def test_keys_made_by_the_cli_work_at_once_and_see_their_namespace_only(stack):
    import asyncio

    ours = _create(stack)
    made = json.loads(stack.dsec("key", "create", "--namespace", "team", "--json").stdout)

    async def use() -> list[str]:
        async with AsyncClient(stack.endpoint, made["key"]) as client:
            async with await AsyncSandbox.create("i", client=client) as sandbox:
                seen = [info.id for info in await AsyncSandbox.list(client=client)]
                assert seen == [sandbox.id]
            return seen

    assert ours not in asyncio.run(use())
    assert made["key"] not in stack.dsec("key", "ls").stdout.decode()
    assert stack.dsec("key", "revoke", made["id"]).returncode == 0
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        done = stack.dsec("sandbox", "ls", "--api-key", made["key"])
        if done.returncode == 4:
            break
        time.sleep(0.2)
    assert done.returncode == 4
