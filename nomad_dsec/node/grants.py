"""Grants: cpu and memory that allocations of a cluster lend to this node, and how they are taken back.

A withdrawn grant is out of the room at once, so nothing new starts in it. What is promised beyond the room then goes:
best_effort sandboxes at once, the rest when the deadline comes; the youngest first, for they lose the least.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from libdsec.errors import DsecError, NotFoundError, StateError, UsageError
from libdsec.wire_tasks import GrantList, task_key

from nomad_dsec.log import get_log
from nomad_dsec.node.task_events import EventRing
from nomad_dsec.node.tasks_rows import GRANT, GrantRow, grant_as_task, grant_info, replace_grant

if TYPE_CHECKING:
    from libdsec.wire_tasks import GrantRequest, StopTaskRequest, TaskInfo

    from nomad_dsec.node.core import Entry, Node
    from nomad_dsec.node.door import Door

log = get_log(__name__)
LOOK_S = 0.1  # how often a withdrawal looks whether sandboxes that end by themselves have made room


@dataclass(slots=True, eq=False, kw_only=True)
class LiveGrant:
    """One grant in memory."""

    row: GrantRow
    withdrawn: asyncio.Event = field(default_factory=asyncio.Event)
    withdrawing: asyncio.Task[None] | None = None
    deadline: float = 0.0


class Grants:
    """The verbs, by key."""

    def __init__(self, node: Node, door: Door) -> None:
        self._node = node
        self._door = door
        self._live: dict[str, LiveGrant] = {}
        self._turn = asyncio.Lock()
        self.events = EventRing(node.clock)

    def get(self, key: str) -> LiveGrant:
        """The record, or NotFoundError grant_not_found."""
        grant = self._live.get(key)
        if grant is None:
            raise NotFoundError("grant_not_found", f"node {self._node.id} knows no grant {key[:80]}", field="key")
        return grant

    def info(self, key: str) -> TaskInfo:
        """As drivers see it."""
        return grant_as_task(self.get(key).row)

    def ls(self) -> GrantList:
        """All of them."""
        return GrantList(grants=[grant_info(grant.row) for grant in self._live.values()])

    def homes(self) -> dict[str, str]:
        """The allocation's directory of each."""
        return {key: grant.row.home for key, grant in self._live.items()}

    async def put(self, key: str, request: GrantRequest) -> TaskInfo:
        """Add to the room, or change the size of a grant that is active. A withdrawn one stays withdrawn."""
        if key != task_key(request.task_id):
            raise UsageError("bad_key", f"{key[:80]} is not the key of {request.task_id[:80]!r}", field="key")
        if not self._node.capacity.granted:
            raise UsageError(
                "static_capacity",
                f"the room of node {self._node.id} is static: it can't be lent any",
                hint="run the node daemon with --capacity granted",
            )
        grant = self._live.get(key)
        if grant is None:
            row = GrantRow(
                key=key,
                task_id=request.task_id,
                boot_id=self._node.boot_id,
                alloc_id=request.alloc_id,
                task_name=request.task_name,
                home=request.home,
                cpus=request.cpus,
                memory_mib=request.memory_mib,
                granted_at=self._node.clock.now(),
            )
            await self._node.journal.put_record(GRANT, key, row, durable=True)
            grant = self._live.setdefault(key, LiveGrant(row=row))
            self._tell(grant, f"lends {row.cpus:g} cores and {row.memory_mib} MiB to node {self._node.id}")
        elif grant.row.state == "active":
            await self._save(grant, cpus=request.cpus, memory_mib=request.memory_mib)
        self._recount()
        return grant_as_task(grant.row)

    def _recount(self) -> None:
        active = [grant.row for grant in self._live.values() if grant.row.state == "active"]
        self._node.capacity.lend(cpus=sum(row.cpus for row in active), memory_mib=sum(row.memory_mib for row in active))

    async def wait(self, key: str, timeout_s: float) -> TaskInfo:
        """As it is once it is withdrawn, or after timeout_s."""
        grant = self.get(key)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await grant.withdrawn.wait()
        return grant_as_task(grant.row)

    async def stop(self, key: str, request: StopTaskRequest) -> TaskInfo:
        """Withdraw it; returns when nothing runs in it any more. A second call may bring the deadline forward."""
        grant = self.get(key)
        await self._withdraw_by(grant, request.timeout_s)
        return grant_as_task(grant.row)

    async def _withdraw_by(self, grant: LiveGrant, timeout_s: float) -> None:
        if grant.withdrawn.is_set():
            return
        deadline = asyncio.get_running_loop().time() + timeout_s
        if grant.withdrawing is None or grant.withdrawing.done():
            grant.deadline = deadline
            work = self._withdraw(grant)
            grant.withdrawing = self._node.room.spawn(f"withdraw grant {grant.row.key}", work)
        grant.deadline = min(grant.deadline, deadline)
        await asyncio.shield(grant.withdrawing)

    async def _withdraw(self, grant: LiveGrant) -> None:
        await self._save(grant, state="withdrawing")
        self._recount()
        log.info("a grant is withdrawn", grant=grant.row.task_id, over=self._node.capacity.is_over)
        evicted = await self._evict(grant, best_effort=True)
        await self._wait_room(grant)
        evicted += await self._evict(grant, best_effort=False)
        await self._save(grant, state="withdrawn", evicted=evicted, withdrawn_at=self._node.clock.now())
        grant.withdrawn.set()
        self._tell(grant, f"taken back from node {self._node.id}; {evicted} sandboxes were evicted")

    async def _wait_room(self, grant: LiveGrant) -> None:
        """Until sandboxes that ended by themselves made room, or the deadline, which a later stop may bring forward."""
        loop = asyncio.get_running_loop()
        while self._node.capacity.is_over:
            left = grant.deadline - loop.time()
            if left <= 0:
                return
            await asyncio.sleep(min(LOOK_S, left))

    async def _evict(self, grant: LiveGrant, *, best_effort: bool) -> int:
        """End sandboxes until what is promised fits; returns how many. One withdrawal at a time chooses."""
        message = f"the capacity lent by allocation {grant.row.alloc_id or grant.row.task_id} was withdrawn"
        async with self._turn:
            victims = self._victims(best_effort=best_effort)
            done = await asyncio.gather(
                *(self._door.end(entry, reason="evicted", message=message) for entry in victims),
                return_exceptions=True,
            )
        for error in done:
            if isinstance(error, BaseException):
                log.error("an evicted sandbox did not go wholly", grant=grant.row.task_id, error=repr(error))
        return len(victims)

    def _victims(self, *, best_effort: bool) -> list[Entry]:
        capacity = self._node.capacity
        cpus, memory_mib = capacity.cpus_used, capacity.memory_mib_used
        inside = [entry for entry in self._node.live() if not entry.row.outside]
        # Those that end anyway give their room back without our doing.
        for entry in inside:
            if entry.ending.is_set():
                cpus, memory_mib = cpus - entry.row.cpus, memory_mib - entry.row.memory_mib
        candidates = [entry for entry in inside if not entry.ending.is_set()]
        if best_effort:
            candidates = [entry for entry in candidates if entry.row.qos == "best_effort"]
        candidates.sort(key=lambda entry: (entry.row.qos != "best_effort", -entry.row.created_at))
        victims = []
        for entry in candidates:
            if cpus <= capacity.totals.cpus + 1e-6 and memory_mib <= capacity.totals.memory_mib:
                break
            victims.append(entry)
            cpus, memory_mib = cpus - entry.row.cpus, memory_mib - entry.row.memory_mib
        return victims

    async def destroy(self, key: str, *, force: bool) -> None:
        """Forget it. StateError task_running unless withdrawn or forced, which withdraws it at once."""
        grant = self.get(key)
        if not grant.withdrawn.is_set():
            if not force:
                raise StateError("task_running", "the grant is active", hint="stop it, or force=1")
            await self._withdraw_by(grant, 0.0)
        self._live.pop(key, None)
        await self._node.journal.drop_record(GRANT, key)

    async def _save(self, grant: LiveGrant, **changes: object) -> None:
        grant.row = replace_grant(grant.row, **changes)
        await self._node.journal.put_record(GRANT, grant.row.key, grant.row, durable=True)

    def _tell(self, grant: LiveGrant, message: str) -> None:
        self.events.add(grant.row.task_id, grant.row.alloc_id, grant.row.task_name, message)

    async def recover(self) -> None:
        """After a restart of the daemon grants stand, and a withdrawal is carried on; of the machine, they are gone."""
        for blob in self._node.journal.records(GRANT):
            row: GrantRow = msgspec.json.decode(blob, type=GrantRow)
            if row.boot_id != self._node.boot_id:
                await self._node.journal.drop_record(GRANT, row.key)
                continue
            grant = self._live[row.key] = LiveGrant(row=row)
            if row.state == "withdrawn":
                grant.withdrawn.set()
        self._recount()
        for grant in self._live.values():
            if grant.row.state == "withdrawing":
                grant.withdrawing = self._node.room.spawn(f"withdraw grant {grant.row.key}", self._again(grant))

    async def _again(self, grant: LiveGrant) -> None:
        """Nobody knows the old deadline: it is over."""
        grant.deadline = asyncio.get_running_loop().time()
        with suppress(DsecError):
            await self._withdraw(grant)
