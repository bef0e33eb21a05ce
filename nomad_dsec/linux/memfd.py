"""Files that exist only as a descriptor (memfd_create(2), 3.17)."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import ExitStack


def make_memfd(name: str, content: bytes, opened: ExitStack, *, sealed: bool = False) -> int:
    """A close-on-exec fd of a memory file with this content, closed by `opened`.

    sealed: nobody can change it any more, so a program that runs from it can't be overwritten through /proc/PID/exe.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealed else 0))
    opened.callback(os.close, fd)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    if sealed:
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
