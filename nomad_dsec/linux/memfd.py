"""Files that exist only as a descriptor (memfd_create(2), 3.17)."""

from __future__ import annotations

import errno
import fcntl
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from contextlib import ExitStack

_MFD_EXEC: Final = 0x10  # linux/memfd.h, 6.3, for vm.memfd_noexec=1; older kernels refuse the flag and need none


def make_memfd(name: str, content: bytes, opened: ExitStack, *, sealed: bool = False) -> int:
    """A close-on-exec fd of a memory file with this content, closed by `opened`.

    sealed: nobody can change it any more, so a program that runs from it can't be overwritten through /proc/PID/exe.
    """
    flags = os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealed else 0)
    try:
        fd = os.memfd_create(name, flags | (_MFD_EXEC if sealed else 0))
    except OSError as error:
        if not sealed or error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)
    opened.callback(os.close, fd)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    if sealed:
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
