"""The SDK's contract through the real gateway and node daemon: on the fake backend, and on real containers."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys

import pytest
from libdsec.client import AsyncClient
from libdsec.errors import DsecError, NotFoundError, NotSupported, StateError, UsageError
from libdsec.sandbox import AsyncSandbox

from tests.kit.abilities import needs
from tests.kit.devstack import REPO, DevStack, image_store
from tests.kit.leaks import Census

# One stack serves the whole file and refills its pools as it likes: what it must not leave is checked at its end.
pytestmark = [pytest.mark.timeout(400), pytest.mark.leaks_ok]
IMAGE = "debian-dev"


_REAL = pytest.param("container", marks=needs("root", "erofs", "cgroup", "filters", "debootstrap", "debian-packages"))


@pytest.fixture(scope="module", params=["fake", _REAL])
def stack(request, tmp_path_factory):
    """One stack for the whole file."""
    made = DevStack(tmp_path_factory.mktemp("s") / "d")
    node = f"st-{request.param}-{os.getpid()}"
    flags = ["--node-id", node, "--backends", request.param]
    if request.param == "container":
        flags += ["--images", str(image_store())]
    before = Census.take()
    made.start(*flags)
    made.backend = request.param
    yield made
    made.stop()
    assert made.pids() == []
    mine = [line for line in before.wait_same(timeout_s=5.0) if node in line or node.replace("-", "_") in line]
    assert mine == []


@pytest.fixture
async def client(stack):
    async with AsyncClient(stack.endpoint, stack.api_key, reconnect_s=30) as made:
        yield made


@pytest.fixture
async def sandbox(client):
    async with await AsyncSandbox.create(IMAGE, client=client, memory_mib=256, cpus=0.5) as made:
        yield made


@needs("root")
class TestExec:
    async def test_four_ends_are_told_apart(self, sandbox):
        ends = [
            await sandbox.exec("exit 255"),
            await sandbox.exec("kill -9 $$"),
            await sandbox.exec("sleep 60", timeout_s=0.3),
        ]
        assert [(end.exit_code, end.signal, end.timed_out) for end in ends] == [
            (255, None, False),
            (None, 9, False),
            (None, 9, True),
        ]

    async def test_a_list_is_exact_argv_and_a_text_is_for_the_shell(self, sandbox):
        odd = ["a b", "", "'\"$HOME", "ü\n", "-n"]
        result = await sandbox.exec(["printf", "%s|", *odd])
        assert result.stdout == "".join(f"{text}|" for text in odd)
        assert (await sandbox.exec("echo $((1+1))", env={"A": "b"})).stdout == "2\n"

    async def test_stdin_is_eof_unless_given(self, sandbox):
        async with asyncio.timeout(10):
            assert (await sandbox.exec("cat; echo done")).stdout == "done\n"
        assert (await sandbox.exec(["cat"], stdin="héllo")).stdout == "héllo"
        data = os.urandom(3_000_000)
        result = await sandbox.exec(["sha256sum"], stdin=data)
        assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest()
        assert (await sandbox.exec("true", stdin=data)).exit_code == 0, "a command need not read it all"

    async def test_output_is_exact_bytes_and_text_is_decoded_whole(self, sandbox):
        result = await sandbox.exec("printf '\\377\\303\\244'; printf '\\303' ; printf '\\244'")
        assert result.stdout_bytes == b"\xff\xc3\xa4\xc3\xa4"
        assert result.stdout == "\ufffdää"

    async def test_long_output_keeps_head_and_tail(self, sandbox):
        result = await sandbox.exec(
            "echo head; head -c 5000000 /dev/zero | tr '\\0' x; echo tail", max_output_bytes=10_000
        )
        assert result.truncated
        assert result.exit_code == 0
        assert result.stdout.startswith("head\n")
        assert result.stdout.endswith("tail\n")
        assert len(result.stdout_bytes) <= 10_000
        assert result.total_bytes == 5_000_010

    async def test_the_same_exec_id_never_runs_twice(self, sandbox):
        for _ in range(3):
            await sandbox.exec("echo x >> /tmp/once", exec_id="once")
        assert await sandbox.files.read_text("/tmp/once") == "x\n"

    async def test_a_background_child_does_not_hold_the_exec(self, sandbox):
        async with asyncio.timeout(10):
            result = await sandbox.exec("sleep 30 & echo started")
        assert result.stdout == "started\n"

    async def test_many_at_once(self, sandbox):
        results = await asyncio.gather(*(sandbox.exec(["echo", str(number)]) for number in range(60)))
        assert [result.stdout for result in results] == [f"{number}\n" for number in range(60)]

    async def test_what_can_not_start_is_a_result_or_names_the_field(self, sandbox):
        try:
            result = await sandbox.exec(["/no/such/program"])
        except UsageError as error:
            assert error.field
        else:
            assert result.exit_code in (126, 127)
        with pytest.raises(UsageError):
            await sandbox.exec(["true"], cwd="relative\0path")


@needs("root")
class TestProcess:
    async def test_a_conversation(self, sandbox):
        async with await sandbox.spawn("while read x; do echo got $x; done", stdin=True) as process:
            await process.write("one\n")
            assert (await process.read()) == ("stdout", b"got one\n")
            await process.write("two\n")
            assert (await process.read()) == ("stdout", b"got two\n")
            await process.close_stdin()
            assert (await process.wait()).exit_code == 0

    async def test_a_terminal_that_resizes(self, sandbox):
        async with await sandbox.spawn("stty size; read x; stty size", pty=(33, 99)) as process:
            seen = b""
            while b"33 99" not in seen:
                seen += (await process.read()).data
            await process.resize(rows=44, cols=111)
            await process.write("\n")
            async for piece in process:
                seen += piece.data
            assert b"44 111" in seen

    async def test_signals_reach_the_whole_tree(self, sandbox):
        async with await sandbox.spawn("trap '' TERM; sleep 60 & sleep 60") as process:
            await process.signal(signal.SIGKILL)
            async with asyncio.timeout(10):
                assert (await process.wait()).signal == 9

    async def test_attach_sees_everything_from_another_client_and_after_the_end(self, sandbox, stack):
        async with await sandbox.spawn("for i in 1 2 3; do echo $i; sleep 0.2; done; exit 4") as process:
            exec_id = process.exec_id
            await process.read()
        async with AsyncClient(stack.endpoint, stack.api_key) as other:
            again = await AsyncSandbox.connect(sandbox.id, client=other)
            for _ in range(2):
                async with await again.attach(exec_id) as process:
                    assert b"".join([piece.data async for piece in process]) == b"1\n2\n3\n"
                    assert (await process.wait()).exit_code == 4
            with pytest.raises(NotFoundError):
                await again.attach("never-was")


@needs("root")
class TestFiles:
    @pytest.mark.parametrize("size", [0, 1, 18_000, 96_000, 200_000, 16_000_000])
    async def test_sizes(self, sandbox, size):
        data = os.urandom(size)
        assert await sandbox.files.write("/tmp/made/deep/x", data, parents=True) == size
        assert await sandbox.files.read("/tmp/made/deep/x") == data
        assert await sandbox.files.read("/tmp/made/deep/x", offset=1, length=5) == data[1:6]

    async def test_streams_from_files_and_generators(self, sandbox, tmp_path):
        async def pieces():
            for number in range(300):
                yield bytes([number % 256]) * 10_000

        assert await sandbox.files.write("/tmp/g", pieces()) == 3_000_000
        got = b"".join([chunk async for chunk in sandbox.files.read_stream("/tmp/g")])
        assert len(got) == 3_000_000
        (tmp_path / "x").write_bytes(got)
        await sandbox.files.write("/tmp/h", tmp_path / "x", mode=0o750)
        stat = await sandbox.files.stat("/tmp/h")
        assert (stat.size, stat.mode, stat.kind) == (3_000_000, 0o750, "file")

    async def test_names_of_any_byte(self, sandbox):
        for name in ("plain", "ü ber", "new\nline", "?&=#%25", b"\xff\xfe"):
            raw = name if isinstance(name, bytes) else name.encode()
            path = b"/tmp/names/" + raw
            await sandbox.files.write(path, raw, parents=True)
            assert await sandbox.files.read(path) == raw
        listed = await sandbox.files.list("/tmp/names")
        assert {os.fsencode(entry.name) for entry in listed} == {
            b"plain",
            "ü ber".encode(),
            b"new\nline",
            b"?&=#%25",
            b"\xff\xfe",
        }
        await sandbox.files.move(b"/tmp/names/\xff\xfe", b"/tmp/names/\xfd")
        await sandbox.files.remove(b"/tmp/names/\xfd")
        assert len(await sandbox.files.list("/tmp/names")) == 4

    async def test_the_verbs(self, sandbox):
        files = sandbox.files
        await files.mkdir("/tmp/v/a/b", parents=True)
        await files.append("/tmp/v/log", "one\n")
        await files.append("/tmp/v/log", "two\n")
        assert await files.read_text("/tmp/v/log") == "one\ntwo\n"
        await files.chmod("/tmp/v/log", 0o600)
        assert (await files.stat("/tmp/v/log")).mode == 0o600
        await files.move("/tmp/v/log", "/tmp/v/a/moved")
        assert not await files.exists("/tmp/v/log")
        assert await files.exists("/tmp/v/a/moved")
        with pytest.raises(DsecError):
            await files.remove("/tmp/v")
        await files.remove("/tmp/v", recursive=True)
        with pytest.raises(NotFoundError):
            await files.remove("/tmp/v", recursive=True)
        await files.remove("/tmp/v", missing_ok=True, recursive=True)
        with pytest.raises(NotFoundError):
            await files.read("/tmp/v/none")

    async def test_trees_there_and_back(self, sandbox, tmp_path):
        source = tmp_path / "s"
        (source / "d/e").mkdir(parents=True)
        (source / "d/e/x").write_bytes(os.urandom(100_000))
        (source / "empty").mkdir()
        (source / "run.sh").write_text("#!/bin/sh\n")
        (source / "run.sh").chmod(0o755)
        (source / "link").symlink_to("d/e/x")
        os.mkfifo(source / "pipe")
        sent = await sandbox.files.upload(source, "/tmp/tree")
        assert [name for name, _ in sent.skipped] == ["pipe"]
        await sandbox.exec(["mkfifo", "/tmp/tree/theirs"])
        back = await sandbox.files.download("/tmp/tree", tmp_path / "back")
        assert [name for name, _ in back.skipped] == ["theirs"]
        (source / "pipe").unlink()
        diff = subprocess.run(["diff", "-r", source, tmp_path / "back"], capture_output=True, check=False)
        assert diff.returncode == 0, diff.stdout
        assert os.readlink(tmp_path / "back/link") == "d/e/x"
        assert (tmp_path / "back/run.sh").stat().st_mode & 0o777 == 0o755

    async def test_watch(self, sandbox):
        await sandbox.files.mkdir("/tmp/w", parents=True)
        seen = []

        async def watch():
            async for event in sandbox.files.watch("/tmp/w"):
                seen.append(event)
                if event.path.endswith("done"):
                    return

        watching = asyncio.ensure_future(watch())
        async with asyncio.timeout(20):
            while not watching.done():  # the watch may start after the first file was made
                await sandbox.exec("rm -f /tmp/w/done; echo x > /tmp/w/done")
                await asyncio.sleep(0.05)
        await watching
        assert seen


@needs("root")
class TestLife:
    async def test_what_create_and_info_tell(self, sandbox, client):
        info = await sandbox.info()
        assert info.state == "running"
        assert info.ready_at
        assert sandbox.id in [found.id for found in await AsyncSandbox.list(state="running", client=client)]
        assert (await sandbox.metrics()).pids >= 1

    async def test_the_disk_told_is_the_disk_there(self, stack, client):
        if stack.backend != "container":
            return  # the fake has no limit on its directory
        asked = 1024
        async with await AsyncSandbox.create(IMAGE, client=client, memory_mib=128, disk_mib=asked) as made:
            size = int((await made.exec("df -Bm --output=size / | tail -n 1 | tr -dc 0-9")).stdout)
            told = (await made.info()).disk_mib
        assert told <= asked
        assert abs(size - told) <= 1

    async def test_kill_is_idempotent_and_what_follows_says_so(self, client):
        sandbox = await AsyncSandbox.create(IMAGE, client=client, cpus=0.5)
        assert (await sandbox.kill()).reason == "killed"
        assert (await sandbox.kill()).state == "exited"
        with pytest.raises((StateError, NotFoundError)):
            await sandbox.exec("true")

    async def test_pause_stops_time_and_resume_goes_on(self, sandbox):
        try:
            assert (await sandbox.pause()).state == "paused"
        except NotSupported as error:
            assert error.details or error.message
            return
        assert (await sandbox.resume()).state == "running"
        assert (await sandbox.exec("echo on")).stdout == "on\n"

    async def test_the_same_key_is_the_same_sandbox(self, client):
        key = f"key-{os.urandom(6).hex()}"
        made = await asyncio.gather(
            *(AsyncSandbox.create(IMAGE, client=client, cpus=0.5, idempotency_key=key) for _ in range(5))
        )
        assert len({sandbox.id for sandbox in made}) == 1
        await made[0].kill()

    async def test_a_ttl_ends_it_with_its_reason(self, client):
        sandbox = await AsyncSandbox.create(IMAGE, client=client, cpus=0.5)
        await sandbox.set_timeout(0.3)
        async with asyncio.timeout(20):
            while (info := await sandbox.info()).state not in ("exited", "lost"):
                await asyncio.sleep(0.05)
        assert info.reason == "timeout"

    async def test_a_lease_holds_while_its_client_lives_and_not_longer(self, stack, client):
        async with AsyncClient(stack.endpoint, stack.api_key) as trainer:
            sandbox = await AsyncSandbox.create(IMAGE, client=trainer, cpus=0.5, lease_s=1.0)
            await asyncio.sleep(2.5)
            assert (await sandbox.info()).state == "running"
        seen = await AsyncSandbox.connect(sandbox.id, client=client)
        async with asyncio.timeout(20):
            while (info := await seen.info()).state not in ("exited", "lost"):
                await asyncio.sleep(0.1)
        assert info.reason == "lease_expired"

    async def test_groups_and_labels(self, client):
        label = os.urandom(4).hex()
        async with await AsyncSandbox.create_many(5, IMAGE, client=client, cpus=0.1, labels={"group": label}) as group:
            assert len(group) == 5
            assert len(await AsyncSandbox.list(labels={"group": label}, client=client)) == 5
            results = await asyncio.gather(*(member.exec(["true"]) for member in group))
            assert all(result.ok for result in results), "exec right after create works the first time"
        live = [
            info for info in await AsyncSandbox.list(labels={"group": label}, client=client) if info.state == "running"
        ]
        assert live == []

    async def test_a_killed_node_daemon_in_the_middle_of_execs_costs_nothing(self, stack, client):
        async with await AsyncSandbox.create(IMAGE, client=client, cpus=0.5) as sandbox:
            running = [asyncio.ensure_future(sandbox.exec(f"sleep 1; echo {n}; exit {n}")) for n in range(8)]
            async with await sandbox.spawn("for i in $(seq 40); do echo $i; sleep 0.05; done") as process:
                reading = asyncio.ensure_future(_all_output(process))
                await asyncio.sleep(0.4)
                old = stack.kill("node")
                results = await asyncio.gather(*running)
                assert [(result.stdout, result.exit_code) for result in results] == [(f"{n}\n", n) for n in range(8)]
                assert (await reading).split() == [str(n).encode() for n in range(1, 41)]
            assert stack.wait_other_pid("node", old) != old

    async def test_five_hundred_wide(self, sandbox):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            results = await asyncio.gather(*(sandbox.files.exists("/tmp") for _ in range(500)))
            assert results == [True] * 500
        await sandbox._client.transport.close()
        assert len(os.listdir("/proc/self/fd")) <= before + 4
        sandbox._client.transport._closed = False


QUICKSTART = """
import libdsec

with libdsec.Sandbox.create("debian-dev", cpus=0.5) as sandbox:
    sandbox.files.write("/tmp/hello.sh", "echo hello $1")
    print(sandbox.exec(["sh", "/tmp/hello.sh", "world"]).check().stdout, end="")
    with sandbox.spawn("cat", stdin=True) as process:
        process.write("piped")
        process.close_stdin()
        print("".join(piece.data.decode() for piece in process))
        print(process.wait().exit_code)
"""


@needs("root")
def test_the_synchronous_quickstart_runs_as_a_script_and_ends_without_a_word(stack):
    env = {"DSEC_ENDPOINT": stack.endpoint, "DSEC_API_KEY": stack.api_key, "PYTHONPATH": str(REPO / "sdk")}
    argv = [sys.executable, "-W", "error", "-c", QUICKSTART]
    done = subprocess.run(argv, env=env, capture_output=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (b"hello world\npiped\n0\n", b"")


async def _all_output(process) -> bytes:
    return b"".join([piece.data async for piece in process])
