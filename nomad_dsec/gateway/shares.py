"""How many calls may be under way at once, shared between namespaces, and how many bytes of them are held."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from libdsec.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Iterator

RETRY_AFTER_S = 0.25
HELD_BYTES_MAX = 512 * 1024 * 1024


class Shares:
    """Each of n active namespaces may have calls_max / n calls under way.

    So a newcomer is never shut out by one that came first: that one is refused further calls until it is back within
    its share. What is over is refused at once, with a hint when to come again; nothing waits here.
    """

    def __init__(self, calls_max: int, *, bytes_max: int = HELD_BYTES_MAX) -> None:
        self._calls_max = calls_max
        self._bytes_max = bytes_max
        self._calls: Counter[str] = Counter()
        self._bytes = 0

    @property
    def calls(self) -> int:
        """How many are under way."""
        return self._calls.total()

    @contextmanager
    def hold(self, namespace: str, body_bytes: int) -> Iterator[None]:
        """Count one call while the block runs, or CapacityError busy."""
        active = len(self._calls) + (namespace not in self._calls)
        share = max(1, self._calls_max // active)
        if self._calls.get(namespace, 0) >= share:
            raise _busy(f"namespace {namespace} has its share of {share} calls under way")
        if self._bytes and self._bytes + body_bytes > self._bytes_max:
            raise _busy("the requests under way are too large together")
        self._calls[namespace] += 1
        self._bytes += body_bytes
        try:
            yield
        finally:
            self._bytes -= body_bytes
            self._calls[namespace] -= 1
            if not self._calls[namespace]:
                del self._calls[namespace]


def _busy(why: str) -> CapacityError:
    return CapacityError("busy", why, hint="come again; fewer calls at once help", retry_after_s=RETRY_AFTER_S)
