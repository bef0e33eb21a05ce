"""What every dsec-init promises about execs (contract.md, Exec; cases E1-E8), on a release and a sanitized build."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from libdsec.errors import DsecError, NotFoundError, PlatformError, StateError

from nomad_dsec.guest.channel import new_exec_id
from nomad_dsec.guest.spec import STDERR, STDOUT, ExecSpec, Rlimit
from tests.kit.abilities import needs
from tests.kit.guest import Guest, running_guest

pytestmark = [needs("root", "cgroup", "cc"), pytest.mark.timeout(120)]


def sh(script: str, **more) -> ExecSpec:
    return ExecSpec(argv=(b"/bin/sh", b"-c", script.encode()), env=((b"PATH", b"/usr/bin:/bin"),), **more)


@pytest.fixture(params=["release", "sanitized"])
async def guest(request):
    async with running_guest(request.param) as running:
        yield running


async def alive(guest: Guest, marker: str) -> int:
    """How many processes of the sandbox carry this text in their command line."""
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline 2>/dev/null; echo; done"
    seen = await guest.channel.run(sh(script))
    return sum(
        1 for line in seen.stdout.decode("utf-8", "replace").splitlines() if marker in line and "cmdline" not in line
    )


async def test_exact_bytes_of_both_streams(guest):
    done = await guest.channel.run(sh("printf 'a\\000\\377'; printf 'e\\n' >&2; exit 7"))
    assert (done.exit_code, done.signal, done.stdout, done.stderr) == (7, None, b"a\0\xff", b"e\n")
    assert (done.total_bytes, done.truncated, done.timed_out) == (5, False, False)


async def test_exec_works_at_once_and_many_times(guest):
    done = await asyncio.gather(*(guest.channel.run(sh(f"echo {n}")) for n in range(100)))
    assert [d.stdout for d in done] == [b"%d\n" % n for n in range(100)]


@pytest.mark.parametrize("argv", [(b"cat",), (b"grep", b"x"), (b"sh", b"-c", b"read x"), (b"python3", b"-")])
async def test_e1_no_stdin_is_end_of_file(guest, argv):
    done = await guest.channel.run(ExecSpec(argv=argv, env=((b"PATH", b"/usr/bin:/bin"),)), timeout_s=20)
    assert done.exit_code is not None
    live = await guest.channel.exec(ExecSpec(argv=argv, env=((b"PATH", b"/usr/bin:/bin"),)))
    assert (await live.wait(timeout_s=20)).exit_code == done.exit_code


async def test_stdin_of_any_size_comes_back(guest):
    for size in (1, 65_536, 256 * 1024, 3_000_001):
        data = bytes(range(251)) * (size // 251 + 1)
        done = await guest.channel.run(sh("cat", max_output_bytes=8 << 20), data[:size], timeout_s=30)
        assert done.stdout == data[:size]


async def test_stdin_that_nobody_reads_does_not_hang_the_writer(guest):
    done = await guest.channel.run(sh("exec 0<&-; sleep 0.2; echo done"), b"x" * 1_000_000, timeout_s=20)
    assert done.stdout == b"done\n"


async def test_e2_a_cut_connection_is_no_result_and_loses_none(guest):
    other = await guest.connect()
    exec_id = new_exec_id()
    running = asyncio.create_task(other.run(sh("echo first; sleep 0.3; echo last; exit 3", exec_id=exec_id)))
    while not await guest.channel.list_execs(exec_id):
        await asyncio.sleep(0.01)
    await other.close()
    with pytest.raises(PlatformError) as error:
        await running
    assert error.value.code == "connection_lost"
    done = await guest.channel.run(sh("echo not again", exec_id=exec_id), timeout_s=10)
    assert (done.exit_code, done.stdout) == (3, b"first\nlast\n")


async def test_stdin_of_a_repeated_exec_goes_on_where_it_was_cut(guest):
    other = await guest.connect()
    exec_id = new_exec_id()
    first = await other.exec(sh("cat", exec_id=exec_id, stdin=True))
    await first.write(b"abc")
    while not (await guest.channel.list_execs(exec_id))[0].total_bytes:
        await asyncio.sleep(0.01)
    await other.close()
    done = await guest.channel.run(sh("cat", exec_id=exec_id, stdin=True), b"abcdef", timeout_s=10)
    assert done.stdout == b"abcdef"


async def test_e3_timeout_kills_the_whole_tree(guest):
    script = (
        "trap '' TERM INT HUP; (setsid sleep 7771 &); (sleep 7771 & sleep 7771 &); echo out; sleep 7771; sleep 7771"
    )
    done = await guest.channel.run(sh(script, timeout_s=0.4), timeout_s=20)
    assert (done.timed_out, done.exit_code, done.stdout) == (True, None, b"out\n")
    assert await alive(guest, "7771") == 0
    after = await guest.channel.run(sh("echo fine"))
    assert after.stdout == b"fine\n"


async def test_background_process_neither_holds_the_exec_nor_dies(guest):
    spec = sh("(while :; do echo noise; sleep 0.02; done; : 7772) & echo started")
    done = await guest.channel.run(spec, timeout_s=10)
    assert done.stdout.startswith(b"started") or b"started" in done.stdout
    await asyncio.sleep(0.3)
    (state,) = await guest.channel.list_execs(done.exec_id)
    assert state.background
    with pytest.raises(StateError):
        await guest.channel.forget(done.exec_id)
    await guest.channel.signal(done.exec_id, signal.SIGKILL)
    async with asyncio.timeout(10):
        while (await guest.channel.list_execs(done.exec_id))[0].background:
            await asyncio.sleep(0.02)
    await guest.channel.forget(done.exec_id)


async def test_e4_no_zombies(guest):
    await asyncio.gather(*(guest.channel.run(sh("sleep 0.1 & sleep 0.1 & sleep 0.1 & :")) for _ in range(100)))
    async with asyncio.timeout(10):
        while True:
            seen = await guest.channel.run(sh("cat /proc/[0-9]*/stat 2>/dev/null"))
            lines = [line.rsplit(")", 1)[1].split() for line in seen.stdout.decode().splitlines() if ")" in line]
            if not any(fields[0] == "Z" or "sleep" in fields for fields in lines) and len(lines) <= 3:
                break
            await asyncio.sleep(0.05)


async def test_e5_a_wedged_exec_delays_no_other(guest, tmp_path):
    done = await guest.channel.run(sh(f"mkfifo {tmp_path}/fifo"))
    assert done.exit_code == 0
    wedged = await guest.channel.exec(sh(f"cat {tmp_path}/fifo"))
    stuck_start = await guest.channel.exec(sh(f"exec < {tmp_path}/fifo; echo never"))
    for _ in range(20):
        assert (await guest.channel.run(sh("echo ok"), timeout_s=5)).stdout == b"ok\n"
    for each in (wedged, stuck_start):
        await each.signal(signal.SIGTERM)
        assert (await each.wait(timeout_s=10)).signal == signal.SIGTERM


async def test_e6_unread_output_blocks_nobody_and_stays_bounded(guest):
    live = await guest.channel.exec(sh("head -c 100000000 /dev/zero; echo end >&2"))
    async with asyncio.timeout(60):
        while (await guest.channel.list_execs(live.exec_id))[0].running:
            await asyncio.sleep(0.02)
    if not guest.sanitized:  # a sanitizer keeps freed memory for a while
        assert guest.rss_kib() < 8 * 1024
    done = await live.wait(timeout_s=20)
    assert (done.exit_code, done.total_bytes, done.truncated, done.stderr) == (0, 100_000_004, True, b"end\n")
    assert len(done.stdout) < 2 * 1024 * 1024


async def test_e7_four_ends_are_told_apart(guest):
    ends = [
        await guest.channel.run(sh("exit 255")),
        await guest.channel.run(sh("kill -9 $$")),
        await guest.channel.run(sh("sleep 100", timeout_s=0.1)),
        await guest.channel.run(ExecSpec(argv=(b"/no/such",))),
    ]
    facts = [(e.exit_code, e.signal, e.timed_out, e.start_error.code if e.start_error else None) for e in ends]
    assert facts == [
        (255, None, False, None),
        (None, 9, False, None),
        (None, 9, True, None),
        (None, None, False, "command_not_found"),
    ]
    live = await guest.channel.exec(sh("sleep 100"))
    await live.signal(signal.SIGKILL)
    killed = await live.wait(timeout_s=10)
    assert (killed.signal, killed.host_signal, killed.timed_out) == (9, 9, False)


@pytest.mark.parametrize("kind", ["release", "sanitized"])
async def test_an_oom_kill_is_laid_at_one_door_and_stays_there(kind, tmp_path):
    """The file plays the kernel's count of the sandbox: it says how many were killed, never who."""
    count = tmp_path / "memory.oom_control"
    count.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    async with running_guest(kind, oom_file=count) as running:
        first, second, plain, shell, mild = [
            await running.channel.exec(sh(f"read go; {end}", stdin=True))
            for end in ("kill -9 $$", "kill -9 $$", "kill -9 $$", "exit 137", "exit 1")
        ]

        async def ends(live, kills: int) -> bool:
            count.write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
            await live.write(b"go\n")
            return (await live.wait(timeout_s=20)).oom_killed

        assert not await ends(mild, 4)  # a kill among its children, which it outlived
        assert await ends(first, 4)
        assert not await ends(plain, 4)  # that one is told already
        assert await ends(second, 6)
        assert await ends(shell, 6)
        late = await running.channel.run(sh("kill -9 $$"))
        assert (late.signal, late.oom_killed) == (9, False)
        assert (await (await running.channel.attach(first.exec_id)).wait()).oom_killed
        assert {e.exec_id for e in await running.channel.list_execs() if e.oom_killed} == {
            first.exec_id,
            second.exec_id,
            shell.exec_id,
        }


async def test_e8_head_and_tail_are_kept(guest):
    done = await guest.channel.run(sh("seq 1 200000", max_output_bytes=10_000), timeout_s=20)
    whole = b"".join(b"%d\n" % n for n in range(1, 200_001))
    assert done.truncated
    assert done.total_bytes == len(whole)
    assert done.stdout == whole[:5000] + whole[-5000:]
    assert not (await guest.channel.run(sh("seq 1 1000", max_output_bytes=3893))).truncated
    nothing = await guest.channel.run(sh("echo x; exit 4", max_output_bytes=0))
    assert (nothing.exit_code, nothing.stdout, nothing.truncated) == (4, b"", True)


async def test_attach_from_an_offset_after_the_end(guest):
    done = await guest.channel.run(sh("printf 0123456789; exit 5"))
    other = await guest.connect()
    attached = await other.attach(done.exec_id, since=4)
    chunks = [chunk async for chunk in attached]
    assert b"".join(c.data for c in chunks) == b"456789"
    assert chunks[0].offset == 4
    assert (await attached.wait()).exit_code == 5
    with pytest.raises(NotFoundError):
        await other.attach("nobody")
    with pytest.raises(DsecError) as error:
        await other.attach(done.exec_id, since=11)
    assert error.value.field == "since"
    await other.close()


async def test_live_chunks_name_their_stream_and_offset(guest):
    live = await guest.channel.exec(sh("echo a; sleep 0.1; echo bb >&2; sleep 0.1; echo c"))
    chunks = [(c.stream, c.offset, c.data) async for c in live]
    assert chunks == [(STDOUT, 0, b"a\n"), (STDERR, 2, b"bb\n"), (STDOUT, 5, b"c\n")]
    assert not (await live.wait()).truncated


async def test_terminal(guest):
    live = await guest.channel.exec(sh("stty size; read a; stty size; echo got:$a", pty=(24, 80), stdin=True))
    seen = b""
    async for chunk in live:
        seen += chunk.data
        if seen == b"24 80\r\n":
            await live.resize(50, 132)
            await live.write(b"hello\n")
    assert b"50 132\r\n" in seen
    assert b"got:hello\r\n" in seen
    assert (await live.wait()).exit_code == 0
    ended = await guest.channel.exec(sh("cat; echo eof", pty=(24, 80), stdin=True))
    await ended.close_stdin()
    assert b"eof" in (await ended.wait(timeout_s=10)).stdout


async def test_signal_reaches_the_tree_or_the_leader(guest):
    live = await guest.channel.exec(sh("trap 'echo got; exit 9' USR1; sleep 7773 & wait"))
    await asyncio.sleep(0.1)
    await live.signal(signal.SIGUSR1, tree=False)
    assert (await live.wait(timeout_s=10)).exit_code == 9
    assert await alive(guest, "7773") == 1
    await live.signal(signal.SIGTERM)
    async with asyncio.timeout(10):
        while await alive(guest, "7773"):
            await asyncio.sleep(0.02)


async def test_environment_descriptors_and_directory_are_exact(guest):
    spec = ExecSpec(argv=(b"/usr/bin/env",), env=((b"B", b"\xff="), (b"A", b"")))
    assert (await guest.channel.run(spec)).stdout == b"B=\xff=\nA=\n"
    done = await guest.channel.run(
        sh("ls /proc/self/fd; pwd; umask; ulimit -n", cwd=b"/usr/bin", rlimits=(Rlimit(resource=7, soft=99, hard=99),))
    )
    assert done.stdout == b"0\n1\n2\n3\n/usr/bin\n0022\n99\n"  # 3 is the directory that ls reads
    for number in (3, 4, 5, 6, 7, 8, 9):
        refused = await guest.channel.run(sh("pwd", cwd=b"/proc/self/fd/%d" % number))
        assert refused.start_error is not None
    assert (await guest.channel.run(sh("pwd", cwd=b"/proc/self/root"))).start_error.code == "cwd_denied"


async def test_users(guest):
    for user, expected in (
        ("nobody", b"uid=65534(nobody) gid=65534(nogroup) groups=65534(nogroup)\n"),
        ("1234", b"uid=1234 gid=1234 groups=1234\n"),
        ("1234:5", b"uid=1234 gid=5(tty) groups=5(tty)\n"),
        ("nobody:tty", b"uid=65534(nobody) gid=5(tty) groups=5(tty)\n"),
        ("", b"uid=0(root) gid=0(root) groups=0(root)\n"),
    ):
        assert (await guest.channel.run(ExecSpec(argv=(b"id",), user=user))).stdout == expected
    unknown = await guest.channel.run(ExecSpec(argv=(b"id",), user="who"))
    assert unknown.start_error.code == "user_unknown"
    caps = await guest.channel.run(sh("grep CapEff /proc/self/status", user="nobody"))
    assert caps.stdout.split()[1] == b"0" * 16


async def test_start_errors_name_their_cause(guest, tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("not a program")
    for spec, code in (
        (ExecSpec(argv=(b"nope",)), "command_not_found"),
        (ExecSpec(argv=(str(plain).encode(),)), "command_denied"),
        (sh("true", cwd=b"/nope"), "cwd_missing"),
        (sh("true", cwd=b"/etc/passwd"), "cwd_missing"),
    ):
        done = await guest.channel.run(spec)
        assert done.start_error is not None
        assert (done.start_error.code, done.exit_code, done.signal) == (code, None, None)
    plain.chmod(0o755)
    assert (await guest.channel.run(ExecSpec(argv=(str(plain).encode(),)))).start_error.code == "command_invalid"


async def test_init_can_not_be_signalled_traced_or_read_from_inside(guest):
    script = "kill -TERM 1; kill -INT 1; kill -KILL 1; kill -STOP 1; kill -CHLD 1; echo tried"
    assert (await guest.channel.run(sh(script))).stdout == b"tried\n"
    await guest.channel.ping()
    done = await guest.channel.run(sh("cat /proc/1/environ; ls /proc/1/fd; head -c1 /proc/1/mem", user="nobody"))
    assert done.stdout == b""


async def test_many_ended_execs_are_remembered_and_bounded(guest):
    ids = [(await guest.channel.run(sh("exit 3"))).exec_id for _ in range(350)]
    states = {state.exec_id: state for state in await guest.channel.list_execs()}
    assert all(states[each].exit_code == 3 for each in ids[-256:])
    assert len(states) <= 330


async def test_another_connection_dying_harms_nothing(guest):
    live = await guest.channel.exec(sh("sleep 0.3; echo survived"))
    for _ in range(10):
        other = await guest.connect()
        await other.exec(sh("sleep 0.1"))
        await other.close()
    assert (await live.wait(timeout_s=10)).stdout == b"survived\n"


async def test_a_timeout_does_not_run_while_the_sandbox_is_frozen(guest):
    live = await guest.channel.exec(sh("sleep 1.2; echo done", timeout_s=2.0))
    await asyncio.sleep(0.2)
    (guest.cgroup / "cgroup.procs").write_text(str(guest.pid))
    (guest.cgroup / "cgroup.freeze").write_text("1")
    await asyncio.sleep(3.5)
    (guest.cgroup / "cgroup.freeze").write_text("0")
    outcome = await live.wait(timeout_s=20)
    assert (outcome.timed_out, outcome.stdout) == (False, b"done\n")


@needs("frozen_usec")
async def test_a_timeout_runs_while_dsec_init_gets_no_cpu(guest):
    """Stopped rather than starved, which it can't tell apart: either way it is late, and nothing was frozen."""
    live = await guest.channel.exec(sh("sleep 60", timeout_s=1.0))
    os.kill(guest.pid, signal.SIGSTOP)
    await asyncio.sleep(3.5)
    os.kill(guest.pid, signal.SIGCONT)
    outcome = await live.wait(timeout_s=20)
    assert outcome.timed_out
    assert outcome.duration_s > 3


async def test_fallback_without_a_cgroup_kills_forks_and_children_of_its_session():
    async with running_guest("release", cgroup=False) as guest:
        assert guest.channel.hello.features & 1 == 0
        done = await guest.channel.run(sh("trap '' TERM; sleep 7774 & sleep 7774", timeout_s=0.3), timeout_s=20)
        assert done.timed_out
        assert await alive(guest, "7774") == 0


async def test_all_logs_together_are_bounded():
    async with running_guest("release", "--log-bytes", str(4 << 20)) as guest:
        before = guest.rss_kib()
        done = [await guest.channel.run(sh("head -c 3000000 /dev/zero", max_output_bytes=2 << 20)) for _ in range(6)]
        assert all(d.total_bytes == 3_000_000 and d.truncated for d in done)
        assert guest.rss_kib() - before < 6 * 1024
        oldest = await (await guest.channel.attach(done[0].exec_id)).wait()
        assert (oldest.exit_code, oldest.total_bytes) == (0, 3_000_000)


async def test_dropped_capabilities_are_gone_for_good():
    caps = 0x0000_0000_0000_00FB  # without DAC_READ_SEARCH
    async with running_guest("release", "--caps", f"{caps:x}", "--no-new-privs") as guest:
        done = await guest.channel.run(sh("grep -E 'Cap(Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs' /proc/self/status"))
        values = [line.split()[1] for line in done.stdout.decode().splitlines()]
        assert values == ["0" * 16, f"{caps:016x}", f"{caps:016x}", f"{caps:016x}", "0" * 16, "1"]
        assert (await guest.channel.run(sh("cat /proc/1/environ"))).stdout == b""
        assert Path("/proc").exists()
