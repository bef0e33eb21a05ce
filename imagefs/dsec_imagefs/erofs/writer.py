"""Write a planned image to a file descriptor in one pass, hashing on the way, with bounded memory."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.erofs.ondisk import BLOCK
from dsec_imagefs.errors import ImageError, failed_write

if TYPE_CHECKING:
    from dsec_imagefs.erofs.layout import Layout
    from dsec_imagefs.tree import Progress

BUFFER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A finished image: its sha256 in hex, its length, and how many inodes it holds."""

    digest: str
    size_bytes: int
    inodes: int


def write_image(layout: Layout, fd: int, progress: Progress | None = None) -> Written:
    """Write the image at the descriptor's position.

    Memory: one buffer of 4 MiB; data goes source -> buffer -> hash and file, so the digest costs no second read.

    Raises:
        ImageError: ``bad_source`` when a file got shorter meanwhile, ``no_space`` on a full disk.
    """
    sink = _Sink(fd, layout.size_bytes, progress)
    sink.put(layout.metadata)
    for run in layout.runs:
        reader = run.content.open()
        try:
            done = 0
            while done < run.length:
                room = sink.room(run.length - done)
                reader.readinto(room, run.offset + done)
                done += len(room)
                sink.took(len(room))
        finally:
            reader.close()
        sink.pad()
    return Written(digest=sink.finish(), size_bytes=layout.size_bytes, inodes=layout.inodes)


class _Sink:
    """The buffer: files are gathered in it, so that many small ones make one write and one hash call."""

    def __init__(self, fd: int, total: int, progress: Progress | None) -> None:
        self._fd = fd
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._used = 0
        self._done = 0
        self._total = total
        self._hash = hashlib.sha256()
        self._progress = progress

    def put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            room = self.room(len(view))
            room[:] = view[: len(room)]
            self.took(len(room))
            view = view[len(room) :]

    def room(self, wanted: int) -> memoryview:
        if self._used == BUFFER_BYTES:
            self._flush()
        return self._buffer[self._used : self._used + wanted]

    def took(self, count: int) -> None:
        self._used += count

    def pad(self) -> None:
        # The buffer is a whole number of blocks and starts on one, so padding never has to flush.
        count = -self._used % BLOCK
        self._buffer[self._used : self._used + count] = bytes(count)
        self._used += count

    def finish(self) -> str:
        self._flush()
        if self._done != self._total:
            raise ImageError("corrupt", f"wrote {self._done} bytes of a planned {self._total}")
        return self._hash.hexdigest()

    def _flush(self) -> None:
        full = self._buffer[: self._used]
        self._hash.update(full)
        while full:
            try:
                full = full[os.write(self._fd, full) :]
            except OSError as err:
                raise failed_write(err, "writing the image") from err
        self._done += self._used
        self._used = 0
        if self._progress is not None:
            self._progress("write", self._done, self._total)
