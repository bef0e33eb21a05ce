"""SandboxFusion's door on a fake node: requests as its clients make them, and those clients themselves."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from libdsec.errors import CapacityError

from tests.kit.abilities import needs
from tests.kit.fakenode import DIGEST, IMAGE
from tests.kit.fnnode import FnNode
from tests.kit.gateways import ADMIN, calling, running_gateway, tenant_key
from tests.kit.peerclients import script

# What verl's reward client sends, key for key.
VERL = {
    "compile_timeout": 10,
    "run_timeout": 10,
    "code": "print hello",
    "stdin": "",
    "memory_limit_MB": 1024,
    "language": "python",
    "files": {},
    "fetch_files": [],
}


@pytest.fixture
async def node():
    async with FnNode("n1") as node:
        yield node


@pytest.fixture
async def gateway(tmp_path, node):
    async with running_gateway(tmp_path / "gw", node, fusion_namespace="rewards") as gateway:
        yield gateway


@pytest.fixture
async def nobody(gateway):
    async with calling(gateway, "") as caller:
        caller.session.headers.popall("Authorization")
        yield caller


async def test_verls_request_needs_only_the_url(nobody, node):
    reply = await nobody.ok("POST", "/run_code", VERL)
    assert (reply["status"], reply["message"], reply["compile_result"], reply["files"]) == ("Success", "", None, {})
    ran = reply["run_result"]
    assert ran == {
        "status": "Finished",
        "execution_time": 0.25,
        "return_code": 0,
        "stdout": "hello",
        "stderr": "",
    }
    ((namespace, digest, asked),) = node.seen
    assert (namespace, digest) == ("rewards", DIGEST)
    assert (asked.limits.wall_s, asked.limits.memory_mib, asked.stdin) == (10, 1024, b"")


async def test_its_other_fields(nobody, node):
    files = {"in/data.bin": base64.b64encode(b"\0\1").decode(), "gone": None}
    body = VERL | {
        "code": "write out.txt",
        "files": files,
        "fetch_files": ["out.txt", "none"],
        "stdin": None,
        "args": [],
    }
    reply = await nobody.ok("POST", "/run_code", body)
    assert base64.b64decode(reply["files"]["out.txt"]) == b"content of out.txt"
    assert set(reply["files"]) == {"out.txt"}
    assert node.seen[0][2].files == {"in/data.bin": b"\0\1"}


@pytest.mark.parametrize(
    ("code", "status", "ran"),
    [
        ("exit 3", "Failed", ("Finished", 3)),
        ("signal 11", "Failed", ("Finished", -11)),
        ("spin", "Failed", ("TimeLimitExceeded", None)),
        ("sleep", "Failed", ("TimeLimitExceeded", None)),
        ("eat", "Failed", ("Finished", -9)),
        ("flood", "Failed", ("Finished", -9)),
        ("broken", "SandboxError", None),
    ],
)
async def test_ends_have_its_words(nobody, code, status, ran):
    reply = await nobody.ok("POST", "/run_code", VERL | {"code": code})
    assert reply["status"] == status
    told = reply["run_result"]
    assert (None if told is None else (told["status"], told["return_code"])) == ran
    assert bool(reply["message"]) == (status == "SandboxError")


async def test_compiles_have_its_words(nobody):
    for code, told in (("nocompile", ("Finished", 1)), ("slowcompile", ("TimeLimitExceeded", None))):
        reply = await nobody.ok("POST", "/run_code", VERL | {"code": code, "language": "cpp"})
        assert (reply["status"], reply["run_result"]) == ("Failed", None)
        assert (reply["compile_result"]["status"], reply["compile_result"]["return_code"]) == told
    reply = await nobody.ok("POST", "/run_code", VERL | {"language": "cpp"})
    assert (reply["status"], reply["compile_result"]["return_code"]) == ("Success", 0)


async def test_what_the_platform_lacks_is_no_result_to_grade(nobody):
    for language in ("csharp", "rust"):  # one that we do not serve, one that the image has not got
        reply = await nobody.ok("POST", "/run_code", VERL | {"language": language})
        assert (reply["status"], reply["run_result"]) == ("SandboxError", None)
        assert reply["message"]


async def test_a_bad_request_is_422_and_names_the_field(nobody):
    for body, field in (
        ({"language": "python"}, "code"),
        (VERL | {"language": "cobol"}, "language"),
        (VERL | {"run_timeout": "soon"}, "run_timeout"),
        (VERL | {"files": {"../x": ""}}, "files"),
    ):
        status, reply = await nobody("POST", "/run_code", body)
        assert (status, reply["error"]["field"], reply["status"]) == (422, field, "SandboxError")
        assert field in reply["detail"]


async def test_a_busy_platform_says_504_so_that_verl_asks_again(nobody, node):
    node.refuse_calls = CapacityError("queue_full", "full", retry_after_s=2.0)
    async with nobody.session.post("/run_code", json=VERL) as reply:
        assert (reply.status, reply.headers["Retry-After"]) == (504, "2")
        assert (await reply.json())["status"] == "SandboxError"
    await node.stop()
    async with nobody.session.post("/run_code", json=VERL) as reply:
        assert reply.status == 504


async def test_keys_in_header_path_and_query_say_whose_call_it_is(gateway, node):
    async with calling(gateway) as admin:
        key = await tenant_key(admin, "team-a")
        await admin.ok("POST", "/run_code", VERL)
    async with calling(gateway, "") as caller:
        caller.session.headers.popall("Authorization")
        await caller.ok("POST", f"/fusion/{key}/run_code", VERL)
        await caller.ok("POST", f"/run_code?key={key}&image={IMAGE}", VERL)
        status, reply = await caller("POST", "/fusion/dsk_wrong/run_code", VERL)
        assert (status, reply["error"]["code"]) == (401, "bad_key")
    assert [namespace for namespace, _, _ in node.seen] == ["admin", "team-a", "team-a"]


async def test_without_a_namespace_of_its_own_the_door_wants_a_key(tmp_path, node):
    async with running_gateway(tmp_path / "locked", node) as gateway, calling(gateway, "") as caller:
        caller.session.headers.popall("Authorization")
        status, reply = await caller("POST", "/run_code", VERL)
        assert (status, reply["error"]["code"]) == (401, "no_credentials")
        assert await caller.ok("GET", "/v1/ping") == "pong"
    assert not node.seen


async def test_health(nobody, node, gateway):
    assert await nobody.ok("GET", "/v1/ping") == "pong"
    assert (await nobody("GET", "/health"))[0] == 200
    assert await nobody.ok("GET", f"/fusion/{ADMIN}/v1/ping") == "pong"
    await node.stop()
    async with asyncio.timeout(10):
        while (await nobody("GET", "/health"))[0] != 503:
            await asyncio.sleep(0.02)
    assert await nobody.ok("GET", "/v1/ping") == "pong"


async def test_no_image_is_guessed_among_several(nobody, node, gateway):
    from libdsec import wire

    node.images.append(wire.ImageInfo(digest="sha256:" + "e" * 64, names=["other:1"], created_at=2.0))
    await nobody("GET", "/health")
    async with calling(gateway) as admin:
        await admin.ok("GET", "/v1/images")
        await asyncio.sleep(1.1)
        await admin.ok("GET", "/v1/images")
    status, reply = await nobody("POST", "/run_code", VERL)
    assert (status, reply["error"]["code"]) == (422, "no_image")
    assert (await nobody.ok("POST", "/run_code?image=other:1", VERL))["status"] == "Success"


async def _peer(body: str) -> Any:
    """Run a script with the peers' clients at hand; its stdout is JSON."""
    child = await asyncio.create_subprocess_exec(
        *script(body), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(50):
        out, err = await child.communicate()
    assert child.returncode == 0, err.decode()
    return json.loads(out)


@needs("fusion-clients")
async def test_verls_own_client_scores_a_completion(gateway):
    told = await _peer(f"""
import threading
client = verl_client()
url = {gateway.address + "/run_code"!r}
tests = {{"inputs": ["1", "2", "3"], "outputs": ["1", "2", "9"]}}
score, metadata = client.compute_score(url, threading.Semaphore(2), 512, "```python\\ncat```", tests)
ends = {{}}
for code in ("print x", "exit 3", "spin", "nocompile", "broken", "eat"):
    results, details = client.check_correctness(url, {{"inputs": [""], "outputs": ["x"]}}, code, language="cpp")
    ends[code] = [results[0], details[0]["status"]]
# as its SandboxFusionTool, which ReTool uses, calls it: no stdin, and both streams are text
_, tool = sys.modules["verl_sandbox_fusion.utils"]._process_single_case(
    0, None, None, url, "print from a tool", 30, 1024, "python")
words = [row["status"] for row in metadata]
print(json.dumps([score, words, ends, tool["run_status"], tool["stdout"] + tool["stderr"]]))
""")
    assert told[0] == pytest.approx(2 / 3)
    assert told[1] == ["success", "success", "wrong_answer"]
    assert told[2] == {
        "print x": [True, "success"],
        "exit 3": [-2, "runtime_error"],
        "spin": [-3, "timeout"],
        "nocompile": [-4, "compile_error"],
        "broken": [-1, "sandbox_error"],
        "eat": [-2, "runtime_error"],
    }
    assert told[3:] == ["Finished", "from a tool"]


@needs("fusion-clients")
async def test_verls_own_client_outlasts_a_busy_platform(gateway, node):
    node.refuse_calls = CapacityError("queue_full", "full", retry_after_s=1.0)

    async def make_room():
        await asyncio.sleep(0.5)
        node.refuse_calls = None

    task = asyncio.create_task(make_room())
    told = await _peer(f"""
url = {gateway.address + "/run_code"!r}
results, _ = verl_client().check_correctness(url, {{"inputs": [""], "outputs": ["x"]}}, "print x")
print(json.dumps(results))
""")
    await task
    assert told == [True]


@needs("fusion-clients")
async def test_sandboxfusions_own_client(gateway):
    told = await _peer(f"""
import sandbox_fusion as sf
def run(code, **more):
    request = sf.RunCodeRequest(code=code, language="python", **more)
    return sf.run_code(request, endpoint={f"{gateway.address}/fusion/{ADMIN}"!r}, max_attempts=1, client_timeout=20)
words = sf.SummaryMapping(CompileFailed="compile", RunTimeout="timeout", RunFailed="failed")
ends = [sf.summary_run_code_result(run(code), words) for code in ("print x", "exit 3", "spin", "nocompile")]
wrote = run("write out.txt", fetch_files=["out.txt"])
try:
    run("broken")
except Exception as error:
    fault = str(error)
print(json.dumps([ends, wrote.files, fault]))
""")
    assert told[0] == ["Success", "failed", "timeout", "compile"]
    assert base64.b64decode(told[1]["out.txt"]) == b"content of out.txt"
    assert "the lane broke" in told[2]


async def test_a_key_in_the_path_is_not_logged(gateway, nobody, monkeypatch, caplog):
    async def broken(*args):
        raise LookupError("unforeseen")

    monkeypatch.setattr(gateway.calls, "run", broken)
    status, reply = await nobody("POST", f"/fusion/{ADMIN}/run_code", VERL)
    assert (status, reply["error"]["code"]) == (500, "internal_error")
    logged = " ".join(str(vars(record)) for record in caplog.records)
    assert "dsk_..." in logged
    assert ADMIN not in logged
