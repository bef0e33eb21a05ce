"""Files that survive a crash at any instant: write-rename-fsync, advisory locks with deadlines, scratch directories."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.mountinfo import read_mounts
from dsec_imagefs.syscalls import MNT_DETACH, umount

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK_DEADLINE_S = 120.0
_POLL_S = 0.02


def sync_directory(path: Path) -> None:
    """Make renames and unlinks in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file: readers see the old or the new content, never a part."""
    temp = path.with_name(f".{secrets.token_hex(8)}.tmp")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        temp.rename(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextmanager
def locked(path: Path, *, timeout_s: float = LOCK_DEADLINE_S) -> Iterator[None]:
    """Hold a file's lock (flock(2)) against other threads and processes; the kernel frees it when we die.

    Raises:
        ImageError: ``busy`` when it is not free within the time.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        while not try_lock(fd):
            if time.monotonic() > deadline:
                raise ImageError("busy", f"{path} is held by another process for {timeout_s:.0f} s", "try again later")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Take an exclusive lock if nobody else has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(here: Path) -> None:
    """Remove a scratch directory; memory file systems mounted in it are dropped whole, never walked."""
    for one in reversed(read_mounts()):
        if one.target.startswith(f"{here}/"):
            umount(Path(one.target), MNT_DETACH)
    shutil.rmtree(here, ignore_errors=True)


class Scratch:
    """The store's ``tmp``: one directory an import, each with a lock held as long as its owner lives."""

    def __init__(self, path: Path, gate: Path) -> None:
        self._path = path
        self._gate = gate  # creation and sweeping exclude each other, else a new directory could look abandoned

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """Make a directory, and remove it with all below at the end, also on errors."""
        here = self._path / secrets.token_hex(8)
        with locked(self._gate):
            here.mkdir(mode=0o700)
            fd = os.open(here / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try_lock(fd)
        try:
            yield here
        finally:
            _remove(here)
            os.close(fd)

    def sweep(self) -> int:
        """Remove what dead owners left; returns how many directories."""
        removed = 0
        with locked(self._gate):
            for here in list(self._path.iterdir()):
                if here.is_dir() and not here.is_symlink():
                    fd = os.open(here / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    try:
                        if not try_lock(fd):
                            continue
                        _remove(here)
                    finally:
                        os.close(fd)
                else:
                    here.unlink(missing_ok=True)
                removed += 1
        return removed
