"""The vocabulary of plans: operations as data, their printable form, and the binary that the C launcher reads. Pure.

The codes, fields and layout are those of guest/c/launch.h, which describes each operation; a test compares the two.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Value = int | str | bytes

PLAN_MAGIC: Final = 0x504C5344
PLAN_VERSION: Final = 1
MAX_OPS: Final = 512
NO_FD: Final = 0xFFFF_FFFF
HEADER: Final = struct.Struct("<IHHII")
OP: Final = struct.Struct("<HHI")
FIELD: Final = struct.Struct("<B3xI")
NUMBER: Final = struct.Struct("<B3xIQ")
REPORT_HEAD: Final = struct.Struct("<Ii56s")
REPORT_BYTES: Final = REPORT_HEAD.size + 4 * MAX_OPS
OPTION_SEPARATOR: Final = "\x1f"

KIND_NUMBER, KIND_STRING, KIND_BLOB = 1, 2, 3

# name -> code, then field names with their kind: n number, s string, b blob, f descriptor (a number in the binary).
OPERATIONS: Final[Mapping[str, tuple[int, tuple[tuple[str, str], ...]]]] = {
    "userns": (1, (("base", "n"), ("count", "n"))),
    "clone": (2, (("flags", "n"), ("cgroup", "f"))),
    "cgroup": (3, (("procs", "f"),)),
    "unshare": (4, (("flags", "n"),)),
    "setns": (5, (("ns", "f"), ("type", "n"))),
    "hostname": (6, (("name", "s"),)),
    "tmpfs_upper": (7, (("size_bytes", "n"), ("inodes", "n"))),
    "idmap": (8, (("mount", "f"),)),
    "overlay": (9, (("lower", "f"), ("attributes", "n"))),
    "mount": (
        10,
        (("type", "s"), ("target", "s"), ("options", "s"), ("attributes", "n"), ("mode", "n"), ("links", "n")),
    ),
    "mknod": (11, (("path", "s"), ("mode", "n"), ("major", "n"), ("minor", "n"))),
    "symlink": (12, (("path", "s"), ("text", "s"))),
    "bind": (13, (("source", "f"), ("target", "s"), ("attributes", "n"))),
    "mask": (14, (("path", "s"),)),
    "readonly": (15, (("path", "s"), ("required", "n"), ("attributes", "n"))),
    "root": (16, ()),
    "rlimit": (17, (("resource", "n"), ("soft", "n"), ("hard", "n"))),
    "oom_score": (18, (("score_plus_1000", "n"),)),
    "enter_userns": (19, ()),
    "sysctl": (20, (("name", "s"), ("value", "s"))),
    # how: 1 replaces what is there; the owner's uid inside stands from bit 8 on
    "file": (21, (("path", "s"), ("content", "b"), ("mode", "n"), ("how", "n"))),
    "remount": (22, (("path", "s"), ("attributes", "n"))),
    "landlock": (23, (("handled_fs", "n"), ("handled_net", "n"), ("scopes", "n"))),
    "landlock_path": (24, (("path", "s"), ("allowed", "n"))),
    "landlock_self": (25, ()),
    "no_new_privs": (26, ()),
    "caps": (27, (("init", "n"), ("execs", "n"))),
    "seccomp": (28, (("program", "b"),)),
    "pin": (29, (("path", "s"),)),
    "serve": (30, (("listen", "f"), ("cgroup", "f"), ("flags", "n"), ("log_bytes", "n"), ("oom", "f"))),
    "disk_upper": (31, (("layer", "f"),)),
    "nice": (32, (("nice_plus_20", "n"),)),
}

_TOLD_APART: Final = frozenset({"mount", "mask", "readonly", "pin", "file", "sysctl"})
_IN_HEX: Final = frozenset({"attributes", "flags", "init", "execs", "handled_fs"})


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. Descriptor fields hold the name of a descriptor ("" for none); `secret` blobs are never shown."""

    name: str
    values: tuple[Value, ...] = ()
    secret: bool = False

    def to_json(self) -> dict[str, Any]:
        """The printable form; blobs by size and digest only."""
        _, fields = OPERATIONS[self.name]
        shown: dict[str, Any] = {"op": self.name}
        for (field, kind), value in zip(fields, self.values, strict=True):
            if isinstance(value, bytes):
                digest = "" if self.secret else hashlib.sha256(value).hexdigest()
                shown[field] = {"bytes": len(value)} | ({"sha256": digest} if digest else {})
            elif kind == "s" and isinstance(value, str):
                shown[field] = value.replace(OPTION_SEPARATOR, ",")
            elif isinstance(value, int) and (field == "mode" or field in _IN_HEX):
                shown[field] = oct(value) if field == "mode" else hex(value)
            else:
                shown[field] = value
        return shown

    @property
    def step(self) -> str:
        """What this operation is called in timings and errors."""
        subject = next((value for value in self.values if isinstance(value, str) and value), "")
        return (
            f"{self.name} {subject}"
            if self.name in ("mount", "mask", "readonly", "pin", "file", "sysctl")
            else self.name
        )


def pack_op(op: Op, fd_index: Mapping[str, int]) -> bytes:
    """The binary of one operation; descriptors become their index in the request."""
    code, fields = OPERATIONS[op.name]
    parts: list[bytes] = []
    for (_, kind), value in zip(fields, op.values, strict=True):
        if kind == "f":
            parts.append(NUMBER.pack(KIND_NUMBER, 8, fd_index[str(value)] if value else NO_FD))
        elif kind == "n":
            parts.append(NUMBER.pack(KIND_NUMBER, 8, value))
        elif isinstance(value, str):
            raw = value.encode("utf-8", "surrogateescape") + b"\0"
            parts.append(FIELD.pack(KIND_STRING, len(raw)) + raw + b"\0" * (-len(raw) % 8))
        else:
            raw = bytes(value) if not isinstance(value, int) else b""
            parts.append(FIELD.pack(KIND_BLOB, len(raw)) + raw + b"\0" * (-len(raw) % 8))
    body = b"".join(parts)
    return OP.pack(code, len(fields), len(body)) + body


def pack_ops(ops: Iterable[Op], fd_index: Mapping[str, int]) -> bytes:
    """The operations one after another, without a header: what can be kept for sandboxes of one policy."""
    return b"".join(pack_op(op, fd_index) for op in ops)


def pack_plan(count: int, packed: Sequence[bytes]) -> bytes:
    """Header, operations and a zeroed report: the whole memfd."""
    body = b"".join(packed)
    report_offset = HEADER.size + len(body)
    return HEADER.pack(PLAN_MAGIC, PLAN_VERSION, count, len(body), report_offset) + body + bytes(REPORT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the launcher wrote back: operations done, errno and detail of the one that failed (0: none), end times."""

    done: int
    error: int
    detail: str
    ends_us: tuple[int, ...]


def unpack_report(raw: bytes, count: int) -> Report:
    """Read struct report; `count` is the number of operations of the plan."""
    done, error, detail = REPORT_HEAD.unpack_from(raw)
    ends = struct.unpack_from(f"<{count}I", raw, REPORT_HEAD.size)
    return Report(
        done=min(done, count), error=error, detail=detail.partition(b"\0")[0].decode("utf-8", "replace"), ends_us=ends
    )
