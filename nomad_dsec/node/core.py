"""The parts of one node daemon and its live records of sandboxes, shared by verbs, supervisor, recovery and routes."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from libdsec.errors import CapacityError, DsecError, NotFoundError

from nomad_dsec.clock import SYSTEM
from nomad_dsec.log import get_log
from nomad_dsec.node.failpoints import DISARMED
from nomad_dsec.node.row import to_info

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path

    from libdsec.wire import SandboxInfo

    from nomad_dsec.backends.base import Backend
    from nomad_dsec.clock import Clock
    from nomad_dsec.guest.channel import GuestChannel
    from nomad_dsec.node.admission import StartQueue
    from nomad_dsec.node.capacity import Capacity
    from nomad_dsec.node.create import Group
    from nomad_dsec.node.failpoints import Failpoints
    from nomad_dsec.node.images import Images
    from nomad_dsec.node.journal import Journal
    from nomad_dsec.node.metrics import NodeMetrics
    from nomad_dsec.node.row import Row

log = get_log(__name__)
T = TypeVar("T")


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """One sandbox in memory. `row` is replaced by door.Door alone; everything else is what goes on around it.

    lock: held by the verb that changes the state. ending: set when its end has begun and its reason stands, so that
    execs in flight learn why they were cut. ended: set when nothing of it is left. error: why its creation failed,
    for a repeated create.
    """

    row: Row
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    group: Group | None = None
    error: DsecError | None = None
    starting: asyncio.Task[None] | None = None
    stopping: asyncio.Task[None] | None = None
    watching: asyncio.Task[None] | None = None
    channel: GuestChannel | None = None
    stop_failures: int = 0
    retry_at: float = 0.0


class TaskRoom:
    """Where everything in the background runs: entered once by main, ended as a whole; no task outlives it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open = False

    async def __aenter__(self) -> TaskRoom:
        self._open = True
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel all and wait until they have ended. Idempotent."""
        self._open = False
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.difference_update(tasks)

    def spawn(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start it. What it raises is kept in the task for those who await it, and logged if it was not foreseen."""
        if not self._open:
            work.close()
            raise CapacityError("shutting_down", "the node daemon is ending", retry_after_s=1.0)
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, DsecError):
            log.error("a background task failed unforeseen", task=task.get_name(), error=repr(error), exc=_trace(error))


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Waits of the daemon, in seconds, and how much it remembers. calls_max, lanes_max 0: by cores."""

    start_s: float = 60.0
    stop_s: float = 60.0
    pause_s: float = 60.0
    adopt_grace_s: float = 2.0
    exec_slack_s: float = 15.0
    keep_ended_s: float = 3600.0
    keep_ended_max: int = 20_000
    execs_inflight_max: int = 8192
    stop_retry_max_s: float = 30.0
    disk_mib_min: int = 256
    calls_max: int = 0
    calls_queue_max: int = 4096
    lanes_max: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """Everything that one daemon is made of."""

    id: str
    data: Path
    boot_id: str
    version: str
    journal: Journal
    capacity: Capacity
    queue: StartQueue
    backends: dict[str, Backend]
    images: Images
    metrics: NodeMetrics
    room: TaskRoom
    limits: Limits = Limits()
    clock: Clock = SYSTEM
    failpoints: Failpoints = DISARMED
    entries: dict[str, Entry] = field(default_factory=dict)
    mount_roots: tuple[str, ...] = ()
    draining: bool = False
    ready: bool = False

    def entry(self, sandbox: str) -> Entry:
        """The record, or NotFoundError sandbox_not_found."""
        entry = self.entries.get(sandbox)
        if entry is None:
            raise NotFoundError(
                "sandbox_not_found",
                f"there is no sandbox {sandbox[:80]} on node {self.id}",
                field="sandbox",
                hint="it never existed, or ended so long ago that it is forgotten",
            )
        return entry

    def backend_of(self, entry: Entry) -> Backend:
        """Its backend, or CapacityError backend_unavailable when this daemon runs without it."""
        backend = self.backends.get(entry.row.backend)
        if backend is None:
            raise CapacityError(
                "backend_unavailable",
                f"{entry.row.id} needs the backend {entry.row.backend}, which this daemon was started without",
                hint="start the node daemon with that backend again",
                details={"offered": sorted(self.backends)},
            )
        return backend

    def info(self, entry: Entry) -> SandboxInfo:
        """What the outside sees of it."""
        return to_info(entry.row, self.id)

    def live(self) -> Iterator[Entry]:
        """Those that may hold resources."""
        return (entry for entry in self.entries.values() if not entry.ended.is_set())
