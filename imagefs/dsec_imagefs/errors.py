"""The one error of this package; the node daemon maps its codes to the wire."""

from __future__ import annotations

import errno as errnos
import os


class ImageError(Exception):
    """An image could not be imported, found, mounted or removed.

    Attributes:
        code: stable string: ``bad_source``, ``bad_image``, ``unsupported``, ``not_found``, ``ambiguous``,
            ``in_use``, ``conflict``, ``too_large``, ``no_space``, ``tool_missing``, ``tool_failed``, ``syscall``,
            ``corrupt``, ``busy``.
        message: one sentence for people.
        hint: what to do about it, or "".
        field: the caller's field at fault (``source``, ``name``, ``ref``), or "".
    """

    def __init__(self, code: str, message: str, hint: str = "", field: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.field = field

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class SyscallError(ImageError):
    """A kernel call failed; carries the call's name, its errno and the path it was about."""

    def __init__(self, syscall: str, errno: int, path: str, hint: str = "") -> None:
        super().__init__("syscall", f"{syscall}({path}) failed: {os.strerror(errno)} (errno {errno})", hint)
        self.syscall = syscall
        self.errno = errno
        self.path = path


def show_name(name: bytes) -> str:
    """Render a path of any bytes for a message."""
    return name.decode("utf-8", "backslashreplace")


def failed_write(err: OSError, what: str) -> ImageError:
    """The error for a write that failed: a full disk is told from a broken one."""
    if err.errno in (errnos.ENOSPC, errnos.EDQUOT):
        return ImageError("no_space", f"{what}: the disk is full", "free some disk, or run gc")
    return SyscallError("write", err.errno or 0, what)
