"""A file on its way: under its name when all of it is on disk, or not at all."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from dsec_imagefs.durable import sync_directory
from dsec_imagefs.errors import failed_write

if TYPE_CHECKING:
    from pathlib import Path


class Arrival:
    """A context: leaving it well makes the file appear, an error leaves nothing."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._temp = target.with_name(f".{target.name[:16]}.{secrets.token_hex(8)}.tmp")
        self.fd = -1

    def __enter__(self) -> Arrival:
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
                self._temp.rename(self._target)
        finally:
            os.close(self.fd)
            self._temp.unlink(missing_ok=True)
        if kind is None:
            sync_directory(self._target.parent)
