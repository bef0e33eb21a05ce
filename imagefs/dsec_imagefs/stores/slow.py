"""A store behind an imagined network: each read waits, and all reads share a bandwidth. To measure with."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from dsec_imagefs.stores.base import StoreError
from dsec_imagefs.stores.retry import TICKER, Ticker
from dsec_imagefs.stores.wrapped import Wrapped


@dataclass(slots=True, kw_only=True)
class Link:
    """A line to a store, used by many threads: `latency_s` a request, `bytes_per_s` for all together (0: no bound)."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    ticker: Ticker = TICKER
    _free_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pass_bytes(self, count: int, deadline: float, what: str) -> None:
        """Wait as long as a request of so many bytes takes; raises StoreError ``deadline`` when it comes too late."""
        now = self.ticker.now()
        done = now
        if self.bytes_per_s:
            with self._lock:
                done = self._free_at = max(now, self._free_at) + count / self.bytes_per_s
        pause = done + self.latency_s - now
        if now + pause >= deadline:
            self.ticker.sleep(max(0.0, deadline - now))
            raise StoreError("deadline", f"{what}: {count} bytes did not come in time", retryable=True)
        if pause > 0:
            self.ticker.sleep(pause)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStore(Wrapped):
    """Another store, its reads as slow as a link makes them; all else goes straight through."""

    link: Link

    def read(self, digest: str, offset: int, length: int, *, deadline: float) -> bytes:
        """The inner store's bytes, later."""
        data = self.store.read(digest, offset, length, deadline=deadline)
        self.link.pass_bytes(length, deadline, self.label)
        return data

    def size(self, digest: str, *, deadline: float) -> int:
        """After one latency."""
        self.link.pass_bytes(0, deadline, self.label)
        return self.store.size(digest, deadline=deadline)

    def has(self, digest: str, *, deadline: float, size: int | None = None) -> bool:
        """After one latency."""
        self.link.pass_bytes(0, deadline, self.label)
        return self.store.has(digest, deadline=deadline, size=size)

    def get_image(self, image: str, *, deadline: float) -> bytes:
        """As slow as its size."""
        raw = self.store.get_image(image, deadline=deadline)
        self.link.pass_bytes(len(raw), deadline, self.label)
        return raw

    def get_ref(self, name: str, *, deadline: float) -> str:
        """After one latency."""
        self.link.pass_bytes(0, deadline, self.label)
        return self.store.get_ref(name, deadline=deadline)

    def refs(self, *, deadline: float) -> tuple[str, ...]:
        """After one latency."""
        self.link.pass_bytes(0, deadline, self.label)
        return self.store.refs(deadline=deadline)

    def get_trace(self, image: str, *, deadline: float) -> bytes:
        """As slow as its size."""
        raw = self.store.get_trace(image, deadline=deadline)
        self.link.pass_bytes(len(raw), deadline, self.label)
        return raw
