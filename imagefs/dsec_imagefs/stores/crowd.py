"""Several threads at one task: a bounded pool that stops at the first error, and a meter that adds up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dsec_imagefs.stores.base import Progress

A = TypeVar("A")
B = TypeVar("B")


@dataclass(slots=True)
class Meter:
    """Adds up what several threads have done."""

    total: int
    progress: Progress | None
    _done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def part(self, size: int) -> Callable[[int], None]:
        """A reporter of one part: it is told how much of the part is done, and an attempt may start over."""
        before = 0

        def report(done: int) -> None:
            nonlocal before
            with self._lock:
                self._done += min(done, size) - before
                before = min(done, size)
                if self.progress is not None:
                    self.progress(self._done, self.total)

        return report


def each(work: Callable[[A], B], items: Iterable[A], parallel: int) -> list[B]:
    """Do work for each item, some at once; after the first error nothing new is begun, and it is raised."""
    failed = threading.Event()

    def guarded(item: A) -> B:
        if failed.is_set():
            raise _SkippedError
        try:
            return work(item)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(max_workers=max(1, parallel), thread_name_prefix="image-transfer") as pool:
        futures = [pool.submit(guarded, item) for item in items]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, _SkippedError):
            raise error
    return [future.result() for future in futures]


class _SkippedError(Exception):
    """An item that was not begun, since another had failed."""
