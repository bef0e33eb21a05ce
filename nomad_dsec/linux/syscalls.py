"""System calls that Python's os module lacks, errno-checked; each names its man page and the first kernel that has it.

Failures are `SyscallError`: an OSError that also says which call failed on what. Nothing here waits or keeps state.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

# linux/mount.h, asm-generic/fcntl.h, linux/openat2.h, linux/sched.h
MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_REMOUNT: Final = 0x20
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
MNT_DETACH: Final = 0x2
UMOUNT_NOFOLLOW: Final = 0x8

OPEN_TREE_CLONE: Final = 0x1
OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH: Final = 0x4
MOVE_MOUNT_T_EMPTY_PATH: Final = 0x40
MOUNT_ATTR_RDONLY: Final = 0x1
MOUNT_ATTR_NOSUID: Final = 0x2
MOUNT_ATTR_NODEV: Final = 0x4
MOUNT_ATTR_NOEXEC: Final = 0x8
MOUNT_ATTR_IDMAP: Final = 0x100000
MOUNT_ATTR_SIZE_VER0: Final = 32

AT_FDCWD: Final = -100
AT_EMPTY_PATH: Final = 0x1000
AT_RECURSIVE: Final = 0x8000

RESOLVE_NO_XDEV: Final = 0x01
RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08
RESOLVE_IN_ROOT: Final = 0x10
OPEN_HOW_SIZE_VER0: Final = 24

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

# Numbers shared by x86_64 and the asm-generic table (all calls since 5.1 have one number on every architecture).
_SYS_PIDFD_SEND_SIGNAL: Final = 424
_SYS_OPEN_TREE: Final = 428
_SYS_MOVE_MOUNT: Final = 429
_SYS_OPENAT2: Final = 437
_SYS_MOUNT_SETATTR: Final = 442

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class SyscallError(OSError):
    """An OSError that names its system call and what it was applied to."""

    def __init__(self, number: int, syscall: str, subject: str) -> None:
        super().__init__(number, f"{syscall}: {os.strerror(number)}", subject)
        self.syscall = syscall
        self.subject = subject


def _checked(result: int, syscall: str, subject: str) -> int:
    if result < 0:
        raise SyscallError(ctypes.get_errno(), syscall, subject)
    return result


def _bytes_or_null(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def mount(source: str | None, target: str, fstype: str | None, flags: int = 0, data: str | None = None) -> None:
    """Man 2 mount. Raises SyscallError on `target`."""
    result = _libc.mount(
        _bytes_or_null(source),
        os.fsencode(target),
        _bytes_or_null(fstype),
        ctypes.c_ulong(flags),
        _bytes_or_null(data),
    )
    _checked(result, "mount", target)


def umount2(target: str, flags: int = 0) -> None:
    """Man 2 umount2. Raises SyscallError on `target`."""
    _checked(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)), "umount2", target)


def open_tree(path: str, flags: int, *, dirfd: int = AT_FDCWD) -> int:
    """Man 2 open_tree, 5.2: a mount object as an fd; with OPEN_TREE_CLONE a detached copy of it."""
    result = _libc.syscall(
        ctypes.c_long(_SYS_OPEN_TREE), ctypes.c_int(dirfd), os.fsencode(path), ctypes.c_uint(flags | OPEN_TREE_CLOEXEC)
    )
    return _checked(result, "open_tree", path)


def move_mount(from_fd: int, target: str | int) -> None:
    """Man 2 move_mount, 5.2: attach the detached mount `from_fd` at `target`, a path or an open file or directory."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | (MOVE_MOUNT_T_EMPTY_PATH if isinstance(target, int) else 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOVE_MOUNT),
        ctypes.c_int(from_fd),
        b"",
        ctypes.c_int(target if isinstance(target, int) else AT_FDCWD),
        b"" if isinstance(target, int) else os.fsencode(target),
        ctypes.c_uint(flags),
    )
    _checked(result, "move_mount", str(target))


def mount_setattr(
    mount_fd: int,
    *,
    set_attrs: int = 0,
    clear_attrs: int = 0,
    propagation: int = 0,
    userns_fd: int = 0,
    recursive: bool = False,
    subject: str = "",
) -> None:
    """Man 2 mount_setattr, 5.12, on an open mount; MOUNT_ATTR_IDMAP maps its owners through `userns_fd`."""
    attr = struct.pack("<QQQQ", set_attrs, clear_attrs, propagation, userns_fd)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(mount_fd),
        b"",
        ctypes.c_uint(flags),
        attr,
        ctypes.c_size_t(MOUNT_ATTR_SIZE_VER0),
    )
    _checked(result, "mount_setattr", subject or f"fd {mount_fd}")


def setns(fd: int, nstype: int) -> None:
    """Man 2 setns, 3.0: move the calling thread into the namespace of `fd`."""
    _checked(_libc.setns(ctypes.c_int(fd), ctypes.c_int(nstype)), "setns", f"fd {fd}")


def unshare(flags: int) -> None:
    """Man 2 unshare: give the calling thread new namespaces."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare", hex(flags))


def openat2(dirfd: int, path: str | bytes, flags: int, *, mode: int = 0, resolve: int) -> int:
    """Man 2 openat2, 5.6: open with the kernel keeping the path inside the limits of `resolve`."""
    how = struct.pack("<QQQ", flags | os.O_CLOEXEC, mode, resolve)
    result = _libc.syscall(
        ctypes.c_long(_SYS_OPENAT2),
        ctypes.c_int(dirfd),
        os.fsencode(path),
        how,
        ctypes.c_size_t(OPEN_HOW_SIZE_VER0),
    )
    return _checked(result, "openat2", os.fsdecode(path))


def pidfd_send_signal(pidfd: int, signum: int) -> None:
    """Man 2 pidfd_send_signal, 5.1: a signal that can't reach a recycled pid."""
    result = _libc.syscall(
        ctypes.c_long(_SYS_PIDFD_SEND_SIGNAL), ctypes.c_int(pidfd), ctypes.c_int(signum), None, ctypes.c_uint(0)
    )
    _checked(result, "pidfd_send_signal", f"pidfd {pidfd}")


def quotactl_fd(fd: int, command: int, quota_id: int, buffer: ctypes.Array[ctypes.c_char]) -> None:
    """Man 2 quotactl_fd, 5.14: a quota command on the file system that holds `fd`."""
    result = _libc.syscall(
        ctypes.c_long(443), ctypes.c_uint(fd), ctypes.c_uint(command), ctypes.c_uint(quota_id), buffer
    )
    _checked(result, "quotactl_fd", f"fd {fd} id {quota_id}")
