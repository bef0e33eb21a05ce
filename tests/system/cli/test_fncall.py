"""`dsec fncall`, the demo's submissions and the clients of SandboxFusion on real lanes, through the real gateway."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess

import pytest
from libdsec.client import AsyncClient
from libdsec.errors import CapacityError, StateError
from libdsec.fncall import AsyncFnCall
from libdsec.wire_fncall import VERDICTS

from nomad_dsec.demo.judging import judge
from nomad_dsec.demo.submissions import SUBMISSIONS
from tests.kit.abilities import needs
from tests.kit.devstack import DevStack, image_store
from tests.kit.leaks import Census
from tests.kit.peerclients import script

# One stack serves the whole file; what it must not leave is checked at its end.
pytestmark = [pytest.mark.timeout(180), pytest.mark.leaks_ok, needs("root", "erofs", "filters")]


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    store = image_store()
    made = DevStack(tmp_path_factory.mktemp("f") / "d")
    node = f"fc-{os.getpid()}"
    before = Census.take()
    made.start("--node-id", node, "--images", str(store))
    yield made
    made.stop()
    assert made.pids() == []
    mine = [line for line in before.wait_same(timeout_s=5.0) if node in line or node.replace("-", "_") in line]
    assert mine == []


def _dsec(stack, *argv, stdin=b""):
    return stack.dsec("fncall", *argv, "--image", "debian-dev", stdin=stdin, timeout=120)


def test_run_passes_streams_and_the_exit_code_through(stack, tmp_path):
    source = tmp_path / "main.py"
    source.write_text("import sys\nprint(sys.argv[1:], open('data').read(), sys.stdin.read())\nsys.exit(5)\n")
    data = tmp_path / "data"
    data.write_text("beside")
    done = _dsec(stack, "run", str(source), "--stdin", "-", "--arg", "x", "--arg=-y", "--file", str(data), stdin=b"hi")
    assert (done.returncode, done.stdout) == (5, b"['x', '-y'] beside hi\n")
    assert b"runtime_error" in done.stderr


def test_run_tells_limits_and_json_is_whole(stack, tmp_path):
    source = tmp_path / "main.py"
    source.write_text("while True: pass")
    done = _dsec(stack, "run", str(source), "--cpu-s", "0.3")
    assert done.returncode == 123
    assert b"cpu_time_limit" in done.stderr
    source.write_text("import sys; sys.stdout.buffer.write(b'\\xff')")
    told = json.loads(_dsec(stack, "run", str(source), "--json").stdout)
    assert (told["verdict"], told["stdout_base64"]) == ("accepted", "/w==")


def test_judge_names_each_test(stack, tmp_path):
    source = tmp_path / "main.c"
    source.write_text('#include <stdio.h>\nint main(void) { int a; scanf("%d", &a); printf("%d", a * 2); }\n')
    for name, given, expected in (("1", "2", "4"), ("2", "5", "11"), ("3", "0", "0")):
        (tmp_path / f"{name}.in").write_text(given)
        (tmp_path / f"{name}.out").write_text(expected)
    done = _dsec(stack, "judge", str(source), "--tests", str(tmp_path))
    assert done.returncode == 1
    lines = done.stdout.decode().splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["1", "accepted"], ["2", "wrong_answer"], ["3", "accepted"]]
    assert lines[-1] == "wrong_answer: 2 of 3"
    (tmp_path / "2.out").write_text("10")
    assert _dsec(stack, "judge", str(source), "--tests", str(tmp_path)).returncode == 0


async def test_each_submission_of_the_demo_gets_the_verdict_it_was_made_for(stack):
    async with AsyncClient(stack.endpoint, stack.api_key) as client:
        found = await judge(client, "debian-dev", 2 * len(SUBMISSIONS), lambda verdict: None)
    assert [(one.submission.title, one.verdict, one.error, one.message) for one in found.astray] == []
    assert set(found.verdicts()) == set(VERDICTS)
    assert found.missing == []


@needs("fusion-clients")
def test_verls_own_client_on_real_lanes(stack):
    body = f"""
client = verl_client()
url = {f"{stack.endpoint}/fusion/{stack.api_key}/run_code"!r}
tests = {{"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7", "0"]}}
score, _ = client.compute_score(url, None, 256, "```python\\nprint(sum(map(int, input().split())))\\n```", tests)
def status(code, language, memory=256):
    _, rows = client.check_correctness(
        url, {{"inputs": [""], "outputs": ["1"]}}, code, timeout=2, memory_limit_mb=memory, language=language)
    return rows[0]["status"]
function = client.check_correctness(
    url, {{"inputs": ["[1, 2, 3]"], "outputs": ["6"], "fn_name": "total"}}, "def total(xs):\\n    return sum(xs)\\n")[0]
print(json.dumps([score, function, [
    status("#include <cstdio>\\nint main() {{ puts(\\"1\\"); }}", "cpp"),
    status("int main() {{ return 0 }}", "cpp"),
    status("print(1)", "python"),
    status("print(2)", "python"),
    status("1 // 0", "python"),
    status("while True: pass", "python"),
    status("x = b'x' * (1 << 30); print(1)", "python", 64),
    status("echo 1", "bash"),
    status("fn main() {{}}", "rust"),
    status("def test(): pass", "pytest"),
]]))
"""
    done = subprocess.run(script(body), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    score, function, ends = json.loads(done.stdout)
    assert score == pytest.approx(2 / 3)
    assert function == [True]
    assert ends == [
        "success",
        "compile_error",
        "success",
        "wrong_answer",
        "runtime_error",
        "timeout",
        "runtime_error",
        "success",
        "sandbox_error",
        "wrong_answer",  # pytest ran, and printed more than "1"
    ]


@needs("fusion-clients")
def test_sandboxfusions_own_client_on_real_lanes(stack):
    body = f"""
import base64
import sandbox_fusion as sf
def run(code, language="python", **more):
    request = sf.RunCodeRequest(code=code, language=language, **more)
    return sf.run_code(request, endpoint={f"{stack.endpoint}/fusion/{stack.api_key}"!r}, max_attempts=1)
wrote = run(
    "data = open('in/a.bin', 'rb').read(); open('out.bin', 'wb').write(data[::-1])",
    files={{"in/a.bin": base64.b64encode(bytes(range(256))).decode()}}, fetch_files=["out.bin", "none"])
print(json.dumps([
    wrote.status, {{name: list(base64.b64decode(text))[:3] for name, text in wrote.files.items()}},
    run("import time; time.sleep(60)", run_timeout=0.5).run_result.status,
    run("kill -11 $$", "bash").run_result.return_code,
    run("printf '\\\\377'", "bash").run_result.stdout,
]))
"""
    done = subprocess.run(script(body), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    status, files, slept, code, text = json.loads(done.stdout)
    assert (status, files) == ("Success", {"out.bin": [255, 254, 253]})
    assert (slept, code, text) == ("TimeLimitExceeded", -11, "\ufffd")


async def test_waiting_for_a_place_is_never_run_time(stack):
    """E9: far more calls than places, each with a wall limit that its wait alone would pass."""
    limits = {"wall_s": 1.0}
    async with AsyncClient(stack.endpoint, stack.api_key) as client:
        requests = [
            AsyncFnCall.request(["sleep", "0.2"], image="debian-dev", limits=limits)
            for _ in range(20 * (os.cpu_count() or 1))
        ]
        results = [found.get() async for found in AsyncFnCall.run_many(requests, in_flight=100, client=client)]
        assert {result.verdict for result in results} == {"accepted"}
        assert max(result.queue_s for result in results) > limits["wall_s"]
        holding = [
            asyncio.create_task(AsyncFnCall.run(["sleep", "2"], image="debian-dev", client=client))
            for _ in range(2 * (os.cpu_count() or 1))
        ]
        await asyncio.sleep(0.3)
        with pytest.raises(CapacityError) as caught:
            await AsyncFnCall.run(["true"], image="debian-dev", queue_timeout_s=0.1, client=client)
        assert caught.value.retry_after_s is not None
        assert {(await task).verdict for task in holding} == {"accepted"}


async def test_a_killed_node_daemon_costs_calls_nothing_but_time(stack):
    async with AsyncClient(stack.endpoint, stack.api_key, reconnect_s=60.0) as client:
        requests = [
            AsyncFnCall.request(
                f"import time; time.sleep(0.05); print({number})", image="debian-dev", language="python"
            )
            for number in range(200)
        ]
        told = {}
        async for found in AsyncFnCall.run_many(requests, in_flight=16, client=client):
            told[found.index] = found
            if len(told) == 40:
                stack.kill("node")
    assert [told[number].get().stdout for number in range(200)] == [f"{number}\n" for number in range(200)]


async def test_a_spinning_program_is_cancelled(stack):
    async with AsyncClient(stack.endpoint, stack.api_key) as client:
        started = asyncio.create_task(
            AsyncFnCall.run(
                "while True: pass",
                image="debian-dev",
                language="python",
                limits={"cpu_s": 60, "wall_s": 60},
                call_id="spinning",
                client=client,
            )
        )
        await asyncio.sleep(0.5)
        await AsyncFnCall.cancel("spinning", client=client)
        async with asyncio.timeout(10):
            with pytest.raises(StateError) as caught:
                await started
        assert caught.value.code == "cancelled"
        assert (await AsyncFnCall.run("print(1)", image="debian-dev", language="python", client=client)).accepted
