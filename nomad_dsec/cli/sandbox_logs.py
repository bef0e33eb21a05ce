"""`dsec sandbox logs`: the commands that a sandbox remembers, and what is kept of the output of one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from libdsec.errors import UsageError
from libdsec.sandbox import AsyncSandbox

from nomad_dsec.cli.access import add_access, open_client
from nomad_dsec.cli.output import add_json, print_json, print_table

if TYPE_CHECKING:
    import argparse

    from libdsec.wire import ExecReply


def add(verbs: Any) -> None:
    """The verb."""
    logs = verbs.add_parser("logs", help="commands of a sandbox, or the kept output of one")
    logs.add_argument("sandbox", metavar="ID", help="of the sandbox, as `dsec sandbox ls` prints it")
    logs.add_argument("exec_id", nargs="?", metavar="EXEC", help="print this command's output")
    logs.add_argument("--follow", "-f", action="store_true", help="go on until it ends")
    logs.add_argument("--since", type=int, default=0, metavar="BYTE", help="with --follow: from this byte of it on")
    add_json(logs)
    add_access(logs)
    logs.set_defaults(run=run_logs)


async def run_logs(args: argparse.Namespace) -> int:
    """The commands, or one command's output: stdout to stdout, stderr to stderr, what is missing is told there too."""
    if (args.follow or args.since) and args.exec_id is None:
        raise UsageError("no_exec", "which command's output?", field="EXEC", hint="name one that `logs ID` lists")
    if args.follow and args.json:
        raise UsageError("bad_arguments", "output that is followed is no JSON", field="--json", hint="leave one out")
    if args.since and not args.follow:
        raise UsageError("bad_arguments", "only output that is followed has a start", field="--since", hint="add -f")
    async with open_client(args) as client:
        sandbox = await AsyncSandbox.connect(args.sandbox, client=client)
        if args.exec_id is None:
            return _print_execs(list(await sandbox.execs()), as_json=args.json)
        if args.follow:
            return await _follow(sandbox, args.exec_id, args.since)
        return _print_kept(await sandbox.logs(args.exec_id), as_json=args.json)


async def _follow(sandbox: AsyncSandbox, exec_id: str, since: int) -> int:
    async with await sandbox.attach(exec_id, since=since) as process:
        async for stream, data in process:
            out = sys.stdout if stream == "stdout" else sys.stderr
            out.buffer.write(data)
            out.buffer.flush()
    _tell_missing(process.dropped_bytes)
    return 0


def _print_kept(reply: ExecReply, *, as_json: bool) -> int:
    if as_json:
        print_json(reply)
        return 0
    sys.stdout.buffer.write(reply.stdout)
    sys.stdout.buffer.flush()
    sys.stderr.buffer.write(reply.stderr)
    sys.stderr.buffer.flush()
    _tell_missing(reply.total_bytes - len(reply.stdout) - len(reply.stderr) if reply.truncated else 0)
    return 0


def _tell_missing(count: int) -> None:
    if count > 0:
        print(f"({count} bytes of the middle were not kept)", file=sys.stderr)


def _print_execs(execs: list[ExecReply], *, as_json: bool) -> int:
    if as_json:
        print_json(execs)
        return 0
    rows = []
    for entry in execs:
        notes = [word for word in ("timed_out", "oom_killed", "truncated") if getattr(entry, word)]
        rows.append([entry.exec_id, _end_of(entry), f"{entry.duration_s:.2f}s", entry.total_bytes, " ".join(notes)])
    print_table(("exec", "end", "duration", "bytes", "notes"), rows)
    return 0


def _end_of(entry: ExecReply) -> str:
    if entry.running:
        return "running"
    if entry.exit_code is not None:
        return f"exit {entry.exit_code}"
    return "never ran" if entry.signal is None else f"signal {entry.signal}"
