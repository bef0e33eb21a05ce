"""Commands: requests to what the guest understands, the guest's outcome to a reply, and faults kept apart from results.

A result (exit code, signal, timeout, OOM) comes from the guest alone. Everything else is an error with a reason.
"""

from __future__ import annotations

import asyncio
import resource
from typing import TYPE_CHECKING

from libdsec.errors import (
    CapacityError,
    DeadlineExceeded,
    DsecError,
    NotFoundError,
    PlatformError,
    StateError,
    UsageError,
)
from libdsec.wire import ExecReply

from nomad_dsec.guest.spec import RLIM_INFINITY, STDERR, ExecSpec, Rlimit, kept_output_bytes
from nomad_dsec.ids import new_exec_id
from nomad_dsec.log import get_log
from nomad_dsec.node.row import to_handle
from nomad_dsec.node.states import check_verb
from nomad_dsec.proc import SYSTEM_PATH

if TYPE_CHECKING:
    from libdsec.wire import ExecRequest, SignalRequest

    from nomad_dsec.guest.channel import GuestChannel
    from nomad_dsec.guest.execution import GuestExec
    from nomad_dsec.guest.spec import ExecOutcome, ExecState, StartError
    from nomad_dsec.node.core import Entry, Node
    from nomad_dsec.node.row import Row

log = get_log(__name__)
CONNECT_S = 10.0
GUEST_S = 30.0
EXPLAIN_S = 2.0
ROOT_NAMES = ("", "0", "root", "0:0", "root:root")
RLIMITS = {name.removeprefix("RLIMIT_").lower(): number for name, number in vars(resource).items() if "RLIMIT_" in name}
_FIELD_OF_START_ERROR = {
    "cwd_missing": "cwd",
    "cwd_denied": "cwd",
    "user_unknown": "user",
    "command_not_found": "cmd",
    "command_denied": "cmd",
    "command_invalid": "cmd",
    "rlimit_denied": "rlimits",
}
_WHAT_CAN_NOT = {
    "cwd": "the working directory can't be entered",
    "user": "there is no such user or group in the sandbox",
    "cmd": "the command can't be run",
    "rlimits": "a limit can't be set: hard limits can only be lowered",
}


class Execs:
    """Runs commands in running sandboxes of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.inflight = 0

    async def run(self, entry: Entry, request: ExecRequest) -> ExecReply:
        """Run to the end. The same exec_id again joins the same exec, whoever else waits for it.

        Raises StateError (not running, or ended meanwhile), UsageError (it can't be started like this), PlatformError
        connection_lost, DeadlineExceeded exec_deadline (the guest did not keep its own timeout).
        """
        self._check(entry)
        if self.inflight >= self._node.limits.execs_inflight_max:
            raise CapacityError("busy", f"{self.inflight} execs run on this node", retry_after_s=0.5, field="")
        _check_output(entry.row, request)
        spec = exec_spec(entry.row, request)
        self.inflight += 1
        try:
            if request.stdin:
                # Must reach the program whole, so it is carried on when the client's connection is cut.
                work = self._outcome(entry, spec, request.stdin)
                outcome = await asyncio.shield(self._node.room.spawn(f"exec {spec.exec_id}", work))
            else:
                outcome = await self._outcome(entry, spec, b"")
            reply = await self.reply(entry, outcome, shell=isinstance(request.cmd, str))
        except DsecError as error:
            self._node.metrics.exec_fault(error.code)
            raise
        finally:
            self.inflight -= 1
        self._node.metrics.exec_took(reply.duration_s)
        return reply

    async def _outcome(self, entry: Entry, spec: ExecSpec, stdin: bytes) -> ExecOutcome:
        limit_s = None if spec.timeout_s is None else spec.timeout_s + self._node.limits.exec_slack_s
        for again in (True, False):
            try:
                channel = await self.channel(entry)
                return await channel.run(spec, stdin, timeout_s=limit_s)
            except DeadlineExceeded as late:
                raise self._late(entry, spec, late) from late
            except PlatformError as error:
                await self._explain(entry, error)
                if not again or stdin or error.code != "connection_lost":
                    raise
                log.warning("an exec is attached again after a cut", sandbox=entry.row.id, exec=spec.exec_id)
        raise AssertionError("not reached")

    def _late(self, entry: Entry, spec: ExecSpec, late: DeadlineExceeded) -> DsecError:
        if entry.row.state in ("pausing", "paused"):
            return StateError(
                "wrong_state",
                f"{entry.row.id} was paused while {spec.exec_id} ran",
                hint="resume it, then attach by exec_id",
                details={"state": entry.row.state, "exec_id": spec.exec_id},
            )
        return DeadlineExceeded(
            "exec_deadline",
            f"{spec.exec_id} did not end {self._node.limits.exec_slack_s:g} s after its own timeout",
            hint="the sandbox may be starved; attach by exec_id, or kill it",
            details={"exec_id": spec.exec_id, "cause": late.code},
        )

    async def channel(self, entry: Entry) -> GuestChannel:
        """The sandbox's channel, connected anew when it was lost."""
        channel = entry.channel
        if channel is not None and not channel.closed:
            return channel
        assert entry.row.handle is not None
        try:
            async with asyncio.timeout(CONNECT_S):
                channel = await self._node.backend_of(entry).connect(to_handle(entry.row.handle))
        except (TimeoutError, OSError, DsecError) as error:
            failed = PlatformError("connection_lost", f"dsec-init of {entry.row.id} does not answer: {error!r}")
            await self._explain(entry, failed)
            raise failed from error
        entry.channel = channel
        return channel

    async def open(self, entry: Entry) -> GuestChannel:
        """The channel of a sandbox that runs; StateError otherwise. For files and streams."""
        self._check(entry)
        return await self.channel(entry)

    async def _explain(self, entry: Entry, error: PlatformError) -> None:
        """StateError with the true reason when the connection was lost because the sandbox has ended."""
        if error.code != "connection_lost":
            return
        try:
            async with asyncio.timeout(EXPLAIN_S):
                await entry.ending.wait()
        except TimeoutError:
            return
        row = entry.row
        raise StateError(
            "sandbox_ended",
            f"{row.id} ended ({row.reason}{': ' + row.message if row.message else ''}) before this was done",
            hint="it is gone; create another",
            details={"state": row.state, "reason": row.reason},
        ) from error

    async def explained(self, entry: Entry, error: DsecError) -> DsecError:
        """The error to show for one that a guest call raised."""
        if isinstance(error, PlatformError):
            try:
                await self._explain(entry, error)
            except StateError as better:
                return better
        return error

    def _check(self, entry: Entry, verb: str = "exec") -> None:
        row = entry.row
        if row.state != "running":
            check_verb(row.id, row.state, verb, reason=row.reason, message=row.message)

    async def reply(self, entry: Entry, outcome: ExecOutcome, *, shell: bool = False) -> ExecReply:
        """The wire's form; a program that never ran is an error, not an exit code."""
        if outcome.start_error is not None:
            raise start_error(entry, outcome.exec_id, outcome.start_error, shell=shell)
        if outcome.oom_killed:
            await self._note_kills(entry)
        return ExecReply(
            exec_id=outcome.exec_id,
            exit_code=outcome.exit_code,
            signal=outcome.signal,
            timed_out=outcome.timed_out,
            oom_killed=outcome.oom_killed,
            stdout=outcome.stdout,
            stderr=outcome.stderr,
            truncated=outcome.truncated,
            total_bytes=outcome.total_bytes,
            offset=outcome.total_bytes,
            duration_s=outcome.duration_s,
            cpu_s=outcome.cpu_s,
            max_rss_mib=outcome.max_rss_kib / 1024,
        )

    async def _note_kills(self, entry: Entry) -> None:
        """Let the backend see the count, so that this kill is not taken for the cause when init ends one day."""
        if entry.row.handle is None:
            return
        try:
            await self._node.backend_of(entry).stats(to_handle(entry.row.handle))
        except (DsecError, OSError) as error:
            log.warning("a sandbox could not be measured", sandbox=entry.row.id, error=repr(error))

    async def ls(self, entry: Entry) -> list[ExecReply]:
        """All execs that the guest remembers, without output."""
        channel = await self.open(entry)
        async with asyncio.timeout(GUEST_S):
            return [_from_state(state) for state in await channel.list_execs()]

    async def get(self, entry: Entry, exec_id: str) -> ExecReply:
        """One exec with the output that is kept, running or ended; NotFoundError exec_not_found."""
        channel = await self.open(entry)
        async with asyncio.timeout(GUEST_S):
            states = await channel.list_execs(exec_id)
            if not states:
                raise NotFoundError("exec_not_found", f"{entry.row.id} knows no exec {exec_id[:80]}", field="exec_id")
            attached = await channel.attach(exec_id, since=0)
            if not states[0].running:
                return await self.reply(entry, await attached.wait())
            return await _output_so_far(states[0], attached)

    async def signal(self, entry: Entry, exec_id: str, request: SignalRequest) -> None:
        """Send a signal to the tree of an exec."""
        channel = await self.open(entry)
        async with asyncio.timeout(GUEST_S):
            await channel.signal(exec_id, request.signal, tree=request.tree)


async def _output_so_far(state: ExecState, attached: GuestExec) -> ExecReply:
    out, err, reached = bytearray(), bytearray(), 0
    try:
        while reached < state.total_bytes:
            chunk = await anext(aiter(attached), None)
            if chunk is None:
                break
            (err if chunk.stream == STDERR else out).extend(chunk.data)
            reached = chunk.offset + len(chunk.data)
    finally:
        await attached.detach()
    reply = _from_state(state)
    reply.stdout, reply.stderr, reply.offset = bytes(out), bytes(err), reached
    reply.truncated = len(out) + len(err) < reached
    return reply


def _from_state(state: ExecState) -> ExecReply:
    return ExecReply(
        exec_id=state.exec_id,
        running=state.running,
        exit_code=state.exit_code,
        signal=state.signal,
        timed_out=state.timed_out,
        oom_killed=state.oom_killed,
        total_bytes=state.total_bytes,
        offset=state.total_bytes,
        duration_s=state.duration_s,
    )


def exec_spec(row: Row, request: ExecRequest) -> ExecSpec:
    """What the guest is asked. Environment: PATH (and root's HOME), then image, sandbox, request; the last wins."""
    argv = ["/bin/sh", "-c", request.cmd] if isinstance(request.cmd, str) else request.cmd
    user = request.user or row.user
    env = {"PATH": SYSTEM_PATH}
    if user in ROOT_NAMES:
        env["HOME"] = "/root"
    if request.pty is not None:
        env["TERM"] = "xterm-256color"
    env.update(row.env)
    env.update(request.env)
    return ExecSpec(
        argv=tuple(_bytes(part) for part in argv),
        env=tuple((_bytes(name), _bytes(value)) for name, value in env.items()),
        cwd=_bytes(request.cwd or row.cwd),
        user=user,
        rlimits=tuple(_rlimit(name, value) for name, value in request.rlimits.items()),
        pty=None if request.pty is None else (request.pty.rows, request.pty.cols),
        stdin=bool(request.stdin) or request.stdin_open,
        timeout_s=request.timeout_s,
        max_output_bytes=request.max_output_bytes,
        exec_id=request.exec_id or new_exec_id(),
        hold=request.hold,
        no_new_privs=bool(row.policy.get("no_new_privs", True)),
    )


def _check_output(row: Row, request: ExecRequest) -> None:
    """What could never be kept is not promised."""
    most = kept_output_bytes(row.memory_mib)
    if request.max_output_bytes > most:
        raise UsageError(
            "max_output_too_large",
            f"{row.id} keeps at most {most} bytes of output, as it has {row.memory_mib} MiB of memory",
            field="max_output_bytes",
            hint="ask for less, read the output as it comes (spawn), or create it with 16 times that as memory_mib",
            details={"max_output_bytes": most},
        )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _rlimit(name: str, value: int) -> Rlimit:
    number = RLIMITS.get(name)
    if number is None:
        raise UsageError(
            "bad_rlimit", f"{name[:80]!r}", field="rlimits", hint=f"use one of {', '.join(sorted(RLIMITS))}"
        )
    if value < -1 or value > RLIM_INFINITY:
        raise UsageError("bad_rlimit", f"{name} can't be {value}", field=f"rlimits.{name}", hint="-1 is no limit")
    limit = RLIM_INFINITY if value == -1 else value
    return Rlimit(resource=number, soft=limit, hard=limit)


def start_error(entry: Entry, exec_id: str, error: StartError, *, shell: bool) -> DsecError:
    """Why it never ran: the request's fault when it names what is not there, else the state of the sandbox."""
    details = {"exec_id": exec_id, "errno": error.errno}
    if shell and error.code.startswith("command_"):
        return StateError(
            "shell_missing",
            f"/bin/sh of {entry.row.id} can't be run: {error.message}",
            hint="give cmd as a list, or repair the sandbox's files",
            details=details,
        )
    field = _FIELD_OF_START_ERROR.get(error.code)
    if field is not None:
        return UsageError(error.code, f"{_WHAT_CAN_NOT[field]} ({error.message})", field=field, details=details)
    hint = "the sandbox has used up its limits" if error.code in ("no_memory", "no_processes") else ""
    return StateError(error.code, error.message, hint=hint, details=details)
