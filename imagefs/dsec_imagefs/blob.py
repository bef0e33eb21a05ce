"""A run of bytes in an open file: a layer inside an archive, an unpacked layer in scratch space, a file in a layer."""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from dsec_imagefs.tree import ContentReader, Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """`size` bytes of `fd` from `base` on; whoever made the blob keeps the descriptor open. `name` is for messages."""

    fd: int
    size: int
    name: str
    base: int = 0

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes, fewer only at the blob's end."""
        length = min(length, self.size - offset)
        if length <= 0:
            return b""
        data = os.pread(self.fd, length, self.base + offset)
        while len(data) < length:
            more = os.pread(self.fd, length - len(data), self.base + offset + len(data))
            if not more:
                raise ImageError("bad_image", f"{self.name} is shorter than its announced {self.size} bytes")
            data += more
        return data

    def window(self, offset: int, size: int, name: str) -> Blob:
        """A part of the blob as a blob of its own."""
        return Blob(fd=self.fd, size=size, name=name, base=self.base + offset)


@dataclass(frozen=True, slots=True)
class FdReader:
    """Reads a descriptor by position; `base` is where the file starts in it."""

    fd: int
    name: str
    base: int = 0
    owned: bool = field(default=False, kw_only=True)

    def readinto(self, view: memoryview, offset: int) -> None:
        """Fill the view; raises ImageError ``bad_source`` when the source ends first."""
        at = self.base + offset
        while view:
            count = os.preadv(self.fd, [view], at)
            if not count:
                raise ImageError("bad_source", f"{self.name} ended {len(view)} bytes early", "is it being written to?")
            at += count
            view = view[count:]

    def close(self) -> None:
        """Close the descriptor if it is ours."""
        if self.owned:
            os.close(self.fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobContent:
    """A regular file whose data lies in a blob: in one piece, or (with `extents`) only its data runs, end to end."""

    blob: Blob
    offset: int
    size: int
    extents: tuple[Extent, ...] | None = None

    def open(self) -> ContentReader:
        """Read through the blob's descriptor."""
        packed = FdReader(self.blob.fd, self.blob.name, self.blob.base + self.offset)
        if self.extents is None:
            return packed
        starts = tuple(start for start, _ in self.extents)
        stored = tuple(accumulate((length for _, length in self.extents), initial=0))
        return _SparseReader(packed, self.extents, starts, stored)


@dataclass(frozen=True, slots=True)
class _SparseReader:
    packed: FdReader
    extents: tuple[Extent, ...]
    starts: tuple[int, ...]
    stored: tuple[int, ...]

    def readinto(self, view: memoryview, offset: int) -> None:
        view[:] = bytes(len(view))
        end = offset + len(view)
        # A map may have a million runs and a file thousands of buffers: find the first run, don't walk to it.
        index = max(0, bisect_right(self.starts, offset) - 1)
        while index < len(self.starts) and self.starts[index] < end:
            start, length = self.extents[index]
            low, high = max(start, offset), min(start + length, end)
            if low < high:
                self.packed.readinto(view[low - offset : high - offset], self.stored[index] + low - start)
            index += 1

    def close(self) -> None:
        """The blob keeps its descriptor."""
