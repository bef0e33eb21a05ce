"""One run in a lane: wait for a turn, take a lane, write its limits, ask it, look if it is as new, give it back."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from libdsec.errors import DeadlineExceeded, PlatformError, StateError

from nomad_dsec.backends.fncall import lane_wire as wire
from nomad_dsec.backends.fncall.lane import NOT_BEGUN
from nomad_dsec.linux.memfd import make_memfd

if TYPE_CHECKING:
    from nomad_dsec.backends.fncall.lane import Lane, Room
    from nomad_dsec.backends.fncall.lane_wire import LaneCall, LaneReply
    from nomad_dsec.backends.fncall.pool import LaneKind, LanePool
    from nomad_dsec.backends.fncall.queue import FairQueue

TRIES: Final = 2  # a call keeps no state, so one that a fault of ours ended is begun again, once
TRIES_IN_ALL: Final = 8  # with lanes that had died before it began
START_S: Final = 60.0
_OURS: Final = ("slot", "fork", "enter", "limits", "user", "zygote")  # no request is to blame for these
INLINE_COPY_BYTES: Final = 1024 * 1024  # longer input is copied by a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A reply and how long the call waited before its program began, which is no part of its times."""

    reply: LaneReply
    queue_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A program's stdin: `inline` goes with the request, `fd` (or -1) is a read-only memory file."""

    inline: bytes = b""
    fd: int = -1


async def open_input(stdin: bytes, opened: ExitStack) -> Input:
    """Stdin as a lane takes it; the descriptor is closed by `opened`. Each run needs its own: it has an offset."""
    if len(stdin) <= wire.STDIN_INLINE_MAX:
        return Input(inline=stdin)
    if len(stdin) <= INLINE_COPY_BYTES:
        return Input(fd=_read_only(stdin, opened))
    return Input(fd=await asyncio.to_thread(_read_only, stdin, opened))


def _read_only(stdin: bytes, opened: ExitStack) -> int:
    with ExitStack() as writable:
        memory = make_memfd("stdin", stdin, writable, sealed=True)
        fd = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)
    opened.callback(os.close, fd)
    return fd


class Runner:
    """Over the queue and the pool of one node."""

    def __init__(self, queue: FairQueue, pool: LanePool[Lane]) -> None:
        self._queue = queue
        self._pool = pool

    @property
    def turns(self) -> int:
        """How many calls run at the same time."""
        return self._queue.running_max

    async def run(
        self,
        kind: LaneKind,
        call: LaneCall,
        room: Room,
        *,
        namespace: str,
        timeout_s: float,
        stdin_fd: int = -1,
        exec_fd: int = -1,
    ) -> Ran:
        """To the end. CapacityError when there is no turn or lane in time; StateError cancelled."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with self._queue.turn(namespace, timeout_s=timeout_s):
            lost = tried = 0
            while True:
                lane = await self._pool.take(kind, timeout_s=START_S)
                queue_s = loop.time() - began
                try:
                    return Ran(reply=await _once(lane, call, room, stdin_fd, exec_fd), queue_s=queue_s)
                except (PlatformError, DeadlineExceeded) as fault:
                    tried += 1
                    lost += fault.code != NOT_BEGUN
                    if lost == TRIES or tried == TRIES_IN_ALL:
                        raise
                    if stdin_fd >= 0:
                        os.lseek(stdin_fd, 0, os.SEEK_SET)
                finally:
                    self._pool.give_back(kind, lane)


async def _once(lane: Lane, call: LaneCall, room: Room, stdin_fd: int, exec_fd: int) -> LaneReply:
    lane.prepare(room)
    try:
        reply = await lane.run(call, stdin_fd=stdin_fd, exec_fd=exec_fd)
    except (PlatformError, DeadlineExceeded):
        kills = lane.oom_kills()
        if kills:  # the program took so much that the lane's own processes went with it
            return wire.lost_to_oom(kills)
        raise
    if reply.flags & wire.CANCELLED:
        raise StateError("cancelled", "the call was cancelled")
    if reply.flags & wire.NOT_STARTED and reply.step in _OURS and not reply.oom_kills:
        lane.broken = lane.broken or f"step {reply.step}: errno {reply.error}"
        raise PlatformError(NOT_BEGUN, f"a call could not be started: {lane.broken}")
    if not lane.broken:
        lane.broken = await lane.check_reset(reply)
    return reply
