"""A file on its way: under its name when all of it is on disk, or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from typing import TYPE_CHECKING

from dsec_imagefs.durable import sync_directory
from dsec_imagefs.errors import failed_write

if TYPE_CHECKING:
    from pathlib import Path

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


class Arrival:
    """A context: leaving it well makes the file appear, an error leaves nothing.

    Until then the file has no name (O_TMPFILE, open(2)): SIGKILL leaves nothing of it, and no collector of leftovers
    can take it away. File systems without that (NFS, old overlayfs) get a name ``.….tmp`` in the same directory.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._temp: Path | None = None
        self.fd = -1

    def __enter__(self) -> Arrival:
        try:
            self.fd = os.open(self._target.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            self._temp = self._target.with_name(f".{self._target.name[:16]}.{secrets.token_hex(8)}.tmp")
            self.fd = os.open(self._temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return self

    def write(self, data: bytes) -> None:
        """Append; raises ImageError ``no_space``."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.fd, view) :]
        except OSError as error:
            raise failed_write(error, str(self._target)) from error

    def write_at(self, data: bytes, offset: int) -> None:
        """Write somewhere, also from several threads; raises ImageError ``no_space``."""
        view = memoryview(data)
        try:
            while view:
                done = os.pwrite(self.fd, view, offset)
                view, offset = view[done:], offset + done
        except OSError as error:
            raise failed_write(error, str(self._target)) from error

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                os.fsync(self.fd)
                self._appear()
        finally:
            os.close(self.fd)
            if self._temp is not None:
                self._temp.unlink(missing_ok=True)
        if kind is None:
            sync_directory(self._target.parent)

    def _appear(self) -> None:
        if self._temp is not None:
            self._temp.rename(self._target)
            return
        try:
            # A directory descriptor is not needed for an absolute path; with one Python calls linkat(2), which follows.
            os.link(f"/proc/self/fd/{self.fd}", self._target, src_dir_fd=self.fd, follow_symlinks=True)
        except FileExistsError:
            pass  # another thread or process was first, with the same bytes: names here are digests
