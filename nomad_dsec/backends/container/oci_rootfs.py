"""Work on a sandbox's root from outside, before its runtime starts: every path is resolved by the kernel below one fd.

Runs in the single-threaded process of oci_stage.py only; the native launcher does the same in C (guest/c/launch_*.c).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Final

from nomad_dsec.linux.syscalls import (
    AT_EMPTY_PATH,
    MOUNT_ATTR_RDONLY,
    OPEN_TREE_CLONE,
    RESOLVE_IN_ROOT,
    RESOLVE_NO_MAGICLINKS,
    RESOLVE_NO_SYMLINKS,
    SyscallError,
    mount_setattr,
    move_mount,
    open_tree,
    openat2,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

INSIDE: Final = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS
STRICT: Final = INSIDE | RESOLVE_NO_SYMLINKS
_MAX_STEPS: Final = 256
_STICKY_GROUP: Final = 0o1020


class Rootfs:
    """The root mount behind `fd`, whose inside root is host id `owner`."""

    def __init__(self, fd: int, owner: int) -> None:
        self._fd = fd
        self._owner = owner

    @contextlib.contextmanager
    def opened(self, path: str, flags: int, *, resolve: int = INSIDE) -> Iterator[int]:
        """openat2 below the root; OSError names the path."""
        fd = openat2(self._fd, path.lstrip("/") or ".", flags, resolve=resolve)
        try:
            yield fd
        finally:
            os.close(fd)

    def make_dirs(self, path: str) -> None:
        """Make what is missing of a directory path; links that lead to directories inside are followed."""
        done = ""
        for part in path.strip("/").split("/"):
            with self.opened(done, os.O_RDONLY | os.O_DIRECTORY) as parent:
                try:
                    os.mkdir(part, 0o755, dir_fd=parent)
                except FileExistsError:
                    pass
                else:
                    os.chown(part, self._owner, self._owner, dir_fd=parent, follow_symlinks=False)
            done += f"/{part}"

    def write_file(self, path: str, content: bytes, *, mode: int, uid: int = 0) -> None:
        """A file of this uid inside. A link, device or FIFO of the image in its place is replaced, never opened."""
        directory, _, name = path.rpartition("/")
        self.make_dirs(directory)
        with self.opened(directory, os.O_RDONLY | os.O_DIRECTORY) as parent:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=parent)
            try:
                os.fchown(fd, self._owner + uid, self._owner)
                os.fchmod(fd, mode)
                os.write(fd, content)
            finally:
                os.close(fd)

    def attach(self, tree_fd: int, target: str, *, is_file: bool, resolve: int = INSIDE) -> None:
        """Put a detached mount on `target`, which is made when it is missing."""
        if is_file:
            try:
                with self.opened(target, os.O_PATH):
                    pass
            except FileNotFoundError:
                self.write_file(target, b"", mode=0o644)
        else:
            self.make_dirs(target)
        with self.opened(target, os.O_PATH, resolve=resolve) as at:
            move_mount(tree_fd, at)

    def seal(self, path: str) -> None:
        """Make one path read-only by a bind of itself. FileNotFoundError when the image lacks it."""
        with self.opened(path, os.O_PATH) as at:
            tree = open_tree("", OPEN_TREE_CLONE | AT_EMPTY_PATH, dirfd=at)
            try:
                mount_setattr(tree, set_attrs=MOUNT_ATTR_RDONLY, subject=path)
                move_mount(tree, at)
            finally:
                os.close(tree)

    def pin(self, path: str) -> None:
        """Nobody inside may rename or remove a component of the path, links included; see op_pin in launch_files.c."""
        todo = [part for part in path.split("/") if part]
        done: list[str] = []
        for _ in range(_MAX_STEPS):
            if not todo:
                return
            part = todo.pop(0)
            if part == ".":
                continue
            if part == "..":
                del done[-1:]
                continue
            with self.opened("/".join(done), os.O_RDONLY | os.O_DIRECTORY, resolve=STRICT) as parent:
                self._pin_one(parent, part)
                try:
                    link = os.readlink(part, dir_fd=parent)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    done.append(part)
                    continue
            if link.startswith("/"):
                done = []
            todo = [piece for piece in link.split("/") if piece] + todo
        raise SyscallError(errno.ELOOP, "pin", path)

    def _pin_one(self, parent: int, name: str) -> None:
        # The entry and its directory belong to nobody that exists inside, the directory is sticky, and inside's root
        # keeps the right to make entries through its group.
        directory = os.fstat(parent)
        entry = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if directory.st_uid != 0:
            os.fchown(parent, 0, self._owner)
            os.fchmod(parent, _pinned_mode(directory.st_mode))
        if not stat.S_ISREG(entry.st_mode) and entry.st_uid != 0:
            os.chown(name, 0, self._owner, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(entry.st_mode):
                os.chmod(name, _pinned_mode(entry.st_mode), dir_fd=parent)


def _pinned_mode(mode: int) -> int:
    # The group stands for the owner that was: a directory of mode 0700 stays open to inside's root.
    return stat.S_IMODE(mode) | _STICKY_GROUP | (mode & 0o700) >> 3
