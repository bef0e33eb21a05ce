"""Where the gateway's background work runs: entered once, ended as a whole; no task outlives it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Coroutine

log = get_log(__name__)


class TaskRoom:
    """Like a TaskGroup in which one task's failure is logged and ends no other."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TaskRoom:
        return self

    async def __aexit__(self, *error: object) -> None:
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.difference_update(tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed unforeseen", task=repr(task.get_coro()), error=repr(error))
