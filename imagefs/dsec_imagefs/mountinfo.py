"""Read /proc/self/mountinfo (proc(5)): the only truth about what is mounted, whoever mounted it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line, unescaped. `shared` tells whether mounts below it propagate."""

    target: str
    root: str
    fs_type: str
    source: str
    shared: bool


def _unescape(raw: bytes) -> str:
    return _OCTAL.sub(lambda m: bytes([int(m[1], 8)]), raw).decode("utf-8", "surrogateescape")


def parse_mountinfo(raw: bytes) -> list[Mount]:
    """Parse the file's text; later lines are mounted later, so over earlier ones."""
    found = []
    for line in raw.splitlines():
        left, _, right = line.partition(b" - ")
        head, tail = left.split(b" "), right.split(b" ")
        if len(head) < 6 or len(tail) < 2:
            continue
        found.append(
            Mount(
                target=_unescape(head[4]),
                root=_unescape(head[3]),
                fs_type=tail[0].decode(),
                source=_unescape(tail[1]),
                shared=any(tag.startswith(b"shared:") for tag in head[6:]),
            )
        )
    return found


def read_mounts() -> list[Mount]:
    """The mounts of our own mount namespace."""
    return parse_mountinfo(Path("/proc/self/mountinfo").read_bytes())


def backing_file(mount: Mount) -> str:
    """The file behind a mount: its source, or the file behind its loop device."""
    if mount.source.startswith("/dev/loop"):
        try:
            text = Path(f"/sys/block/{mount.source.removeprefix('/dev/')}/loop/backing_file").read_text().rstrip("\n")
        except OSError:
            return mount.source
        return text.removesuffix(" (deleted)")
    return mount.source
