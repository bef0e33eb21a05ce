"""After the daemon's death: each journaled sandbox is adopted, ended or cleaned, then what nobody owns is removed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from libdsec.errors import DsecError

from nomad_dsec.backends.base import Fate
from nomad_dsec.log import get_log
from nomad_dsec.node.capacity import Need
from nomad_dsec.node.core import Entry
from nomad_dsec.node.row import replace, to_handle
from nomad_dsec.node.states import is_live

if TYPE_CHECKING:
    from nomad_dsec.backends.base import Recovered
    from nomad_dsec.node.core import Node
    from nomad_dsec.node.door import Door
    from nomad_dsec.node.row import Row
    from nomad_dsec.node.supervisor import Supervisor

log = get_log(__name__)
AT_ONCE = 32
RECOVER_S = 30.0
RETRY_S = 5.0
# The idle stock of a dead daemon's pools and images that nobody uses; a sandbox has a directory of its own besides.
STOCK = ("cgroup ", "link ", "mount of ")
HALF_MADE = "the node daemon ended while it was being made"


class Recovery:
    """Runs once, before the daemon serves."""

    def __init__(self, node: Node, door: Door, supervisor: Supervisor) -> None:
        self._node = node
        self._door = door
        self._supervisor = supervisor
        self._same_boot = True
        self._policies: dict[bytes, dict[str, Any]] = {}

    async def run(self, rows: list[Row]) -> dict[str, int]:
        """Bring memory and machine in line with the journal; returns how many came to which state."""
        turns = asyncio.Semaphore(AT_ONCE)
        self._same_boot = self._node.journal.facts().get("boot_id") == self._node.boot_id
        await self._node.journal.put_fact("boot_id", self._node.boot_id)
        entries = [self._entry(row) for row in rows]

        async def recover(entry: Entry) -> None:
            async with turns:
                await self._recover(entry)

        await asyncio.gather(*(recover(entry) for entry in entries if not entry.ended.is_set()))
        self._node.failpoints.reach("recovered")
        await self._sweep()
        counts: dict[str, int] = {}
        for entry in entries:
            counts[entry.row.state] = counts.get(entry.row.state, 0) + 1
        log.info("the journal has been recovered", node=self._node.id, **counts)
        return counts

    def _entry(self, row: Row) -> Entry:
        # One policy stands in thousands of rows; in memory it is one object, as it was before the restart.
        shared = self._policies.setdefault(msgspec.json.encode(row.effective_policy), row.effective_policy)
        row = replace(row, effective_policy=shared)
        entry = Entry(row=row)
        self._node.entries[row.id] = entry
        if is_live(row.state):
            need = Need(cpus=row.cpus, memory_mib=row.memory_mib)
            self._node.capacity.promise(row.id, need, outside=row.outside)
        else:
            entry.ending.set()
            entry.ended.set()
        return entry

    async def _recover(self, entry: Entry) -> None:
        row = entry.row
        if row.backend not in self._node.backends:
            log.error("a sandbox waits for its backend to come back", sandbox=row.id, backend=row.backend)
            return
        try:
            if row.state == "creating":
                await self._door.end(entry, reason="error(node_restart)", message=HALF_MADE)
            elif row.state == "stopping" or row.handle is None:
                await self._door.end(entry, reason=row.reason, message=row.message, end_state=row.end_state)
            else:
                await self._adopt(entry)
        except DsecError as error:  # stop_failed: housekeeping tries again
            log.error("a sandbox could not be recovered yet", sandbox=row.id, state=row.state, error=str(error))

    async def _adopt(self, entry: Entry) -> None:
        assert entry.row.handle is not None
        backend = self._node.backend_of(entry)
        try:
            async with asyncio.timeout(RECOVER_S):
                found = await backend.recover(to_handle(entry.row.handle))
        except (DsecError, OSError, TimeoutError) as error:
            # What can't be told is not given up: it may well live, and someone may be using it.
            log.error("the fate of a sandbox can't be told yet", sandbox=entry.row.id, error=repr(error))
            self._node.room.spawn(f"adopt {entry.row.id}", self._adopt_later(entry))
            return
        await self._apply(entry, found)

    async def _adopt_later(self, entry: Entry) -> None:
        await asyncio.sleep(RETRY_S)
        if not entry.ending.is_set():
            await self._adopt(entry)

    async def _apply(self, entry: Entry, found: Recovered) -> None:
        row = entry.row
        if found.fate in (Fate.RUNNING, Fate.PAUSED):
            state = "running" if found.fate is Fate.RUNNING else "paused"
            if state != row.state:  # the daemon died in the middle of a pause or resume: what is found is what holds
                entry.row = replace(row, state=state)
                await self._door.change(entry, durable=True)
            await self._baseline(entry)
            self._supervisor.watch(entry)
            log.info("a sandbox was adopted", sandbox=row.id, state=state)
            return
        exited = found.fate is Fate.EXITED
        if not exited and self._same_boot:
            self._node.metrics.lost.inc()
        await self._door.end(
            entry,
            reason=found.reason or ("init_exited" if exited else "node_lost"),
            message=found.message,
            end_state="exited" if exited else "lost",
        )

    async def _baseline(self, entry: Entry) -> None:
        """OOM kills of the time before must not be taken for the cause when its init ends."""
        assert entry.row.handle is not None
        try:
            await self._node.backend_of(entry).stats(to_handle(entry.row.handle))
        except (DsecError, OSError) as error:
            log.warning("a sandbox could not be measured", sandbox=entry.row.id, error=repr(error))

    async def _sweep(self) -> None:
        for name, backend in self._node.backends.items():
            keep = [
                to_handle(entry.row.handle)
                for entry in self._node.live()
                if entry.row.backend == name and entry.row.handle is not None
            ]
            try:
                removed = await backend.sweep(keep)
            except (DsecError, OSError) as error:
                log.error("a sweep failed", backend=name, error=repr(error))
                continue
            for line in removed:
                if not line.startswith(STOCK):
                    self._node.metrics.orphans.inc()
                log.warning("a leftover was removed", node=self._node.id, backend=name, what=line)
