"""uid ranges: which 64 Ki ids of the host a sandbox's users are, and mounts whose owners are shifted into them.

A range is given to one sandbox at a time; the allocator is pure and is refilled from the handles after a restart.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from libdsec.errors import CapacityError, UsageError

from nomad_dsec.linux.syscalls import (
    AT_FDCWD,
    AT_RECURSIVE,
    CLONE_NEWUSER,
    MOUNT_ATTR_IDMAP,
    MOUNT_ATTR_RDONLY,
    OPEN_TREE_CLONE,
    SyscallError,
    mount_setattr,
    open_tree,
    unshare,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

RANGE_SIZE: Final = 65_536
DEFAULT_BASE: Final = 0x1000_0000  # far above people's and subuid's ids (/etc/subuid ends below 2^28 on common systems)
DEFAULT_COUNT: Final = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class UidRange:
    """Ids 0..65535 inside are `base`..`base + 65535` on the host, for users and groups alike."""

    base: int
    size: int = RANGE_SIZE

    @property
    def uid_map(self) -> str:
        """One line for /proc/PID/uid_map and gid_map (user_namespaces(7))."""
        return f"0 {self.base} {self.size}\n"


class UidRanges:
    """Gives out ranges, longest unused first, so that a file left behind by mistake long meets no new owner."""

    def __init__(self, *, base: int = DEFAULT_BASE, count: int = DEFAULT_COUNT, used: Iterable[int] = ()) -> None:
        if base < RANGE_SIZE or count < 1 or base + count * RANGE_SIZE > 0xFFFF_0000:
            raise UsageError(
                "bad_uid_base",
                f"uid base {base} with {count} ranges of {RANGE_SIZE} does not fit",
                field="uid_base",
                hint=f"start at {RANGE_SIZE} or above, and end below 4294901760",
            )
        self._base = base
        self._count = count
        self._used = set(used)
        self._free = deque(
            start for start in range(base, base + count * RANGE_SIZE, RANGE_SIZE) if start not in self._used
        )

    @property
    def free(self) -> int:
        """Ranges left."""
        return len(self._free)

    def take(self) -> UidRange:
        """A range that nobody has. CapacityError uid_ranges when all are out."""
        if not self._free:
            raise CapacityError(
                "uid_ranges",
                f"all {self._count} uid ranges are in use",
                hint="raise uid_ranges in the node's configuration",
            )
        start = self._free.popleft()
        self._used.add(start)
        return UidRange(base=start)

    def claim(self, base: int) -> UidRange:
        """Mark the range of a recovered handle as used. UsageError when another sandbox has it already."""
        if base in self._used:
            raise UsageError("uid_range_taken", f"uid range {base} has an owner already", field="uid_base")
        if base in self._free:
            self._free.remove(base)
        self._used.add(base)
        return UidRange(base=base)

    def release(self, taken: UidRange) -> None:
        """Give it back once nothing of the sandbox lives. Idempotent; a range outside this pool is just forgotten."""
        if taken.base not in self._used:
            return
        self._used.discard(taken.base)
        if 0 <= taken.base - self._base < self._count * RANGE_SIZE:
            self._free.append(taken.base)


def open_userns(id_map: str) -> int:
    """An fd of a fresh user namespace with these lines of uid_map for both kinds of ids (user_namespaces(7)).

    A child makes it, is mapped by us and ends: the fd alone keeps the namespace. SyscallError says what failed.
    """
    ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
    go_r, go_w = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:  # only async-signal-safe work between here and _exit
        try:
            unshare(CLONE_NEWUSER)
            os.write(ready_w, b"\0")
            os.close(go_w)
            os.read(go_r, 1)
        except SyscallError as error:
            os.write(ready_w, bytes([error.errno or errno.EPERM]))
        finally:
            os._exit(0)
    try:
        os.close(ready_w)
        os.close(go_r)
        answer = os.read(ready_r, 1)
        if answer != b"\0":
            raise SyscallError(answer[0] if answer else errno.ECHILD, "unshare", "CLONE_NEWUSER")
        Path(f"/proc/{child}/setgroups").write_text("allow", encoding="ascii")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{name}").write_text(id_map, encoding="ascii")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_r)
        os.close(go_w)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def clone_idmapped(source: str, userns_fd: int, *, read_only: bool = False, recursive: bool = False) -> int:
    """A detached copy of the mount at `source` whose owners are mapped through the namespace; move_mount attaches it.

    open_tree(2) + mount_setattr(2) MOUNT_ATTR_IDMAP, 5.12; EROFS takes it since 5.19, overlay as a lower since 5.19.
    The caller closes the fd. SyscallError EINVAL: the file system does not support it.
    """
    flags = OPEN_TREE_CLONE | (AT_RECURSIVE if recursive else 0)
    fd = open_tree(source, flags, dirfd=AT_FDCWD)
    try:
        mount_setattr(
            fd,
            set_attrs=MOUNT_ATTR_IDMAP | (MOUNT_ATTR_RDONLY if read_only else 0),
            userns_fd=userns_fd,
            recursive=recursive,
            subject=source,
        )
    except BaseException:
        os.close(fd)
        raise
    return fd
