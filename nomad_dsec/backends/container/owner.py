"""Whose the secrets of a sandbox are: the uid of its user, by the image's own /etc/passwd where it is a name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from nomad_dsec.backends.container.spec import UID_RANGE
from nomad_dsec.linux.syscalls import RESOLVE_IN_ROOT, RESOLVE_NO_MAGICLINKS, SyscallError, openat2

if TYPE_CHECKING:
    from pathlib import Path

PASSWD_BYTES: Final = 1024 * 1024


def owner_uid(rootfs: Path, user: str) -> int:
    """The uid inside of `user` ("1000", "name", "name:group"); 0 for one that the image does not know.

    rootfs: where the image is mounted on the host; its links are resolved below it.
    """
    name = user.partition(":")[0] or "0"
    if name.isascii() and name.isdigit():
        uid = int(name)
        return uid if uid < UID_RANGE else 0
    return 0 if name == "root" else find_uid(_passwd(rootfs), name)


def find_uid(passwd: bytes, name: str) -> int:
    """Of passwd(5); the first line counts, and 0 stands for none."""
    wanted = name.encode("utf-8", "surrogateescape")
    for line in passwd.split(b"\n"):
        fields = line.split(b":")
        if len(fields) == 7 and fields[0] == wanted and fields[2].isdigit():
            uid = int(fields[2])
            return uid if uid < UID_RANGE else 0
    return 0


def _passwd(rootfs: Path) -> bytes:
    try:
        root = os.open(rootfs, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
            fd = openat2(root, "etc/passwd", flags, resolve=RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
        finally:
            os.close(root)
        with os.fdopen(fd, "rb") as file:
            return file.read(PASSWD_BYTES)
    except (OSError, SyscallError):
        return b""
