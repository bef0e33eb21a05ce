"""What a cluster has forgotten: tasks, grants and calls whose allocation's directory has gone, and ended tasks in time.

A client that was purged, or lost with its state, asks for nothing again; its grant must not lend for ever.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from libdsec.errors import DsecError

from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nomad_dsec.clock import Clock
    from nomad_dsec.node.tasks import Tasks

log = get_log(__name__)
SWEEP_S = 60.0
KEEP_ENDED_S = 7 * 24 * 3600.0
KEEP_ENDED_MAX = 10_000


class Kept(Protocol):
    """Records that belong to allocations."""

    def homes(self) -> Mapping[str, str]:
        """The allocation's directory by key; "" for one that has none."""
        ...

    async def destroy(self, key: str, *, force: bool) -> None:
        """End it and forget it."""
        ...


class TaskSweep:
    """Looks at all of them once a minute."""

    def __init__(self, clock: Clock, tasks: Tasks, kinds: Mapping[str, Kept]) -> None:
        self._clock = clock
        self._tasks = tasks
        self._kinds = kinds

    async def run_forever(self) -> None:
        """Until it is cancelled; a round that fails is logged and the next one comes."""
        missing: set[tuple[str, str]] = set()
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self._forget_ended()
                missing = await self.sweep(missing)
            except (DsecError, OSError) as error:
                log.error("a sweep of tasks failed and goes on", error=repr(error))

    async def sweep(self, missing: set[tuple[str, str]]) -> set[tuple[str, str]]:
        """One round. missing: (kind, key) whose directory was gone in the round before; returns those of this round.

        Twice, since a client may make its directories anew. One that will not go does not hold up the others.
        """
        gone = await asyncio.to_thread(self._gone)
        for kind, key in gone & missing:
            log.warning("an allocation is gone; what is left of it is ended", kind=kind, key=key)
            try:
                await self._kinds[kind].destroy(key, force=True)
            except DsecError as error:
                log.error("what is left of an allocation stays", kind=kind, key=key, error=str(error))
        return gone - missing

    def _gone(self) -> set[tuple[str, str]]:
        homes = [(kind, key, home) for kind, kept in self._kinds.items() for key, home in list(kept.homes().items())]
        there: dict[str, bool] = {}
        for _, _, home in homes:
            if home and home not in there:
                there[home] = Path(home).exists()
        return {(kind, key) for kind, key, home in homes if home and not there[home]}

    async def _forget_ended(self) -> None:
        ended = sorted(
            (task for task in self._tasks.live.values() if task.exited.is_set()),
            key=lambda task: task.row.completed_at,
        )
        horizon = self._clock.now() - KEEP_ENDED_S
        for place, task in enumerate(ended):
            if task.row.completed_at < horizon or place < len(ended) - KEEP_ENDED_MAX:
                await self._tasks.forget(task)
