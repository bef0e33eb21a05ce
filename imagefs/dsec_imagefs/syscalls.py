"""The kernel calls that Python lacks, by ctypes; each names its man page, and errors carry call, errno and path."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import TYPE_CHECKING

from dsec_imagefs.errors import SyscallError

if TYPE_CHECKING:
    from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOATIME = 0x400
MS_BIND = 0x1000
MS_PRIVATE = 1 << 18
MNT_DETACH = 0x2

_SYNC_FILE_RANGE_WRITE = 2
_SYS_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_OPEN_HOW = struct.Struct("=QQQ")  # struct open_how


def openat2_beneath(dir_fd: int, path: bytes) -> int:
    """Open a file for reading below a directory, through no link of any kind: openat2(2), Linux 5.6."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    how = _OPEN_HOW.pack(flags, 0, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)
    fd = _libc.syscall(_SYS_OPENAT2, dir_fd, path, how, len(how))
    if fd < 0:
        raise SyscallError("openat2", ctypes.get_errno(), os.fsdecode(path))
    return int(fd)


def start_writeback(fd: int) -> None:
    """Let the disk begin with all that was written to a file, without waiting: sync_file_range(2). Only a hint."""
    _libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


def mount_fs(source: str, target: Path, fs_type: str | None, flags: int, options: str = "") -> None:
    """Attach a file system: mount(8) of util-linux 2.38 would put a loop device before a file unasked."""
    kind = fs_type.encode() if fs_type is not None else None
    data = options.encode() if options else None
    if _libc.mount(os.fsencode(source), os.fsencode(target), kind, ctypes.c_ulong(flags), data):
        raise SyscallError("mount", ctypes.get_errno(), f"{source} on {target}")


def umount(target: Path, flags: int = 0) -> None:
    """umount2(2)."""
    if _libc.umount2(os.fsencode(target), flags):
        raise SyscallError("umount2", ctypes.get_errno(), str(target))
