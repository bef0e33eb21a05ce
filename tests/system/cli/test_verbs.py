"""`dsec sandbox shell` on a real terminal, `cp` both ways, `logs`, and `dsec image` on a store of the test's own."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from tests.kit.abilities import needs
from tests.kit.devstack import REPO, DevStack

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    made = DevStack(tmp_path_factory.mktemp("v") / "d")
    made.start("--backends", "fake", "--node-id", "t2")
    yield made
    made.stop()
    assert made.pids() == []


@pytest.fixture
def sandbox(stack):
    made = stack.dsec("sandbox", "create", "i").stdout.decode().strip()
    yield made
    assert stack.dsec("sandbox", "kill", made).returncode == 0


class Terminal:
    """`dsec` on a pseudo-terminal of the given size."""

    def __init__(self, stack: DevStack, *argv: str, rows: int = 31, cols: int = 101) -> None:
        self.master, worker = pty.openpty()
        self.resize(rows, cols)
        self.before = termios.tcgetattr(worker)
        env = {"PATH": os.environ["PATH"], "DSEC_DATA": str(stack.data), "TERM": "vt100"}
        env["PYTHONPATH"] = f"{REPO}:{REPO / 'sdk'}"
        command = [sys.executable, "-m", "nomad_dsec.cli", *argv]
        self.process = subprocess.Popen(
            command, stdin=worker, stdout=worker, stderr=worker, env=env, start_new_session=True
        )
        self.worker = worker
        self.seen = b""

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, text: str, timeout_s: float = 30) -> None:
        """Wait until it was shown, and forget what came before."""
        deadline = time.monotonic() + timeout_s
        while text.encode() not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{text!r} was not shown but {self.seen!r}"
            self.seen += os.read(self.master, 65536)
        self.seen = self.seen.partition(text.encode())[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.worker)


@needs("root")
def test_a_shell_on_a_terminal_that_resizes_and_is_put_back(stack, sandbox):
    terminal = Terminal(stack, "sandbox", "shell", sandbox)
    try:
        terminal.type("stty size; echo $TERM; tty >/dev/null && echo a-$((1+1))-tty\n")
        terminal.expect("31 101")
        terminal.expect("vt100")
        terminal.expect("a-2-tty")
        terminal.resize(44, 133)
        os.killpg(terminal.process.pid, 28)  # SIGWINCH, as the kernel sends it to a foreground group
        terminal.type("sleep 0.2; stty size\n")
        terminal.expect("44 133")
        terminal.type("sleep 60\n")
        time.sleep(0.3)
        terminal.type("\x03")  # Ctrl-C is for the program inside
        terminal.type("echo still-$((2+3))-here; exit 9\n")
        terminal.expect("still-5-here")
        assert terminal.process.wait(20) == 9
        assert termios.tcgetattr(terminal.worker) == terminal.before
    finally:
        terminal.close()


@needs("root")
def test_a_shell_outlives_a_killed_node_daemon(stack, sandbox):
    terminal = Terminal(stack, "sandbox", "shell", sandbox)
    try:
        terminal.type("X=kept; echo up-$((1+1))\n")
        terminal.expect("up-2")
        old = stack.kill("node")
        stack.wait_other_pid("node", old)
        deadline = time.monotonic() + 30
        shown = False
        while not shown and time.monotonic() < deadline:  # keys typed during the cut may be lost, and that is said
            terminal.type("echo $X-$((3+4))\n")
            try:
                terminal.expect("kept-7", timeout_s=2)
                shown = True
            except AssertionError:
                continue
        assert shown
        terminal.type("exit 0\n")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.close()


@needs("root")
def test_copies_both_ways_and_through_pipes(stack, sandbox, tmp_path):
    source = tmp_path / "s"
    source.mkdir()
    (source / "x").write_bytes(os.urandom(50_000))
    os.mkfifo(source / "pipe")
    sent = stack.dsec("sandbox", "cp", str(source), f"{sandbox}:/tmp/t")
    assert sent.returncode == 0, sent.stderr
    assert b"left out: pipe" in sent.stderr
    assert stack.dsec("sandbox", "cp", f"{sandbox}:/tmp/t", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back/x").read_bytes() == (source / "x").read_bytes()
    assert stack.dsec("sandbox", "cp", "-", f"{sandbox}:/tmp/in", stdin=b"piped").returncode == 0
    assert stack.dsec("sandbox", "cp", f"{sandbox}:/tmp/in", "-").stdout == b"piped"
    assert stack.dsec("sandbox", "cp", str(source / "x"), f"{sandbox}:/tmp/").returncode == 0
    assert stack.dsec("sandbox", "exec", sandbox, "--", "cmp", "/tmp/x", "/tmp/t/x").returncode == 0
    wrong = stack.dsec("sandbox", "cp", "a", "b")
    assert wrong.returncode == 2
    assert b"ID:PATH" in wrong.stderr
    assert stack.dsec("sandbox", "cp", f"{sandbox}:/none", str(tmp_path / "n")).returncode == 2


@needs("root")
def test_logs_of_what_ran_and_of_what_runs(stack, sandbox):
    """Commands with their ends, the kept output of one on both streams, what is missing, and one that is followed."""
    ran = stack.dsec("sandbox", "exec", sandbox, "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert ran.returncode == 3
    listed = json.loads(stack.dsec("sandbox", "logs", sandbox, "--json").stdout)
    assert [(entry["exit_code"], entry.get("running", False)) for entry in listed] == [(3, False)]
    table = stack.dsec("sandbox", "logs", sandbox).stdout.decode()
    assert "exit 3" in table
    kept = stack.dsec("sandbox", "logs", sandbox, listed[0]["exec_id"])
    assert (kept.returncode, kept.stdout, kept.stderr) == (0, b"out\n", b"err\n")
    as_json = json.loads(stack.dsec("sandbox", "logs", sandbox, listed[0]["exec_id"], "--json").stdout)
    assert as_json["exit_code"] == 3
    followed = stack.dsec("sandbox", "logs", sandbox, listed[0]["exec_id"], "-f", "--since", "4")
    assert followed.stdout + followed.stderr == b"err\n"
    flood = "head -c 5000000 /dev/zero | tr '\\0' x"
    stack.dsec("sandbox", "exec", sandbox, "--", "sh", "-c", flood)
    last = json.loads(stack.dsec("sandbox", "logs", sandbox, "--json").stdout)
    (large,) = [entry for entry in last if entry["exec_id"] != listed[0]["exec_id"]]
    cut = stack.dsec("sandbox", "logs", sandbox, large["exec_id"])
    assert len(cut.stdout) < 5_000_000
    assert f"({5_000_000 - len(cut.stdout)} bytes of the middle were not kept)" in cut.stderr.decode()
    for argv in (["-f"], ["ex-nonesuch"], [listed[0]["exec_id"], "--since", "3"]):
        wrong = stack.dsec("sandbox", "logs", sandbox, *argv)
        assert wrong.returncode in (1, 2), argv
        assert wrong.stdout == b""
        assert wrong.stderr


@pytest.mark.parametrize("ended_by", ["closed pipe", "Ctrl-C"])
def test_a_command_ends_with_the_exec_that_nobody_reads_any_more(stack, sandbox, ended_by):
    """`exec ... | head -1` is no traceback, and neither it nor Ctrl-C leaves the command running in the sandbox."""
    env = {"PATH": os.environ["PATH"], "DSEC_DATA": str(stack.data), "PYTHONPATH": f"{REPO}:{REPO / 'sdk'}"}
    argv = [sys.executable, "-m", "nomad_dsec.cli", "sandbox", "exec", sandbox, "--", "sh", "-c"]
    command = "while :; do echo y; done" if ended_by == "closed pipe" else "echo y; exec sleep 300"
    with subprocess.Popen([*argv, command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ours:
        assert ours.stdout.readline() == b"y\n"
        if ended_by == "Ctrl-C":
            ours.send_signal(signal.SIGINT)
        else:
            ours.stdout.close()
        said = ours.stderr.read().decode()
        code = ours.wait(30)
    assert (code, said) == ((130, "interrupted\n") if ended_by == "Ctrl-C" else (0, ""))
    deadline = time.monotonic() + 20
    while (entry := json.loads(stack.dsec("sandbox", "logs", sandbox, "--json").stdout)[0]).get("running"):
        assert time.monotonic() < deadline, "still running"
    assert (entry.get("exit_code"), entry.get("signal")) == (None, 9)


def test_images_through_the_cli(tmp_path):
    stack = DevStack(tmp_path / "d")
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin/x").write_text("x")
    flags = ("--store", str(tmp_path / "store"))
    made = stack.dsec("image", "import", f"dir:{tree}", "--name", "mine", *flags)
    assert made.returncode == 0, made.stderr
    digest = made.stdout.decode().strip()
    assert digest.startswith("sha256:")
    listed = json.loads(stack.dsec("image", "ls", "--json", *flags).stdout)
    assert [image["digest"] for image in listed] == [digest]
    assert json.loads(stack.dsec("image", "inspect", "mine", *flags).stdout)["digest"] == digest
    assert stack.dsec("image", "verify", "mine", *flags).returncode == 0
    missing = stack.dsec("image", "inspect", "other", *flags)
    assert (missing.returncode, missing.stdout) == (2, b"")
    assert stack.dsec("image", "import", "nonsense://x", *flags).returncode == 2
    assert stack.dsec("image", "rm", "mine", *flags).returncode == 0
    assert stack.dsec("image", "gc", *flags).returncode == 0
    assert json.loads(stack.dsec("image", "ls", "--json", *flags).stdout) == []
