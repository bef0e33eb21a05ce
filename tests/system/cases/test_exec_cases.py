"""Cases of execs that need the whole path, or its size: E2-E8, and what a broken sandbox tells (L9, L12)."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from libdsec.errors import DsecError, StateError
from libdsec.sandbox import AsyncSandbox

from tests.kit.abilities import needs
from tests.kit.footprint import init_of, watched
from tests.kit.sizes import sized
from tests.system.cases.conftest import IMAGE, init_pid, ours

# One stack serves the whole file and fills its pools as it likes: what it must not leave is checked at its end.
pytestmark = [
    needs("root", "erofs", "cgroup", "filters", "debootstrap", "debian-packages"),
    pytest.mark.timeout(600),
    pytest.mark.leaks_ok,
]
HOG = "import time\nx = []\nwhile True: x.append(b'x' * 1000000)"


async def test_e2_a_gateway_killed_in_the_middle_costs_no_result(stack, sandbox):
    """Cut at the client's own connection; the node daemon's is in the SDK's suite."""
    running = [asyncio.ensure_future(sandbox.exec(f"echo {n}; sleep 1; exit {n}")) for n in range(4)]
    await asyncio.sleep(0.4)
    old = stack.kill("gateway")
    results = await asyncio.gather(*running)
    assert [(done.stdout, done.exit_code) for done in results] == [(f"{n}\n", n) for n in range(4)]
    assert await asyncio.to_thread(stack.wait_other_pid, "gateway", old) != old


async def test_e3_after_the_timeout_nothing_of_it_is_alive(sandbox):
    tree = "trap '' TERM INT HUP; (setsid sleep 7773 &); (setsid sh -c 'sleep 7773 & sleep 7773' &); sleep 7773; :"
    done = await sandbox.exec(tree, timeout_s=0.5)
    assert (done.timed_out, done.exit_code) == (True, None)
    assert (await sandbox.exec(["pgrep", "-f", "^sleep 7773"])).stdout == ""


async def test_e4_orphans_leave_no_zombie(sandbox):
    count, lanes = sized(1000, 100), asyncio.Semaphore(50)

    async def one() -> None:
        async with lanes:
            assert (await sandbox.exec(["sh", "-c", "sleep 0.1 &"])).exit_code == 0

    await asyncio.gather(*(one() for _ in range(count)))
    await asyncio.sleep(1)
    states = (await sandbox.exec("cat /proc/[0-9]*/stat")).stdout.splitlines()
    kinds = [line.rpartition(")")[2].split()[0] for line in states]
    assert "Z" not in kinds
    assert len(kinds) <= 3  # init, the shell, cat


async def test_e5_a_wedged_exec_delays_no_other(sandbox):
    await sandbox.exec("mkfifo /tmp/fifo")
    wedged = [asyncio.ensure_future(sandbox.exec(["cat", "/tmp/fifo"])) for _ in range(8)]
    for _ in range(50):
        async with asyncio.timeout(5):
            assert (await sandbox.exec(["echo", "ok"])).stdout == "ok\n"
    assert not any(each.done() for each in wedged)
    await sandbox.exec("pkill -x cat")
    assert {done.signal for done in await asyncio.gather(*wedged)} == {signal.SIGTERM}


async def test_e6_unread_output_ends_and_stays_bounded_in_every_process(stack, sandbox):
    size = sized(100_000_000, 20_000_000)
    async with init_pid(sandbox) as init, watched(ours(stack) | {"init": init}) as seen:
        process = await sandbox.spawn(f"head -c {size} /dev/zero; echo end >&2; touch /tmp/ended")
        async with asyncio.timeout(120):
            while not await sandbox.files.exists("/tmp/ended"):
                await asyncio.sleep(0.1)
    assert max(seen.growth.values()) < 16, str(seen)
    done = await process.wait()
    assert (done.exit_code, done.truncated, done.total_bytes) == (0, True, size + 4)
    assert done.stderr == "end\n"


async def test_e7_five_ends_are_told_apart(sandbox):
    ends = [
        await sandbox.exec("exit 255"),
        await sandbox.exec("kill -9 $$"),
        await sandbox.exec("sleep 60", timeout_s=0.3),
        await sandbox.exec(["python3", "-c", HOG]),
        await sandbox.exec("exit 137"),
    ]
    assert [(end.exit_code, end.signal, end.timed_out, end.oom_killed) for end in ends] == [
        (255, None, False, False),
        (None, 9, False, False),
        (None, 9, True, False),
        (None, 9, False, True),
        (137, None, False, False),
    ]


@pytest.mark.parametrize("flood", ["fork bomb", "memory hog", "spin"])
async def test_l9_an_overloaded_guest_still_answers(sandbox, flood):
    commands = {
        "fork bomb": ["bash", "-c", "trap '' TERM; f() { f | f & f; }; f"],
        "memory hog": ["sh", "-c", 'while :; do python3 -c "$0"; done', HOG],
        "spin": ["sh", "-c", "for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; wait"],
    }
    async with await sandbox.spawn(commands[flood], exec_id="flood"):
        await asyncio.sleep(1)
        for _ in range(10):
            # An answer at once: the file's size, or that its pids limit leaves no process for it. Never silence.
            async with asyncio.timeout(sized(1, 5)):
                try:
                    assert (await sandbox.files.stat("/etc/passwd")).kind == "file"
                except StateError as busy:
                    assert busy.code == "no_processes"
            async with asyncio.timeout(sized(1, 5)):
                assert (await sandbox.metrics()).pids >= 1
    async with asyncio.timeout(30):
        assert (await sandbox.kill()).reason == "killed"


async def test_l12_a_full_disk_is_a_fault_of_the_write_and_a_result_of_the_program(client):
    async with await AsyncSandbox.create(IMAGE, client=client, cpus=0.5, disk_mib=16) as sandbox:
        with pytest.raises(DsecError) as caught:
            await sandbox.files.write("/tmp/large", bytes(64 << 20))
        assert caught.value.code == "no_space"
        assert not await sandbox.files.exists("/tmp/large")
        done = await sandbox.exec("dd if=/dev/zero of=/tmp/fill bs=64k")
        assert (done.exit_code, "No space left" in done.stderr) == (1, True)
        assert (await sandbox.exec(["echo", "on"])).stdout == "on\n"


async def test_l12_a_deleted_bin_is_an_error_that_names_the_command(client):
    async with await AsyncSandbox.create(IMAGE, client=client, cpus=0.5) as sandbox:
        await sandbox.exec("rm -rf /usr/bin /bin")
        for command, code in (
            ("echo never", "shell_missing"),
            (["/bin/echo", "never"], "command_not_found"),
            (["echo", "never"], "command_not_found"),
        ):
            with pytest.raises(DsecError) as caught:
                await sandbox.exec(command)
            assert caught.value.code == code


async def test_l12_a_killed_init_is_a_fault_with_its_reason(client):
    async with await AsyncSandbox.create(IMAGE, client=client, cpus=0.5) as sandbox:
        running = asyncio.ensure_future(sandbox.exec("sleep 7775; :"))
        async with asyncio.timeout(20):
            while (await sandbox.exec(["pgrep", "-f", "^sleep 7775"])).exit_code:
                await asyncio.sleep(0.05)
        assert (await sandbox.exec("kill -9 1; echo $?")).stdout == "0\n", "PID 1 is safe from its own"
        os.kill(init_of("sleep 7775"), signal.SIGKILL)
        for doomed in (running, sandbox.exec("echo never")):
            with pytest.raises(StateError) as caught:
                await doomed
            assert (caught.value.code, caught.value.details["reason"]) == ("sandbox_ended", "init_exited")
        assert (await sandbox.info()).reason == "init_exited"
