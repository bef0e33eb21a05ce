"""The one door to time, so that tests can hold it still."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for people and journals, monotonic time for every wait."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()


SYSTEM = SystemClock()
