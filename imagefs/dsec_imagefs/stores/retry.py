"""Bounded repetition: which errors are worth another attempt, how long to wait, and never beyond the deadline."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from dsec_imagefs.stores.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waits between attempts: a random part of ``base_s * 2**n``, at most `cap_s`; a store's own wish goes before.

    Random over the whole length, since thousands of sandboxes that fail together would else come back together.
    `attempt_s` bounds one attempt, so that a connection that hangs leaves time for a second.
    """

    attempts: int = 6
    base_s: float = 0.1
    cap_s: float = 5.0
    attempt_s: float = 20.0

    def pause(self, attempt: int, error: StoreError, chance: float) -> float:
        """Seconds to wait after failed attempt number `attempt` (from 0); `chance` is in [0, 1)."""
        pause = min(self.cap_s, self.base_s * 2.0**attempt) * chance
        return pause if error.retry_after_s is None else error.retry_after_s + pause


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticker:
    """The clock, the sleep and the chance a retry uses; tests give their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random


TICKER = Ticker()


def retry(call: Callable[[float], T], *, deadline: float, backoff: Backoff | None = None, ticker: Ticker = TICKER) -> T:
    """Call until it succeeds, fails for good, was tried often enough, or the next attempt would be too late.

    Args:
        call: gets the deadline of this attempt, an instant of `ticker.now()`.
        deadline: the last instant for all attempts together.
        backoff: how often and how patiently; the default when None.
        ticker: clock, sleep and chance.

    Raises:
        StoreError: the last attempt's.
    """
    backoff = backoff or Backoff()
    attempt = 0
    while True:
        now = ticker.now()
        try:
            return call(min(deadline, now + backoff.attempt_s))
        except StoreError as error:
            pause = backoff.pause(attempt, error, ticker.chance())
            attempt += 1
            if not error.retryable or attempt >= backoff.attempts or ticker.now() + pause >= deadline:
                if attempt > 1:
                    error.add_note(f"after {attempt} attempts")
                raise
            ticker.sleep(pause)


@dataclass(slots=True, kw_only=True)
class Pacer:
    """One host's wish to be left alone (429, Retry-After), kept for all threads that talk to it."""

    max_hold_s: float = 120.0  # a hostile or broken host may ask for a year
    ticker: Ticker = TICKER
    _until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, seconds: float) -> None:
        """Nobody asks the host again within this time."""
        until = self.ticker.now() + min(max(seconds, 0.0), self.max_hold_s)
        with self._lock:
            self._until = max(self._until, until)

    def wait_free(self, deadline: float, what: str) -> None:
        """Sleep until the host may be asked; raises StoreError ``throttled`` when that is after the deadline."""
        with self._lock:
            until = self._until
        pause = until - self.ticker.now()
        if pause <= 0:
            return
        if until >= deadline:
            raise StoreError(
                "throttled", f"{what}: asked to wait {pause:.1f} s more", "fewer nodes at once", retryable=True,
                retry_after_s=pause,
            )  # fmt: skip
        self.ticker.sleep(pause)
