"""The one door through which a sandbox changes state: checked, journaled, counted. Its end is always the same.

Nothing else writes `Entry.row`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from libdsec.errors import DsecError, PlatformError

from nomad_dsec.log import get_log
from nomad_dsec.node.row import from_handle, replace, to_handle
from nomad_dsec.node.states import check_transition

if TYPE_CHECKING:
    from libdsec.wire import State

    from nomad_dsec.model import Handle
    from nomad_dsec.node.core import Entry, Node
    from nomad_dsec.node.row import Row

log = get_log(__name__)
# Each end frees a system call filter in a work item of the kernel; a thousand of them waiting at once have deadlocked
# Linux 6.18 (ARCHITECTURE, Decisions). More at a time would not be faster: two cores are busy with eight.
STOPS_AT_ONCE = 32


class Door:
    """State changes of all sandboxes of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._stops = asyncio.Semaphore(STOPS_AT_ONCE)

    async def change(self, entry: Entry, *, state: State | None = None, durable: bool = False, **fields: Any) -> None:
        """Give the sandbox a new state or other fields, first in memory, then in the journal.

        Raises StateError illegal_transition, PlatformError journal_failed (memory is as before then).
        """
        before = entry.row
        if state is not None and state != before.state:
            check_transition(before.id, before.state, state)
            fields["state"] = state
        entry.row = replace(before, **fields)
        try:
            await self._node.journal.save(entry.row, now=self._node.clock.now(), durable=durable)
        except PlatformError:
            entry.row = _undo(entry.row, before, fields)
            raise

    async def note_handle(self, entry: Entry, handle: Handle) -> None:
        """Write the handle durably; the backend calls this before it makes what the handle names."""
        await self.change(entry, handle=from_handle(handle), durable=True)
        self._node.failpoints.reach("journaled")

    async def end(self, entry: Entry, *, reason: str, message: str = "", end_state: State = "exited") -> None:
        """Remove all of it and keep why; returns when it is gone. Idempotent: the first reason stands.

        A caller that goes away ends only its own wait. PlatformError stop_failed: something would not go; it stays
        `stopping` and is tried again by the supervisor.
        """
        if entry.ended.is_set():
            return
        if entry.stopping is None or entry.stopping.done():
            work = self._end(entry, reason, message, end_state)
            entry.stopping = self._node.room.spawn(f"end {entry.row.id}", work)
        await asyncio.shield(entry.stopping)

    async def _end(self, entry: Entry, reason: str, message: str, end_state: State) -> None:
        if entry.starting is not None and not entry.starting.done():
            entry.starting.cancel()
            await asyncio.wait([entry.starting])
        async with entry.lock:
            row = entry.row
            if row.state != "stopping":
                await self._write_anyway(
                    entry, state="stopping", reason=reason, message=message[:2000], end_state=end_state
                )
            entry.ending.set()
            self._node.failpoints.reach("stopping")
            await self._stop(entry)
            self._node.failpoints.reach("stopped")
            await self._finish(entry)

    async def _stop(self, entry: Entry) -> None:
        handle = entry.row.handle
        if handle is None:
            return
        backend = self._node.backend_of(entry)
        try:
            async with self._stops, asyncio.timeout(self._node.limits.stop_s):
                await backend.stop(to_handle(handle))
        except (DsecError, OSError, TimeoutError) as error:
            limits = self._node.limits
            entry.retry_at = self._node.clock.monotonic() + min(limits.stop_retry_max_s, 2.0**entry.stop_failures)
            entry.stop_failures += 1
            self._node.metrics.stop_failures.inc()
            log.error("a sandbox could not be removed", sandbox=entry.row.id, step="stop", error=repr(error))
            raise PlatformError(
                "stop_failed",
                f"{entry.row.id} could not be removed wholly: {error or type(error).__name__}",
                hint="the node goes on trying; its log has the details",
                retry_after_s=2.0,
            ) from error

    async def _finish(self, entry: Entry) -> None:
        node, row = self._node, entry.row
        # What is long goes too: thousands of ended ones are remembered, for their reasons.
        await self._write_anyway(
            entry, state=row.end_state, handle=None, ended_at=node.clock.now(), env={}, effective_policy={}
        )
        node.capacity.release(row.id)
        if entry.watching is not None and entry.watching is not asyncio.current_task():
            entry.watching.cancel()
        entry.watching = None  # a cancelled task keeps its frames
        entry.secrets = {}
        entry.channel = None
        entry.ended.set()
        node.metrics.ended(row.backend, entry.row.reason)
        log.info(
            "a sandbox has ended", sandbox=row.id, state=entry.row.state, reason=entry.row.reason, why=entry.row.message
        )
        node.failpoints.reach("ended")

    async def _write_anyway(self, entry: Entry, **changes: Any) -> None:
        """An end goes on when the journal can't be written: a full disk must not keep sandboxes alive."""
        try:
            await self.change(entry, **changes)
        except PlatformError as error:
            state = changes.pop("state", entry.row.state)
            entry.row = replace(entry.row, state=state, **changes)
            log.error("an end is not in the journal", sandbox=entry.row.id, state=state, error=str(error))


def _undo(now: Row, before: Row, fields: dict[str, Any]) -> Row:
    """Take back only these fields: others may have changed while the write was under way."""
    return replace(now, **{name: getattr(before, name) for name in fields})
