"""`dsec sandbox exec` and `shell`: a command in a sandbox with our stdin, stdout and terminal.

The exit code is the program's; 128+n when signal n ended it, 124 when its timeout did, 125 for a fault of the platform,
127 when the sandbox has no such program (126: it can't be run). Ctrl-C, or a closed pipe after us, ends it too.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import sys
import termios
import tty
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from libdsec.errors import PlatformError
from libdsec.sandbox import AsyncSandbox

from nomad_dsec.cli.access import add_access, open_client
from nomad_dsec.cli.output import add_json, print_json, say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine, Iterator

    from libdsec.process import AsyncProcess
    from libdsec.results import ExecResult

PLATFORM_FAULT = 125
_NEVER_RAN = {"command_not_found": 127, "command_denied": 126}  # as shells have it
TIMED_OUT = 124
_CTRL_D = b"\x04"  # what a terminal says at its end; it has no end of file of its own
_SHELL = "if command -v bash >/dev/null; then exec bash -l; else exec sh -l; fi"
_READ_BYTES = 64 * 1024
_END_S = 5.0


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The two verbs."""
    run = verbs.add_parser("exec", help="run a command", description=__doc__)
    run.add_argument("--stdin", "-i", action="store_true", help="give it our stdin")
    run.add_argument("--tty", "-t", action="store_true", help="give it a terminal")
    _common(run)
    run.add_argument("sandbox", metavar="ID", help="of the sandbox, as `dsec sandbox ls` prints it")
    run.add_argument("command", nargs="+", metavar="COMMAND", help="after `--`: exact arguments; use sh -c for a shell")
    run.set_defaults(run=run_exec, fault_code=PLATFORM_FAULT, hint_extra="a command with flags comes after `--`")
    shell = verbs.add_parser("shell", help="an interactive shell", description=__doc__)
    _common(shell)
    shell.add_argument("sandbox", metavar="ID", help="of the sandbox, as `dsec sandbox ls` prints it")
    shell.set_defaults(run=run_exec, fault_code=PLATFORM_FAULT, command=None, stdin=True, tty=True)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(fault_codes=_NEVER_RAN)
    parser.add_argument("--cwd", "-w", default="", help="where it starts (default: the sandbox's)")
    parser.add_argument("--user", "-u", default="", help="who runs it: a name or uid, :group (default: the sandbox's)")
    parser.add_argument("--env", "-e", action="append", default=[], metavar="KEY=VALUE", help="may repeat")
    parser.add_argument(
        "--timeout-s", type=float, default=None, help="seconds after which all of it is killed (default: never)"
    )
    add_json(parser)
    add_access(parser)


async def run_exec(args: argparse.Namespace) -> int:
    """Run it; with --json print the result, else pass its streams through."""
    from nomad_dsec.cli.sandbox import pairs

    command = args.command if args.command is not None else ["/bin/sh", "-c", _SHELL]
    env = pairs(args.env, "--env")
    async with open_client(args) as client:
        sandbox = await AsyncSandbox.connect(args.sandbox, client=client)
        if args.json:
            given = await asyncio.to_thread(sys.stdin.buffer.read) if args.stdin else b""
            result = await sandbox.exec(
                command, cwd=args.cwd, user=args.user, env=env, timeout_s=args.timeout_s, stdin=given
            )
            print_json(_as_data(result))
            return 0
        terminal = args.tty and sys.stdin.isatty() and sys.stdout.isatty()
        forced = bool(args.tty) and args.command is not None  # a shell fed by a pipe is a script: it has no terminal
        if terminal:
            env = {"TERM": os.environ.get("TERM", "xterm"), **env}
        process = await sandbox.spawn(
            command,
            cwd=args.cwd,
            user=args.user,
            env=env,
            timeout_s=args.timeout_s,
            stdin=args.stdin,
            pty=_window() if terminal else forced,
        )
        with _raw_terminal(enabled=terminal):
            end = _CTRL_D if terminal or forced else b""
            feed = _feed if args.stdin or args.tty else None
            try:
                result = await _converse(sandbox, process, feed=feed and partial(feed, end=end), terminal=terminal)
            except (asyncio.CancelledError, ExceptionGroup) as ended:
                if isinstance(ended, asyncio.CancelledError) or ended.subgroup(BrokenPipeError) is not None:
                    await _end(process)
                raise
        return exit_code_of(result)


async def _end(process: AsyncProcess) -> None:
    """Ctrl-C, or nobody reads us any more: the command ends too, as under a local shell. Best effort."""
    with suppress(PlatformError, TimeoutError):
        async with asyncio.timeout(_END_S):
            await process.kill()


def exit_code_of(result: ExecResult) -> int:
    """What our process exits with for a result."""
    if result.timed_out:
        return TIMED_OUT
    return result.exit_code if result.exit_code is not None else 128 + (result.signal or 0)


def _as_data(result: ExecResult) -> dict[str, object]:
    return {
        "exec_id": result.exec_id,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "timed_out": result.timed_out,
        "oom_killed": result.oom_killed,
        "truncated": result.truncated,
        "duration_s": result.duration_s,
    }


async def _converse(
    sandbox: AsyncSandbox,
    process: AsyncProcess,
    *,
    feed: Callable[..., Coroutine[Any, Any, None]] | None,
    terminal: bool,
) -> ExecResult:
    """Pass bytes both ways until the command ends."""
    current = [process]
    loop = asyncio.get_running_loop()

    async def resize() -> None:
        rows, cols = _window()
        await current[0].resize(rows=rows, cols=cols)

    async with asyncio.TaskGroup() as tasks:
        feeding = tasks.create_task(feed(sandbox, current)) if feed is not None else None
        if terminal:
            loop.add_signal_handler(signal.SIGWINCH, lambda: tasks.create_task(resize()))
        try:
            async for stream, data in process:
                out = sys.stdout if stream == "stdout" else sys.stderr
                out.buffer.write(data)
                out.buffer.flush()
            result = await process.wait()
        finally:
            if terminal:
                loop.remove_signal_handler(signal.SIGWINCH)
            if feeding is not None:
                feeding.cancel()
    for extra in current[1:]:
        await extra.detach()
    return result


async def _feed(sandbox: AsyncSandbox, current: list[AsyncProcess], *, end: bytes) -> None:
    """Our stdin to the command's, and `end` after it. After a cut, keys typed from then on go over a new attachment."""
    read = await _open_stdin()
    while True:
        data = await read(_READ_BYTES)
        try:
            if data or end:
                await current[-1].write(data or end)
            if not data:
                await current[-1].close_stdin()
        except PlatformError as error:
            if error.code == "stdin_closed":
                return
            if not sys.stdin.isatty():
                raise
            say("\r\n[the connection was cut; what you typed last may be lost]\r")
            current.append(await sandbox.attach(current[0].exec_id, since=current[0].offset))
        if not data:
            return


async def _open_stdin() -> Callable[[int], Coroutine[Any, Any, bytes]]:
    """How to read our stdin. Files and devices such as /dev/null are read by a thread: epoll can't watch them."""
    if sys.stdin is None:  # closed, and its number is another file's by now

        async def nothing(_size: int) -> bytes:
            return b""

        return nothing

    async def by_thread(size: int) -> bytes:
        return await asyncio.to_thread(os.read, 0, size)

    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(0)):
        return by_thread
    reader = asyncio.StreamReader()
    pipe = os.fdopen(os.dup(0), "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader.read


def _window() -> tuple[int, int]:
    size = shutil.get_terminal_size()
    return max(1, size.lines), max(1, size.columns)


@contextmanager
def _raw_terminal(*, enabled: bool) -> Iterator[None]:
    """Pass every key through, and put the terminal back whatever happens."""
    if not enabled:
        yield
        return
    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSADRAIN)  # keeps what was typed ahead
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
