"""Who runs next: a bounded queue with one line per namespace, served round robin, for a fixed number of running calls.

One namespace with a thousand calls waiting costs another one at most a turn, not a thousand.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from libdsec.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_RATE_WINDOW_S = 5.0


class FairQueue:
    """At most `running_max` turns at once and `waiting_max` waiting."""

    def __init__(self, *, running_max: int, waiting_max: int) -> None:
        self.running_max = running_max
        self.waiting_max = waiting_max
        self.running = 0
        self.waiting = 0
        self.refused = 0
        # Namespaces with somebody waiting; the first is served next and goes to the end.
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._turn_s = 0.05  # how long a turn lasts, smoothed: for the retry hint

    @asynccontextmanager
    async def turn(self, namespace: str, *, timeout_s: float) -> AsyncIterator[float]:
        """Hold a turn; yields the seconds waited. CapacityError queue_full at once, queue_deadline after timeout_s."""
        waited_s = await self._take(namespace, timeout_s)
        began = time.monotonic()
        try:
            yield waited_s
        finally:
            lasted = min(time.monotonic() - began, _RATE_WINDOW_S)
            self._turn_s += 0.05 * (lasted - self._turn_s)
            self._give_back()

    def retry_after_s(self) -> float:
        """When there should be room again: what waits now, at the present rate."""
        return round(min(60.0, max(0.1, self.waiting * self._turn_s / self.running_max)), 2)

    async def _take(self, namespace: str, timeout_s: float) -> float:
        if self.running < self.running_max and not self.waiting:
            self.running += 1
            return 0.0
        if self.waiting >= self.waiting_max:
            self.refused += 1
            raise self._refusal("queue_full", f"{self.waiting} calls wait already, of at most {self.waiting_max}")
        began = time.monotonic()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(namespace, deque()).append(future)
        self.waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                self._give_back()  # the turn was handed over in the same moment
            else:
                self._leave(namespace, future)
            if isinstance(error, TimeoutError):
                self.refused += 1
                raise self._refusal("queue_deadline", f"no turn came within {timeout_s:g} s") from error
            raise
        return time.monotonic() - began

    def _leave(self, namespace: str, future: asyncio.Future[None]) -> None:
        line = self._lines.get(namespace)
        if line is not None and future in line:
            line.remove(future)
            self.waiting -= 1
            if not line:
                del self._lines[namespace]

    def _give_back(self) -> None:
        self.running -= 1
        while self._lines and self.running < self.running_max:
            namespace, line = next(iter(self._lines.items()))
            future = line.popleft()
            self.waiting -= 1
            if line:
                self._lines.move_to_end(namespace)
            else:
                del self._lines[namespace]
            if not future.done():
                self.running += 1
                future.set_result(None)

    def _refusal(self, code: str, message: str) -> CapacityError:
        return CapacityError(
            code,
            message,
            hint="send more slowly, or to more nodes",
            retry_after_s=self.retry_after_s(),
            details={"running": self.running, "waiting": self.waiting, "waiting_max": self.waiting_max},
        )
