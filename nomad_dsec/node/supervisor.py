"""The one room for waiting: ends by themselves (pidfd), TTLs, leases, drains, removals to try again, what to forget."""

from __future__ import annotations

import asyncio
import heapq
import shutil
from typing import TYPE_CHECKING

from libdsec.errors import DsecError
from libdsec.wire import BackendFingerprint

from nomad_dsec.log import get_log
from nomad_dsec.node.row import to_handle

if TYPE_CHECKING:
    from nomad_dsec.node.core import Entry, Node
    from nomad_dsec.node.door import Door

log = get_log(__name__)
TICK_S = 1.0
FINGERPRINT_S = 30.0
WATCH_RETRY_S = 2.0
ENDS_AT_ONCE = 16


class Supervisor:
    """Background care for all sandboxes of one node."""

    def __init__(self, node: Node, door: Door) -> None:
        self._node = node
        self._door = door
        self._heap: list[tuple[float, str, int]] = []
        self._wake = asyncio.Event()
        self._found: dict[str, tuple[float, BackendFingerprint]] = {}
        self._drain_at: float | None = None
        self._ending = asyncio.Semaphore(ENDS_AT_ONCE)
        self.disk_mib_free = _disk_mib_free(node)

    def run(self) -> None:
        """Start the loops, in the node's room."""
        self._node.room.spawn("timers", self._timer_loop())
        self._node.room.spawn("housekeeping", self._housekeeping_loop())

    def watch(self, entry: Entry) -> None:
        """Begin (or, after a resume, begin anew) to wait for the end of this incarnation, and set its timers."""
        if entry.watching is not None:
            entry.watching.cancel()
        entry.watching = self._node.room.spawn(f"watch {entry.row.id}", self._watch(entry, entry.row.incarnation))
        self.set_timer(entry)

    def set_timer(self, entry: Entry) -> None:
        """Take notice of a new TTL or lease. Old timers stay in the heap and find nothing due."""
        due = self._due(entry)
        if due is None:
            return
        first = self._heap[0][0] if self._heap else None
        heapq.heappush(self._heap, (due, entry.row.id, entry.row.incarnation))
        if first is None or due < first:
            self._wake.set()

    @staticmethod
    def _due(entry: Entry) -> float | None:
        times = [at for at in (entry.row.expires_at, entry.row.lease_expires_at) if at is not None]
        return min(times, default=None)

    async def _watch(self, entry: Entry, incarnation: int) -> None:
        backend = self._node.backend_of(entry)
        while not entry.ending.is_set() and entry.row.handle is not None:
            try:
                ended = await backend.wait_ended(to_handle(entry.row.handle))
            except (DsecError, OSError) as error:
                log.warning("waiting for a sandbox failed", sandbox=entry.row.id, error=repr(error))
                await asyncio.sleep(WATCH_RETRY_S)
                continue
            if entry.row.incarnation == incarnation and not entry.ending.is_set():
                await self._end(entry, ended.reason, ended.message)
            return

    async def _end(self, entry: Entry, reason: str, message: str) -> None:
        async with self._ending:
            try:
                await self._door.end(entry, reason=reason, message=message)
            except DsecError:
                return  # logged and counted by the door; housekeeping tries again

    async def _timer_loop(self) -> None:
        while True:
            self._wake.clear()
            now = self._node.clock.now()
            while self._heap and self._heap[0][0] <= now:
                _, sandbox, incarnation = heapq.heappop(self._heap)
                self._fire(sandbox, incarnation, now)
            # At most a tick: TTLs are wall time, which may be set forward under us.
            wait_s = min(TICK_S, max(0.0, self._heap[0][0] - now)) if self._heap else TICK_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _fire(self, sandbox: str, incarnation: int, now: float) -> None:
        entry = self._node.entries.get(sandbox)
        if entry is None or entry.ending.is_set() or entry.row.incarnation != incarnation:
            return
        row = entry.row
        if row.expires_at is not None and row.expires_at <= now:
            reason, message = (
                "timeout",
                f"its time of {row.expires_at - (row.ready_at or row.created_at):.1f} s was over",
            )
        elif row.lease_expires_at is not None and row.lease_expires_at <= now:
            reason, message = "lease_expired", f"its lease of {row.lease_s or 0:g} s was not renewed"
        else:
            self.set_timer(entry)
            return
        self._node.room.spawn(f"expire {sandbox}", self._end(entry, reason, message))

    async def _housekeeping_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.disk_mib_free = _disk_mib_free(self._node)
                self._retry_stops()
                await self._mend_journal()
                await self._forget_old()
                await self._drain_due()
            except (DsecError, OSError) as error:
                log.error("housekeeping failed and goes on", error=repr(error))

    def _retry_stops(self) -> None:
        now = self._node.clock.monotonic()
        for entry in list(self._node.live()):
            if (
                entry.row.state == "stopping"
                and entry.retry_at <= now
                and (not entry.stopping or entry.stopping.done())
            ):
                self._node.room.spawn(
                    f"end again {entry.row.id}", self._end(entry, entry.row.reason, entry.row.message)
                )

    async def _mend_journal(self) -> None:
        """Write what a full disk kept out, above all ends: a node that refuses creates has nothing else to write, and
        would go on refusing them for lack of a write that succeeds.
        """
        node, journal = self._node, self._node.journal
        if not journal.broken and not journal.unsaved:
            return
        for sandbox in sorted(journal.unsaved):
            entry = node.entries.get(sandbox)
            if entry is None:
                await journal.forget([sandbox])
            else:
                await journal.save(entry.row, now=node.clock.now(), durable=True)
        await journal.put_fact("mended_at", str(node.clock.now()))
        log.info("the journal can be written again", node=node.id)

    async def _forget_old(self) -> None:
        node = self._node
        ended = [entry for entry in node.entries.values() if entry.ended.is_set()]
        horizon = node.clock.now() - node.limits.keep_ended_s
        too_many = len(ended) - node.limits.keep_ended_max
        if too_many > 0:
            ended.sort(key=lambda entry: entry.row.ended_at or 0.0)
        old = [e.row.id for i, e in enumerate(ended) if i < too_many or (e.row.ended_at or 0.0) < horizon][:500]
        for sandbox in old:
            del node.entries[sandbox]
        await node.journal.forget(old)

    def drain(self, *, on: bool, deadline_s: float | None) -> None:
        """Take no more creates, or take them again; what still lives at the deadline is evicted."""
        self._node.draining = on
        self._drain_at = self._node.clock.monotonic() + deadline_s if on and deadline_s is not None else None
        log.info("draining" if on else "taking creates again", node=self._node.id, deadline_s=deadline_s)

    async def _drain_due(self) -> None:
        if self._drain_at is None or self._node.clock.monotonic() < self._drain_at:
            return
        self._drain_at = None
        live = list(self._node.live())
        log.info("the drain's deadline has come", node=self._node.id, sandboxes=len(live))
        await asyncio.gather(*(self._end(entry, "evicted", "its node was drained") for entry in live))

    async def fingerprint(self, name: str) -> BackendFingerprint:
        """What the backend can do here, asked anew at most every half minute. Never raises."""
        now = self._node.clock.monotonic()
        known = self._found.get(name)
        if known is not None and known[0] > now:
            return known[1]
        try:
            async with asyncio.timeout(FINGERPRINT_S):
                found = await self._node.backends[name].fingerprint()
        except Exception as error:
            log.exception("a fingerprint failed", backend=name)
            found = BackendFingerprint(name=name, available=False, reason=f"its probe failed: {error!r}")
        self._found[name] = (now + FINGERPRINT_S, found)
        return found


def _disk_mib_free(node: Node) -> int:
    return shutil.disk_usage(node.data).free // (1024 * 1024)
