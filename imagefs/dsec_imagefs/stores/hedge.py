"""A second request when the first is late: one slow server of a store must not hold up a sandbox."""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsec_imagefs.stores.base import StoreError, remaining
from dsec_imagefs.stores.wrapped import Wrapped

if TYPE_CHECKING:
    from concurrent.futures import Future

THREADS = 64


@dataclass(slots=True)
class Budget:
    """How many second requests there may be: a share of all, else an overloaded store would get twice the load."""

    share: float = 0.1
    first: int = 4
    reads: int = 0
    hedges: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_read(self) -> None:
        """One more read."""
        with self._lock:
            self.reads += 1

    def take(self) -> bool:
        """Whether one more second request is within the budget."""
        with self._lock:
            if self.hedges >= self.first + self.share * self.reads:
                return False
            self.hedges += 1
            return True


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgedStore(Wrapped):
    """Another store; a read that takes longer than `after_s` is asked once more, and the first good answer counts.

    Reads run in threads of its own, so they end at their deadline even where the kernel holds them (a dead NFS server).
    """

    after_s: float
    budget: Budget = field(default_factory=Budget)
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="hedged-read"), repr=False
    )

    def read(self, digest: str, offset: int, length: int, *, deadline: float) -> bytes:
        """Exactly `length` bytes, from whichever request answers first."""

        def ask() -> Future[bytes]:
            return self._pool.submit(self.store.read, digest, offset, length, deadline=deadline)

        left = remaining(deadline, self.label)
        self.budget.count_read()
        pending = {ask()}
        done, pending = wait(pending, timeout=min(self.after_s, left))
        if not done and time.monotonic() < deadline and self.budget.take():
            pending.add(ask())
        failed: BaseException | None = None
        while True:
            for one in done:
                failed = one.exception()
                if failed is None:
                    for other in pending:
                        other.cancel()
                    return one.result()
            if failed is not None and not pending:
                raise failed
            done, pending = wait(pending, timeout=max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
            if not done:
                for other in pending:
                    other.cancel()
                raise StoreError("deadline", f"{self.label}: did not answer in time", retryable=True)

    def close(self) -> None:
        """Close the inner store; reads that hang are not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.store.close()
