"""The door for creates: a bounded queue for start slots, two classes, a deadline for each wait, named refusals.

Room (cpus, memory, count) is decided at once, by capacity.py; what waits here is only the turn to start.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from libdsec.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# Of this many turns in a row, the last goes to best_effort when one waits, so that it is slowed but never starved.
LATENCY_TURNS = 8


class StartQueue:
    """At most `starting_max` starts at once and `queue_max` waiting; latency_sensitive before best_effort."""

    def __init__(self, *, starting_max: int, queue_max: int) -> None:
        self.starting_max = starting_max
        self.queue_max = queue_max
        self.starting = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {"latency_sensitive": deque(), "best_effort": deque()}
        self._turns = 0

    @property
    def waiting(self) -> int:
        """Members of groups that wait for their turn."""
        return sum(len(line) for line in self._waiting.values())

    def check(self, count: int) -> None:
        """CapacityError starting_limit or queue_full when `count` more can't even wait."""
        free = self.starting_max - self.starting
        if self.waiting == 0 and count <= free:
            return
        details = {
            "starting": self.starting,
            "starting_max": self.starting_max,
            "waiting": self.waiting,
            "queue_max": self.queue_max,
            "asked": count,
        }
        if self.queue_max == 0:
            raise CapacityError(
                "starting_limit",
                f"{self.starting} of {self.starting_max} starts are under way and this node queues none",
                retry_after_s=0.2,
                details=details,
            )
        if self.waiting + count - max(0, free) > self.queue_max:
            raise CapacityError(
                "queue_full",
                f"{self.waiting} creates wait already, of at most {self.queue_max}",
                hint="create more slowly or on more nodes",
                retry_after_s=1.0,
                details=details,
            )

    @asynccontextmanager
    async def turn(self, qos: str, *, timeout_s: float) -> AsyncIterator[None]:
        """Hold a start slot; CapacityError queue_deadline when none came free in time."""
        await self._take(qos, timeout_s)
        try:
            yield
        finally:
            self._give_back()

    async def _take(self, qos: str, timeout_s: float) -> None:
        if self.starting < self.starting_max and self.waiting == 0:
            self.starting += 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._waiting[qos]
        line.append(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                self._give_back()  # the slot was handed over in the same moment
            else:
                with suppress(ValueError):  # a turn may have passed over it already
                    line.remove(future)
                self._hand_out()  # one that came meanwhile lined up behind it, though a slot was free
            if isinstance(error, TimeoutError):
                raise CapacityError(
                    "queue_deadline",
                    f"no start slot came free within {timeout_s:g} s",
                    retry_after_s=1.0,
                    details={"waiting": self.waiting, "starting_max": self.starting_max, "waited_s": timeout_s},
                ) from error
            raise

    def _give_back(self) -> None:
        self.starting -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self.starting < self.starting_max:
            future = self._next()
            if future is None:
                return
            self.starting += 1
            future.set_result(None)

    def _next(self) -> asyncio.Future[None] | None:
        first, second = self._waiting["latency_sensitive"], self._waiting["best_effort"]
        self._turns += 1
        if second and (not first or self._turns % LATENCY_TURNS == 0):
            first = second
        while first:
            future = first.popleft()
            if not future.done():
                return future
        return None
