"""Where a missing block comes from: memory, a look at suspect bytes, another blob, the store; and that it is kept."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from dsec_imagefs.blobd.block_map import SUSPECT, TRUSTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_imagefs.blobd.budget import Budget
    from dsec_imagefs.blobd.cached import CachedBlob
    from dsec_imagefs.blobd.dedup import BlockPlaces
    from dsec_imagefs.blobd.metrics import Counters

MEMORY_BLOCKS = 8
_FULL_PAUSE_S = 1.0  # between tries to write to a disk that was full


class Filler:
    """`obtain` is called by one thread a block at a time (flight.py); everything else is shared."""

    def __init__(self, budget: Budget, places: BlockPlaces, counters: Counters) -> None:
        self._budget = budget
        self._places = places
        self._counters = counters
        self._lock = threading.Lock()
        # blocks that could not be kept: small reads of one should not fetch it each time
        self._memory: OrderedDict[tuple[CachedBlob, int], bytes] = OrderedDict()
        self._full_until = 0.0

    def obtain(self, blob: CachedBlob, number: int, deadline: float, deliver: Callable[[bytes], None]) -> None:
        """Give the right bytes of a block to `deliver`, then keep them.

        Raises:
            ImageError: whatever the store says, at the deadline at the latest if the store keeps to it.
        """
        data = self._local(blob, number)
        if data is not None:
            deliver(data)
            return
        found = self._places.find(blob, number)
        if found is not None:
            data, place = found
            deliver(data)
            if self._may_keep(len(data)):
                more = self._places.reflink(place, blob, number)
                if more is not None:
                    self._counters.reflinked_blocks += 1
                    self._kept(blob, number, more)
                    return
            self._counters.copied_blocks += 1
        else:
            if blob.index.is_zero(number):
                data = bytes(blob.index.raw_length(number))
            else:
                data = blob.source(number, deadline)
                self._counters.fetched_bytes += len(data)
            deliver(data)
        self._keep(blob, number, data)

    def _local(self, blob: CachedBlob, number: int) -> bytes | None:
        generation = blob.generation  # before the state: an eviction in between must be seen
        state = blob.states[number]
        if state == TRUSTED:
            data = blob.read(number)
            if blob.generation == generation and len(data) == blob.index.raw_length(number):
                return data
        elif state == SUSPECT:
            checked, dropped_bytes = blob.check(number)
            self._counters.rehashed_blocks += 1
            if checked is not None:
                self._places.note(blob, number)
                return checked
            if dropped_bytes:
                self._counters.wrong_local_blocks += 1
                self._budget.freed(dropped_bytes)
        with self._lock:
            return self._memory.get((blob, number))

    def _may_keep(self, length: int) -> bool:
        return time.monotonic() >= self._full_until and self._budget.has_room(length)

    def _keep(self, blob: CachedBlob, number: int, data: bytes) -> None:
        """Keep it on disk, or for a while in memory; the reader has its bytes either way."""
        if self._may_keep(len(data)):
            try:
                more = blob.store(number, data)
                if more is not None:
                    self._kept(blob, number, more)
                    return
                self._counters.disk_full += 1
            except OSError:
                self._counters.disk_errors += 1
            self._full_until = time.monotonic() + _FULL_PAUSE_S
        self._counters.uncached_blocks += 1
        with self._lock:
            self._memory[blob, number] = data
            while len(self._memory) > MEMORY_BLOCKS:
                self._memory.popitem(last=False)

    def _kept(self, blob: CachedBlob, number: int, more: int) -> None:
        if more:
            self._budget.add_block(blob, number)
        self._places.note(blob, number)

    def forget_blob(self, blob: CachedBlob) -> None:
        """It is detached."""
        self._places.forget_blob(blob)
        with self._lock:
            for key in [key for key in self._memory if key[0] is blob]:
                del self._memory[key]
