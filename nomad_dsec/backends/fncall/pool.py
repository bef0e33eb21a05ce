"""Warm lanes, by what they are for. A lane is handed to one call at a time, and to none before it is as good as new.

Marks: below `low` idle lanes of a kind in use the pool starts more, up to `target`; never more than `high` lanes in
all: then the longest idle one of another kind makes room. A kind that nobody asked for in `idle_s` is let go entirely.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from libdsec.errors import CapacityError, DsecError

from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

_log = get_log("fncall.pool")
RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneKind:
    """What a lane may be used for. purpose: "" for submissions, "checker" for what they must never have touched."""

    digest: str
    zygote: str = ""
    purpose: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """target, low: idle lanes a kind; high: lanes in all. A lane is replaced after `calls_max` calls."""

    target: int
    low: int
    high: int
    idle_s: float = 300.0
    calls_max: int = 20_000


class PooledLane(Protocol):
    """What the pool needs of a lane."""

    name: str
    broken: str
    calls: int

    async def close(self) -> None:
        """Give everything back. Idempotent."""
        ...


L = TypeVar("L", bound=PooledLane)


@dataclass(slots=True)
class _Line(Generic[L]):
    """The lanes of one kind; the idle ones in the order of their last use."""

    idle: deque[L] = field(default_factory=deque)
    busy: int = 0
    starting: int = 0
    used_at: float = 0.0
    failed_at: float = 0.0


class LanePool(Generic[L]):
    """`start` makes a lane of a kind; `spawn` runs background work that somebody else ends with the daemon."""

    def __init__(
        self,
        marks: Marks,
        start: Callable[[LaneKind], Awaitable[L]],
        spawn: Callable[[str, Coroutine[Any, Any, None]], object],
    ) -> None:
        self.marks = marks
        self._start = start
        self._spawn = spawn
        self._lines: dict[LaneKind, _Line[L]] = {}
        self._ending = 0
        self._freed = asyncio.Event()
        self._closed = False
        self.started = 0
        self.replaced = 0

    @property
    def lanes(self) -> int:
        """All that exist, half-made and half-removed ones too: never above the high mark."""
        return self._ending + sum(len(line.idle) + line.busy + line.starting for line in self._lines.values())

    def count(self, kind: LaneKind) -> int:
        """Lanes of one kind, those being made included."""
        line = self._lines.get(kind)
        return len(line.idle) + line.busy + line.starting if line else 0

    async def take(self, kind: LaneKind, *, timeout_s: float) -> L:
        """A lane that is nobody's. CapacityError lanes_busy when none came free; what a start raised, if it failed."""
        line = self._lines.setdefault(kind, _Line())
        line.used_at = time.monotonic()
        deadline = line.used_at + timeout_s
        while True:
            if self._closed:
                raise CapacityError("shutting_down", "the node daemon is ending", retry_after_s=1.0)
            lane = self._pop(line)
            if lane is not None:
                line.busy += 1
                self._refill(kind, line)
                return lane
            if self.lanes < self.marks.high or self._make_room(kind):
                made = await self._make(kind, line)
                line.busy += 1
                return made
            await self._wait_freed(deadline, timeout_s)

    def _pop(self, line: _Line[L]) -> L | None:
        """The lane used last, passing over those that died meanwhile."""
        while line.idle:
            lane = line.idle.pop()
            if not lane.broken:
                return lane
            self._replace(lane)
        return None

    def _replace(self, lane: L) -> None:
        self.replaced += 1
        _log.warning("a lane is replaced", lane=lane.name, reason=lane.broken)
        self._end(lane)

    async def _wait_freed(self, deadline: float, timeout_s: float) -> None:
        self._freed.clear()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._freed.wait()
        except TimeoutError as late:
            raise CapacityError(
                "lanes_busy", f"no lane came free within {timeout_s:g} s", retry_after_s=RETRY_S
            ) from late

    async def _make(self, kind: LaneKind, line: _Line[L]) -> L:
        line.starting += 1
        try:
            lane = await self._start(kind)
        finally:
            line.starting -= 1
            self._freed.set()
        self.started += 1
        return lane

    def give_back(self, kind: LaneKind, lane: L) -> None:
        """After a call: kept if it is as it was, else replaced."""
        line = self._lines[kind]
        line.busy -= 1
        if lane.broken:
            self._replace(lane)
        elif lane.calls >= self.marks.calls_max or self._closed:
            self._end(lane)
        else:
            line.idle.append(lane)
        self._freed.set()

    def _make_room(self, kind: LaneKind) -> bool:
        """Let the longest idle lane of another kind go. False: its place is free a little later, or there is none."""
        others = [line for other, line in self._lines.items() if other != kind and line.idle]
        if others:
            self._end(min(others, key=lambda line: line.used_at).idle.popleft())
        return self.lanes < self.marks.high

    def _end(self, lane: L) -> None:
        self._ending += 1
        self._spawn(f"end {lane.name}", self._close(lane))

    async def _close(self, lane: L) -> None:
        try:
            await lane.close()
        except DsecError as error:
            _log.error("a lane would not end", lane=lane.name, error=str(error))
        finally:
            self._ending -= 1
            self._freed.set()

    def _refill(self, kind: LaneKind, line: _Line[L]) -> None:
        idle = len(line.idle) + line.starting
        if idle >= self.marks.low or time.monotonic() - line.failed_at < RETRY_S:
            return
        for _ in range(min(self.marks.target - idle, self.marks.high - self.lanes)):
            line.starting += 1  # counted at once, so that nobody starts them twice
            self._spawn("start a lane", self._add(kind, line))

    async def _add(self, kind: LaneKind, line: _Line[L]) -> None:
        try:
            lane = await self._start(kind)
        except DsecError as error:
            line.failed_at = time.monotonic()
            _log.warning("could not start a lane", error=str(error))
            return
        finally:
            line.starting -= 1
        self.started += 1
        if self._closed:
            self._end(lane)
        else:
            line.idle.appendleft(lane)
        self._freed.set()

    def cull(self) -> int:
        """End the idle lanes of kinds that nobody asked for lately; returns how many. Called now and then."""
        now = time.monotonic()
        ended = 0
        for kind, line in list(self._lines.items()):
            if now - line.used_at < self.marks.idle_s:
                continue
            while line.idle:
                self._end(line.idle.popleft())
                ended += 1
            if not line.busy and not line.starting:
                del self._lines[kind]
        return ended

    async def close(self) -> None:
        """End all idle lanes; busy ones end when they are given back."""
        self._closed = True
        self._freed.set()
        lanes = [lane for line in self._lines.values() for lane in line.idle]
        for line in self._lines.values():
            line.idle.clear()
        for result in await asyncio.gather(*(lane.close() for lane in lanes), return_exceptions=True):
            if isinstance(result, BaseException):
                _log.error("a lane would not end", error=repr(result))
