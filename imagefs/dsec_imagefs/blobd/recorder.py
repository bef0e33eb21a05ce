"""The first accesses of a blob, for traces: when, where, how much. Bounded."""

from __future__ import annotations

import time

MAX_ACCESSES = 1 << 18


class Recorder:
    """Records for a time. What the kernel has in its page cache, or reads by itself, is not seen."""

    def __init__(self, seconds: float) -> None:
        self._start = time.monotonic()
        self._end = self._start + seconds
        self._accesses: list[tuple[float, int, int]] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be recorded."""
        return time.monotonic() >= self._end or len(self._accesses) >= MAX_ACCESSES

    def note(self, offset: int, length: int) -> None:
        """One read."""
        now = time.monotonic()
        if now < self._end and len(self._accesses) < MAX_ACCESSES:
            self._accesses.append((now, offset, length))

    def accesses(self) -> list[tuple[int, int, int]]:
        """Milliseconds since the start, offset, length; reads that continue the last one are joined."""
        joined: list[tuple[int, int, int]] = []
        for at, offset, length in sorted(self._accesses[:]):
            if joined and joined[-1][1] + joined[-1][2] == offset:
                start, first, before = joined[-1]
                joined[-1] = (start, first, before + length)
            else:
                joined.append((int((at - self._start) * 1000), offset, length))
        return joined
