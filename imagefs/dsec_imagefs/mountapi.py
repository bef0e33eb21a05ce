"""Mount by file-system context: fsopen(2), fsconfig(2), fsmount(2), move_mount(2), Linux 5.2.

mount(2) takes its options in one page, which about a hundred `device=` paths fill; fsconfig takes them one by one.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from dsec_imagefs.errors import SyscallError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

# include/uapi/asm-generic/unistd.h: the same numbers on every architecture.
_SYS_MOVE_MOUNT = 429
_SYS_FSOPEN = 430
_SYS_FSCONFIG = 431
_SYS_FSMOUNT = 432

FSOPEN_CLOEXEC = 1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
FSMOUNT_CLOEXEC = 1
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOVE_MOUNT_F_EMPTY_PATH = 0x4
_AT_FDCWD = -100

_MAX_VALUE_BYTES = 255  # fs/fsopen.c copies a string value with strndup_user(..., 256)
_MAX_LOG_BYTES = 8192


def mount_erofs(source: str, target: Path, *, devices: Sequence[str] = (), flags: int) -> None:
    """Attach an EROFS image.

    Args:
        source: the metadata image: a file (Linux 6.12) or a block device.
        target: an empty directory.
        devices: the extra devices in the order of the image's device table; as many as the kernel's memory takes.
        flags: ``MOUNT_ATTR_*``.

    Raises:
        SyscallError: with the kernel's own words about it where it has any; ENOTBLK means files can't be mounted.
    """
    with ExitStack() as stack:
        context = _checked(_libc.syscall(_SYS_FSOPEN, b"erofs", FSOPEN_CLOEXEC), "fsopen", "erofs")
        stack.callback(os.close, context)
        _configure(context, FSCONFIG_SET_FLAG, "ro", None, source)
        _configure(context, FSCONFIG_SET_STRING, "source", _short(source, stack), source)
        for device in devices:
            _configure(context, FSCONFIG_SET_STRING, "device", _short(device, stack), device)
        _configure(context, FSCONFIG_CMD_CREATE, None, None, source)
        mount = _libc.syscall(_SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, flags)
        stack.callback(os.close, _checked(mount, "fsmount", source))
        moved = _libc.syscall(
            _SYS_MOVE_MOUNT, mount, b"", _AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH
        )  # fmt: skip
        _checked(moved, "move_mount", str(target))


def _configure(context: int, command: int, key: str | None, value: str | None, about: str) -> None:
    name = key.encode() if key is not None else None
    text = os.fsencode(value) if value is not None else None
    if _libc.syscall(_SYS_FSCONFIG, context, command, name, text, 0):
        number = ctypes.get_errno()
        what = f"fsconfig {key}" if key is not None else "fsconfig create"
        raise SyscallError(what, number, value or about, _log_of(context))


def _log_of(context: int) -> str:
    """What the kernel says about the failure (``e erofs: ...`` lines of the context's descriptor), or ""."""
    lines = []
    try:
        while line := os.read(context, _MAX_LOG_BYTES):
            lines.append(line.decode(errors="replace").strip())
    except OSError as err:
        if err.errno not in (errno.ENODATA, errno.EMSGSIZE):
            raise
    return "; ".join(lines)


def _short(path: str, stack: ExitStack) -> str:
    """The path, or one through our own descriptor when it is longer than fsconfig takes."""
    if len(os.fsencode(path)) <= _MAX_VALUE_BYTES:
        return path
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as err:
        raise SyscallError("open", err.errno or 0, path) from err
    stack.callback(os.close, fd)
    return f"/proc/self/fd/{fd}"


def _checked(result: int, call: str, path: str) -> int:
    if result < 0:
        raise SyscallError(call, ctypes.get_errno(), path)
    return int(result)
