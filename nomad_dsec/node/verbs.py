"""What can be asked of a sandbox that exists: pause, resume, kill, TTL, lease, use, plan. Creating is create.py.

Verbs of one sandbox follow each other. A verb that has begun is carried through, also when the one who asked goes away.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from libdsec.errors import DeadlineExceeded, DsecError, NotSupported, PlatformError, UsageError
from libdsec.wire import NetworkInfo

from nomad_dsec.backends.base import Pausable, Planned
from nomad_dsec.log import get_log
from nomad_dsec.node.row import to_handle, to_spec
from nomad_dsec.node.states import check_verb

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from libdsec.wire import Metrics, SandboxInfo

    from nomad_dsec.model import Handle
    from nomad_dsec.node.core import Entry, Node
    from nomad_dsec.node.door import Door
    from nomad_dsec.node.supervisor import Supervisor

log = get_log(__name__)
KILL_REASONS = ("killed", "evicted", "policy", "lease_expired")
STATS_S = 5.0


class Verbs:
    """The verbs, by sandbox id."""

    def __init__(self, node: Node, door: Door, supervisor: Supervisor) -> None:
        self._node = node
        self._door = door
        self._supervisor = supervisor

    async def kill(self, sandbox: str, reason: str = "killed") -> SandboxInfo:
        """End it; returns when its resources are gone. Idempotent: an ended one's info says how it ended."""
        if reason not in KILL_REASONS:
            raise UsageError("bad_reason", f"{reason[:80]!r}", field="reason", hint=f"use {', '.join(KILL_REASONS)}")
        entry = self._node.entry(sandbox)
        await self._door.end(entry, reason=reason)
        return self._node.info(entry)

    async def pause(self, sandbox: str) -> SandboxInfo:
        """Freeze it: journaled as paused before this returns; when freezing fails it goes on running."""
        entry = self._node.entry(sandbox)
        await self._through(f"pause {sandbox}", self._pause(entry, self._pausable(entry, "pause")))
        return self._node.info(entry)

    async def resume(self, sandbox: str) -> SandboxInfo:
        """Thaw it; a new incarnation, so that timers set for the old one can't end it."""
        entry = self._node.entry(sandbox)
        await self._through(f"resume {sandbox}", self._resume(entry, self._pausable(entry, "resume")))
        return self._node.info(entry)

    async def set_timeout(self, sandbox: str, timeout_s: float) -> SandboxInfo:
        """Set the TTL, counted from now."""
        now = self._node.clock.now()
        return await self._set_times(sandbox, "set_timeout", timeout_s=timeout_s, expires_at=now + timeout_s)

    async def lease(self, sandbox: str, lease_s: float) -> SandboxInfo:
        """Renew the lease, counted from now."""
        now = self._node.clock.now()
        return await self._set_times(sandbox, "lease", lease_s=lease_s, lease_expires_at=now + lease_s)

    async def metrics(self, sandbox: str) -> Metrics:
        """Its use now."""
        entry = self._node.entry(sandbox)
        self._check(entry, "metrics")
        assert entry.row.handle is not None
        try:
            async with asyncio.timeout(STATS_S):
                return await self._node.backend_of(entry).stats(to_handle(entry.row.handle))
        except TimeoutError as late:
            raise DeadlineExceeded("stats_timeout", f"{sandbox} could not be measured in {STATS_S:g} s") from late

    def network(self, sandbox: str) -> NetworkInfo:
        """The effective network policy, as the backend reported it at start."""
        shown = self._node.entry(sandbox).row.effective_policy
        network = shown.get("network", "none")
        facts = network if isinstance(network, dict) else {"kind": str(network)}
        return NetworkInfo(
            kind=str(facts.get("kind", "none")),
            generation=int(facts.get("generation", 1)),
            address=str(facts.get("address", shown.get("address", ""))),
            holes=[str(hole) for hole in facts.get("holes", shown.get("holes", []))],
        )

    def plan(self, sandbox: str) -> list[dict[str, Any]]:
        """What its backend did, or would do, to start it: operations as data."""
        entry = self._node.entry(sandbox)
        backend = self._node.backend_of(entry)
        if not isinstance(backend, Planned):
            raise NotSupported("no_plan", f"{entry.row.backend} can't print a plan on this node")
        return backend.plan(to_spec(entry.row, {}))

    def _check(self, entry: Entry, verb: str) -> None:
        row = entry.row
        check_verb(row.id, row.state, verb, reason=row.reason, message=row.message)

    def _pausable(self, entry: Entry, verb: str) -> Pausable:
        backend = self._node.backend_of(entry)
        if not isinstance(backend, Pausable):
            raise NotSupported(
                "pause_not_supported", f"{entry.row.backend} sandboxes of this node can't {verb}", field="backend"
            )
        return backend

    async def _through(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.shield(self._node.room.spawn(name, work))

    async def _pause(self, entry: Entry, backend: Pausable) -> None:
        async with entry.lock:
            self._check(entry, "pause")
            if entry.row.state == "paused":
                return
            await self._door.change(entry, state="pausing")
            self._node.failpoints.reach("pausing")
            try:
                await self._act(entry, "pause", backend.pause)
                await self._door.change(entry, state="paused", durable=True)
            except DsecError:
                await self._back_to_running(entry, backend)
                raise
            self._node.failpoints.reach("paused")

    async def _back_to_running(self, entry: Entry, backend: Pausable) -> None:
        """A failed pause leaves it running, also when it froze but that could not be written down."""
        try:
            await self._act(entry, "resume", backend.resume)
        except DsecError as error:
            log.error("a failed pause could not be undone", sandbox=entry.row.id, error=str(error))
        await self._door.change(entry, state="running")

    async def _resume(self, entry: Entry, backend: Pausable) -> None:
        async with entry.lock:
            self._check(entry, "resume")
            if entry.row.state == "running":
                return
            await self._door.change(entry, state="resuming")
            self._node.failpoints.reach("resuming")
            try:
                await self._act(entry, "resume", backend.resume)
            except DsecError:
                await self._door.change(entry, state="paused")
                raise
            await self._door.change(entry, state="running", incarnation=entry.row.incarnation + 1)
            self._supervisor.watch(entry)
            self._node.failpoints.reach("resumed")

    async def _act(self, entry: Entry, verb: str, act: Callable[[Handle], Coroutine[Any, Any, None]]) -> None:
        assert entry.row.handle is not None
        limit_s = self._node.limits.pause_s
        try:
            async with asyncio.timeout(limit_s):
                await act(to_handle(entry.row.handle))
        except TimeoutError as late:
            raise DeadlineExceeded(
                f"{verb}_timeout", f"{entry.row.id} did not {verb} within {limit_s:g} s", details={"step": verb}
            ) from late
        except OSError as error:
            raise PlatformError(
                f"{verb}_failed", f"{entry.row.id} could not {verb}: {error}", details={"step": verb}
            ) from error

    async def _set_times(self, sandbox: str, verb: str, **times: Any) -> SandboxInfo:
        entry = self._node.entry(sandbox)
        async with entry.lock:
            self._check(entry, verb)
            if entry.row.state == "creating":
                times.pop("expires_at", None)  # the TTL counts from ready, which is yet to come
                times.pop("lease_expires_at", None)
            await self._door.change(entry, **times)
            self._supervisor.set_timer(entry)
        return self._node.info(entry)
