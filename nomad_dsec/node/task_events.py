"""Events of tasks or grants for those who poll: numbered, bounded, the oldest dropped first."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from libdsec.wire_tasks import TaskEvent, TaskEvents

if TYPE_CHECKING:
    from nomad_dsec.clock import Clock

KEPT = 1000
PER_SECOND = 1000  # numbers start at the time of day, so that they rise across restarts of the daemon


class EventRing:
    """One stream of events."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next = int(clock.now()) * PER_SECOND
        self._kept: deque[TaskEvent] = deque(maxlen=KEPT)
        self._news = asyncio.Event()

    def add(self, task_id: str, alloc_id: str, task_name: str, message: str, **annotations: str) -> None:
        """Tell the job's owner something."""
        event = TaskEvent(
            seq=self._next,
            task_id=task_id,
            alloc_id=alloc_id,
            task_name=task_name,
            at=self._clock.now(),
            message=message[:1000],
            annotations=annotations,
        )
        self._next += 1
        self._kept.append(event)
        self._news.set()

    async def since(self, seq: int, *, timeout_s: float) -> TaskEvents:
        """Those from number `seq` on; waits for one up to timeout_s. A negative number means: only what is to come."""
        first = self._next if seq < 0 else seq
        try:
            async with asyncio.timeout(timeout_s):
                while self._next <= first:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        return TaskEvents(events=[event for event in self._kept if event.seq >= first], next=max(self._next, first))
