"""From a lane's reply to a result. Pure."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from libdsec.errors import UsageError
from libdsec.wire_fncall import FnResult

from nomad_dsec.backends.fncall import lane_wire as wire
from nomad_dsec.backends.fncall.verdicts import Facts, judge

if TYPE_CHECKING:
    from libdsec.wire_fncall import FnLimits

    from nomad_dsec.backends.fncall.lane_wire import LaneReply

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)


def facts_of(reply: LaneReply) -> Facts:
    """What was observed, as verdicts.judge takes it."""
    signal = reply.status & 0x7F
    lost = ""
    if reply.flags & wire.NOT_STARTED and not reply.oom_kills:
        lost = f"the program could not be started: step {reply.step}, {_name(reply.error)}"
    return Facts(
        exit_code=None if signal else reply.status >> 8 & 0xFF,
        signal=signal or None,
        cpu_s=reply.cpu_us / 1e6,
        wall_s=reply.wall_us / 1e6,
        oom=reply.oom_kills > 0,
        thrashed=bool(reply.flags & wire.THRASHED),
        wall_expired=bool(reply.flags & wire.WALL_OVER),
        cpu_expired=bool(reply.flags & wire.CPU_OVER),
        output_over=bool(reply.flags & (wire.OUT_OVER | wire.ERR_OVER)),
        lost=lost,
    )


def check_started(reply: LaneReply, argv0: bytes, *, language: str) -> None:
    """UsageError when the request itself kept the program from starting: no such program, files that don't fit."""
    if not reply.flags & wire.NOT_STARTED:
        return
    if reply.step == "files":
        if reply.error in (errno.ENOSPC, errno.EFBIG):
            raise UsageError("files_too_large", "the files don't fit the call's disk", field="limits.disk_mib")
        raise UsageError("bad_file_name", f"a file can't be made: {_name(reply.error)}", field="files")
    if reply.step == "exec" and reply.error in _ABSENT:
        name = argv0.decode("utf-8", "replace")
        if language:
            raise UsageError(
                "language_unavailable", f"the image has no {name}", field="language", hint="use an image that has it"
            )
        raise UsageError("command_not_found", f"{name!r}: {_name(reply.error)}", field="argv")
    if reply.step == "exec" and reply.error == errno.E2BIG:
        raise UsageError("command_invalid", "argv and env are too long", field="argv")


def result_of(reply: LaneReply, limits: FnLimits, *, queue_s: float) -> FnResult:
    """The result before any checker was asked."""
    facts = facts_of(reply)
    verdict, message = judge(facts, limits)
    ours = facts.wall_expired or facts.cpu_expired or facts.output_over
    return FnResult(
        verdict=verdict,
        exit_code=None if ours or facts.lost else facts.exit_code,
        signal=facts.signal if not facts.lost else None,
        stdout=reply.stdout,
        stderr=reply.stderr,
        stdout_truncated=bool(reply.flags & wire.OUT_OVER),
        stderr_truncated=bool(reply.flags & wire.ERR_OVER),
        cpu_s=facts.cpu_s,
        wall_s=facts.wall_s,
        queue_s=round(queue_s, 6),
        max_rss_mib=round(reply.maxrss_kib / 1024, 3),
        files=dict(reply.files),
        message=message,
    )


def _name(number: int) -> str:
    return errno.errorcode.get(number, str(number))
