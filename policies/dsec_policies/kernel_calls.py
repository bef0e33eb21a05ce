"""The few raw system calls that the probes make, by number through libc; an error carries the call's name."""

from __future__ import annotations

import ctypes
import os
import platform

from dsec_policies.seccomp import TABLES

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
MS_REC, MS_PRIVATE = 0x4000, 0x4_0000
PR_SET_NO_NEW_PRIVS = 38
AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: int | bytes | ctypes.Array[ctypes.c_char]) -> int:
    """Makes system call ``name``; raises OSError with its name, NotImplementedError on other architectures."""
    table = TABLES.get(platform.machine())
    if table is None:
        raise NotImplementedError(f"no system call table for {platform.machine()}")
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    result = int(_libc.syscall(ctypes.c_long(table[name]), *words))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def address_of(buffer: ctypes.Array[ctypes.c_char]) -> int:
    """Returns the address of a buffer, for structs that hold pointers."""
    return ctypes.addressof(buffer)


def unshare(flags: int) -> None:
    """Leaves shared parts of the process (unshare(2))."""
    call("unshare", flags)


def private_mounts() -> None:
    """Makes a mount namespace of this process's own that nothing spreads out of (mount_namespaces(7))."""
    unshare(CLONE_NEWNS)
    mount("none", "/", "none", MS_REC | MS_PRIVATE, "")


def mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    """Mounts a file system (mount(2))."""
    call("mount", source.encode(), target.encode(), kind.encode(), flags, data.encode())
