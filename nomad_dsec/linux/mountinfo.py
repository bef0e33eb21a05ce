"""/proc/PID/mountinfo as data (proc_pid_mountinfo(5)); pure but for `read_mounts`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mount. `options` are of this mount, `super_options` of its file system; `propagation` e.g. ("shared:2",)."""

    mount_id: int
    parent_id: int
    device: str
    root: str
    target: str
    options: tuple[str, ...]
    propagation: tuple[str, ...]
    fstype: str
    source: str
    super_options: tuple[str, ...]


def _unescape(field: bytes) -> str:
    return _OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field).decode("utf-8", "surrogateescape")


def parse_mountinfo(text: bytes) -> list[Mount]:
    """All mounts in the kernel's order (later ones cover earlier ones on the same target). ValueError on junk."""
    mounts = []
    for line in text.splitlines():
        fields = line.split(b" ")
        try:
            dash = fields.index(b"-", 6)
            fstype, source, super_options = fields[dash + 1 : dash + 4]
        except ValueError:
            raise ValueError(f"not a mountinfo line: {line!r}") from None
        mounts.append(
            Mount(
                mount_id=int(fields[0]),
                parent_id=int(fields[1]),
                device=fields[2].decode("ascii"),
                root=_unescape(fields[3]),
                target=_unescape(fields[4]),
                options=tuple(fields[5].decode().split(",")),
                propagation=tuple(field.decode() for field in fields[6:dash]),
                fstype=fstype.decode(),
                source=_unescape(source),
                super_options=tuple(_unescape(super_options).split(",")),
            )
        )
    return mounts


def read_mounts(pid: int | str = "self") -> list[Mount]:
    """The mounts that a process sees. FileNotFoundError when there is no such process."""
    return parse_mountinfo(Path(f"/proc/{pid}/mountinfo").read_bytes())


def mount_of(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount that holds the absolute, normalised `path`: the longest target, the latest of equals."""
    best: Mount | None = None
    for mount in mounts:
        inside = path == mount.target or path.startswith(mount.target.rstrip("/") + "/")
        if inside and (best is None or len(mount.target) >= len(best.target)):
            best = mount
    return best
