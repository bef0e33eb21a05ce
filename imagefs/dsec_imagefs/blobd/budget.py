"""The cache's bound in bytes, and whose blocks go first: second chance in order of arrival.

What the kernel may read by itself (complete blobs) is never among the victims.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from dsec_imagefs.blobd.block_map import ABSENT
from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from dsec_imagefs.blobd.cached import CachedBlob

SLACK_SHARE = 1 / 32  # an eviction goes so far below the bound, so that not each block causes one
_BATCH_BYTES = 64 << 20


class Budget:
    """Counts bytes of cached blocks. Thread-safe; evictions run one at a time, in the thread that needs room."""

    def __init__(self, limit_bytes: int, pinned_share: float) -> None:
        self.limit_bytes = limit_bytes
        self._pinned_limit = int(limit_bytes * pinned_share)
        self._order: deque[tuple[CachedBlob, int]] = deque()
        self._lock = threading.Lock()
        self._gate = threading.Lock()
        self.used_bytes = 0
        self.pinned_bytes = 0
        self.evicted_blocks = 0
        self.evicted_bytes = 0

    def add_blob(self, blob: CachedBlob) -> None:
        """Count what a blob has already, when it was opened."""
        with self._lock:
            self.used_bytes += blob.present_bytes()
            if blob.complete:
                self.pinned_bytes += blob.present_bytes()
                return
            self._order.extend((blob, number) for number, state in enumerate(blob.states) if state != ABSENT)

    def remove_blob(self, blob: CachedBlob) -> None:
        """Its file is closed, or emptied: counts no more."""
        with self._lock:
            self._order = deque(one for one in self._order if one[0] is not blob)
            self.used_bytes -= blob.present_bytes()
            if blob.complete:
                self.pinned_bytes -= blob.present_bytes()

    def add_block(self, blob: CachedBlob, number: int) -> None:
        """A block was stored."""
        with self._lock:
            self._order.append((blob, number))
            self.used_bytes += blob.index.raw_length(number)

    def freed(self, length: int) -> None:
        """Blocks of so many bytes were dropped; their places in the order are passed over later."""
        with self._lock:
            self.used_bytes -= length

    def has_room(self, length: int) -> bool:
        """Whether so many bytes may be stored now; evicts for them when needed.

        False when what is left can't be evicted: the block is then served from memory.
        """
        if self.used_bytes + length <= self.limit_bytes:
            return True
        if length > self.limit_bytes:
            return False
        with self._gate:
            over = self.used_bytes + length - self.limit_bytes
            if over > 0:
                self.evict(over + int(self.limit_bytes * SLACK_SHARE))
        return self.used_bytes + length <= self.limit_bytes

    def evict(self, wanted_bytes: int) -> int:
        """Free about so many bytes, in batches; returns how many were freed (fewer when there are no more victims)."""
        freed = 0
        while freed < wanted_bytes:
            batch = self._victims(min(wanted_bytes - freed, _BATCH_BYTES))
            if not batch:
                break
            for blob, numbers in batch.items():
                try:
                    gone = blob.drop(numbers)
                except ImageError as err:
                    if err.code != "in_use":
                        raise
                    continue  # it became complete since it was chosen
                freed += gone
                with self._lock:
                    self.used_bytes -= gone
                    self.evicted_blocks += len(numbers)
                    self.evicted_bytes += gone
        return freed

    def _victims(self, wanted_bytes: int) -> dict[CachedBlob, list[int]]:
        """The next blocks in order that were not read since the hand passed; each block is looked at twice at most."""
        found: dict[CachedBlob, list[int]] = {}
        with self._lock:
            for _ in range(2 * len(self._order)):
                if wanted_bytes <= 0 or not self._order:
                    break
                blob, number = self._order.popleft()
                if blob.complete or blob.states[number] == ABSENT:
                    continue
                if blob.referenced[number]:
                    blob.referenced[number] = 0
                    self._order.append((blob, number))
                    continue
                found.setdefault(blob, []).append(number)
                wanted_bytes -= blob.index.raw_length(number)
        return found

    def may_pin(self, blob: CachedBlob) -> bool:
        """Whether a whole blob may become complete, and so leave what can be evicted."""
        return self.pinned_bytes + blob.index.blob_size <= self._pinned_limit

    def pin(self, blob: CachedBlob) -> None:
        """It became complete."""
        with self._lock:
            self.pinned_bytes += blob.present_bytes()
