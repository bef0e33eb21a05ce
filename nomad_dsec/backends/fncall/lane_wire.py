"""The messages between the node and a lane's PID 1; the structs are those of guest/c/call.h. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from libdsec.errors import PlatformError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAGIC: Final = 0x4C414344
REQUEST: Final = struct.Struct("<IIQQQQQQQQQ6I")
REPLY: Final = struct.Struct("<IIQIIIIQQQQQQQQQQ")
FILE: Final = struct.Struct("<IIQ")
INLINE_MAX: Final = 96 * 1024
STDIN_INLINE_MAX: Final = 32 * 1024  # half of what a pipe takes at once
MESSAGE_MAX: Final = INLINE_MAX + REPLY.size

SETUP, RUN, CANCEL = 1, 2, 3
ZYGOTE, PAYLOAD_FD, STDIN_FD, EXEC_FD, PROBE = 1, 2, 4, 8, 16
WALL_OVER, CPU_OVER, OUT_OVER, ERR_OVER, CANCELLED, BROKEN, BODY_FD, NOT_STARTED, NO_ZYGOTE = (1 << n for n in range(9))
THRASH_FAULTS: Final = 300  # reads of mapped pages, at least, and a CPU second: a cold start has that many once
THRASH_SLACK_BYTES: Final = 2 << 20  # what reclaim frees at once
THRASHED: Final = 1 << 31  # set by the node, see Lane.run
STEPS: Final = ("", "files", "slot", "fork", "enter", "limits", "user", "exec", "zygote", "request")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneCall:
    """One run in a lane. Times in microseconds, sizes in bytes. stdin: inline; longer input is passed as a descriptor.

    files: name -> (mode, content). fetch: names or patterns with * of files wanted back, fetch_bytes in all.
    """

    argv: Sequence[bytes]
    env: Sequence[bytes] = ()
    stdin: bytes = b""
    files: Mapping[str, tuple[int, bytes]] = field(default_factory=dict)
    fetch: Sequence[str] = ()
    fetch_bytes: int = 0
    wall_us: int = 0
    cpu_us: int = 0
    output_bytes: int = 0
    disk_bytes: int = 0
    stack_bytes: int = 0
    nofile: int = 1024
    flags: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReply:
    """What became of it; `files` maps names to contents, `unfetched` to the errno of those that could not be read."""

    flags: int
    id: int
    step: str
    error: int
    status: int
    wall_us: int
    cpu_us: int
    maxrss_kib: int
    oom_kills: int
    memory_bytes: int
    major_faults: int
    held_bytes: int
    stdout: bytes
    stderr: bytes
    files: Mapping[str, bytes]
    unfetched: Mapping[str, int]


def pack_payload(call: LaneCall) -> bytes:
    """argv, env, fetch names, stdin, files."""
    parts: list[bytes] = []
    for words in (call.argv, call.env):
        parts += [word + b"\0" for word in words]
    parts += [name.encode("utf-8", "surrogateescape") + b"\0" for name in call.fetch]
    parts.append(call.stdin)
    for name, (mode, content) in call.files.items():
        raw = name.encode("utf-8", "surrogateescape")
        parts += [FILE.pack(len(raw), mode, len(content)), raw, content]
    return b"".join(parts)


def pack_request(kind: int, number: int, call: LaneCall, payload_bytes: int, flags: int) -> bytes:
    """The header that precedes the payload."""
    return REQUEST.pack(
        MAGIC,
        kind,
        number,
        call.wall_us,
        call.cpu_us,
        call.output_bytes,
        call.disk_bytes,
        call.stack_bytes,
        call.fetch_bytes,
        payload_bytes,
        len(call.stdin),
        flags | call.flags,
        call.nofile,
        len(call.argv),
        len(call.env),
        len(call.files),
        len(call.fetch),
    )


def unpack_header(message: bytes) -> tuple[int, int]:
    """(flags, bytes of the body) of a reply. PlatformError lane_protocol when it is none."""
    if len(message) < REPLY.size:
        raise PlatformError("lane_protocol", f"a reply of {len(message)} bytes")
    fields = REPLY.unpack_from(message)
    if fields[0] != MAGIC:
        raise PlatformError("lane_protocol", "a reply without our mark")
    return fields[1], sum(fields[14:17])


def unpack_reply(message: bytes, body: bytes) -> LaneReply:
    """A whole reply; `body`: stdout, stderr and files, wherever they came from."""
    fields = REPLY.unpack_from(message)
    _, flags, number, step, error, status, count, wall, cpu, rss, ooms, memory, faults, held, out, err, size = fields
    if len(body) < out + err + size:
        raise PlatformError("lane_protocol", "a reply is cut short")
    files, unfetched = _unpack_files(body[out + err : out + err + size], count)
    return LaneReply(
        flags=flags, id=number, step=STEPS[step] if step < len(STEPS) else str(step), error=error, status=status,
        wall_us=wall, cpu_us=cpu, maxrss_kib=rss, oom_kills=ooms, memory_bytes=memory, major_faults=faults,
        held_bytes=held, stdout=body[:out], stderr=body[out : out + err], files=files, unfetched=unfetched,
    )  # fmt: skip


def _unpack_files(raw: bytes, count: int) -> tuple[dict[str, bytes], dict[str, int]]:
    files: dict[str, bytes] = {}
    unfetched: dict[str, int] = {}
    at = 0
    for _ in range(count):
        name_bytes, error, size = FILE.unpack_from(raw, at)
        at += FILE.size
        name = raw[at : at + name_bytes].decode("utf-8", "replace")  # it goes into JSON
        at += name_bytes
        if error:
            unfetched[name] = error
        else:
            files[name] = raw[at : at + size]
        at += size
    return files, unfetched


def env_words(env: Mapping[str, str]) -> Iterable[bytes]:
    """NAME=value as bytes."""
    return [f"{name}={value}".encode("utf-8", "surrogateescape") for name, value in env.items()]


def has_thrashed(reply: LaneReply, limit_bytes: int) -> bool:
    """Was it memory that a call lacked whose time ran out.

    The kernel kills nothing as long as it finds a page to give up, and that of running code can always be read again:
    a program a little above its limit then does nothing else until its time is over. See mm/vmscan.c.
    """
    faults_min = THRASH_FAULTS * max(1.0, reply.cpu_us / 1e6)
    return reply.major_faults >= faults_min and reply.held_bytes >= limit_bytes - THRASH_SLACK_BYTES


def lost_to_oom(kills: int) -> LaneReply:
    """The reply of a lane that was killed for memory before it could give one."""
    return LaneReply(
        flags=BROKEN, id=0, step="", error=0, status=9, wall_us=0, cpu_us=0, maxrss_kib=0, oom_kills=kills,
        memory_bytes=0, major_faults=0, held_bytes=0, stdout=b"", stderr=b"", files={}, unfetched={},
    )  # fmt: skip
