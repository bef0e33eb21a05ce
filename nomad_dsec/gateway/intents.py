"""Nothing orphaned: ids are journaled before a node hears of them, and removed once their fate is settled.

An id that is still journaled when the gateway starts belongs to a create whose caller got no reply: the reaper removes
it from its node. The same reaper undoes gangs and creates whose callers went away.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from libdsec.errors import DsecError, NotFoundError, PlatformError, UsageError
from libdsec.wire import SandboxInfo

from nomad_dsec.ids import node_of
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from nomad_dsec.clock import Clock
    from nomad_dsec.gateway.db import Database, Statement
    from nomad_dsec.gateway.metrics import GatewayMetrics
    from nomad_dsec.gateway.nodes import NodeTable

log = get_log(__name__)
AT_ONCE = 32
DELETE_TIMEOUT_S = 75.0  # a node's own bound for a stop is 60
SECOND_PASS_S = 5.0  # a create that was cut may reach its node after the delete did
BACKOFF_MAX_S = 30.0
MAX_REPLY_BYTES = 1024 * 1024


def record_statements(ids: Iterable[str], now: float) -> list[Statement]:
    """Journal these ids."""
    return [
        ("INSERT OR REPLACE INTO intents (sandbox, node, at) VALUES (?, ?, ?)", (one, node_of(one), now)) for one in ids
    ]


def settle_statements(ids: Iterable[str]) -> list[Statement]:
    """Their fate is known."""
    return [("DELETE FROM intents WHERE sandbox = ?", (one,)) for one in ids]


class Reaper:
    """Removes doomed sandboxes from their nodes, however long it takes. `spawn` runs a coroutine in the background."""

    def __init__(
        self,
        db: Database,
        table: NodeTable,
        clock: Clock,
        metrics: GatewayMetrics,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._db = db
        self._table = table
        self._clock = clock
        self._metrics = metrics
        self._spawn = spawn
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tried: dict[str, asyncio.Event] = {}

    def recover(self) -> int:
        """Doom what a predecessor left; returns how many."""
        left = [row[0] for row in self._db.read("SELECT sandbox FROM intents")]
        if left:
            log.warning("creates of a predecessor without a reply are undone", count=len(left))
        self.doom(left, passes=2)
        return len(left)

    def doom(self, ids: Iterable[str], *, passes: int = 1) -> None:
        """Remove these, journaled first. passes: 2 when a create may still be on its way to the node."""
        for sandbox in ids:
            if sandbox in self._tried:
                continue
            self._tried[sandbox] = asyncio.Event()
            self._db.write_nowait(*record_statements([sandbox], self._clock.now()))
            self._spawn(self._reap(sandbox, passes))

    async def wait_tried(self, ids: Iterable[str], *, timeout_s: float) -> None:
        """Until each was removed once, or the time is over (then the reaper goes on by itself)."""
        events = [self._tried[sandbox] for sandbox in ids if sandbox in self._tried]
        try:
            async with asyncio.timeout(timeout_s):
                for event in events:
                    await event.wait()
        except TimeoutError:
            log.warning("some sandboxes of an undone create are not gone yet", count=len(events))

    @property
    def pending(self) -> int:
        """How many are doomed and not settled."""
        return len(self._tried)

    async def _reap(self, sandbox: str, passes: int) -> None:
        delay_s = 0.2
        while passes:
            try:
                async with self._slots:
                    existed = await self._delete(sandbox)
            except DsecError as error:
                log.warning("an unwanted sandbox could not be removed yet", sandbox=sandbox, error=str(error))
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, BACKOFF_MAX_S)
                continue
            self._tried[sandbox].set()
            self._metrics.reaped(existed=existed)
            passes -= 1
            if passes:
                await asyncio.sleep(SECOND_PASS_S)
        self._db.write_nowait(*settle_statements([sandbox]))
        del self._tried[sandbox]

    async def _delete(self, sandbox: str) -> bool:
        """True when there was something to remove."""
        try:
            node = self._table.find(node_of(sandbox))
        except NotFoundError as error:
            raise PlatformError("node_unreachable", f"no endpoint is the node of {sandbox}") from error
        path = f"/v1/sandboxes/{sandbox}?reason=killed"
        try:
            info = await node.client.call(
                "DELETE", path, SandboxInfo, timeout_s=DELETE_TIMEOUT_S, max_bytes=MAX_REPLY_BYTES
            )
        except UsageError:
            return False
        self._table.roster.put(info, at=self._clock.monotonic())
        return True
