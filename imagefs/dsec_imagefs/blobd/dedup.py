"""Blocks that another blob has already: shared on disk where the file system can (FICLONERANGE), else copied."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import threading
from struct import Struct
from typing import TYPE_CHECKING

from dsec_imagefs.blobd.block_map import TRUSTED

if TYPE_CHECKING:
    from dsec_imagefs.blobd.cached import CachedBlob

FICLONERANGE = 0x4020940D  # ioctl_ficlonerange(2)
_RANGE = Struct("=qQQQ")  # src_fd, src_offset, src_length, dest_offset
_CANNOT = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.ENOSYS)
Place = tuple["CachedBlob", int]


class BlockPlaces:
    """Digest of a block -> one place that had it. A hint: the bytes are hashed before they are used."""

    def __init__(self) -> None:
        self._places: dict[bytes, Place] = {}
        self._lock = threading.Lock()
        self.can_reflink = True  # until the file system says no

    def note(self, blob: CachedBlob, number: int) -> None:
        """A block is present now."""
        self._places.setdefault(blob.index.digest(number), (blob, number))

    def forget_blob(self, blob: CachedBlob) -> None:
        """Its file is about to be closed."""
        with self._lock:
            for digest in [key for key, place in list(self._places.items()) if place[0] is blob]:
                del self._places[digest]

    def find(self, blob: CachedBlob, number: int) -> tuple[bytes, Place] | None:
        """The right bytes of a block from elsewhere, and where they are; None when nowhere."""
        digest = blob.index.digest(number)
        place = self._places.get(digest)
        if place is None or (place[0] is blob and place[1] == number):
            return None
        other, at = place
        try:
            data = other.read(at) if other.states[at] == TRUSTED else b""
        except OSError:
            data = b""
        if len(data) == blob.index.raw_length(number) and hashlib.sha256(data).digest() == digest:
            return data, place
        with self._lock:
            if self._places.get(digest) == place:
                del self._places[digest]
        return None

    def reflink(self, source: Place, blob: CachedBlob, number: int) -> int | None:
        """Share the disk blocks and take them; returns as `CachedBlob.store`, None where that can't be."""
        if not self.can_reflink:
            return None
        other, at = source
        length = blob.index.raw_length(number)
        request = _RANGE.pack(other.fd, at << other.shift, length, number << blob.shift)
        try:
            fcntl.ioctl(blob.fd, FICLONERANGE, request)
        except OSError as err:
            if err.errno in _CANNOT:
                self.can_reflink = False
            return None  # a full disk, or a source that was just evicted: the bytes are at hand
        return blob.note_shared(number)
