"""Which sandboxes are unwell, for Consul: asked over their own channel, and by what the node knows of their ends.

Runs only where Consul is configured; nothing else depends on it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from libdsec.errors import DsecError, StateError

from nomad_dsec.cluster.health import digest
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from nomad_dsec.node.core import Entry, Node
    from nomad_dsec.node.execs import Execs

log = get_log(__name__)
PING_S = 5.0
MISSES = 2  # one may be a node under load
AT_ONCE = 32
TOLD_S = 300.0  # how long an end that nobody asked for is told of
NOT_ASKED_FOR = frozenset(("oom", "init_exited", "node_lost", "policy", "error"))


class HealthWatch:
    """Run `run()` as a task; `digest` and `unwell` may be asked at any time. every_s 0: PID 1 is never asked."""

    def __init__(self, node: Node, execs: Execs, *, every_s: float) -> None:
        self._node = node
        self._execs = execs
        self._every_s = every_s
        self._heard: dict[str, float] = {}  # sandbox -> monotonic seconds of the last sign of life
        self._missed: dict[str, int] = {}

    async def run(self) -> None:
        """Until cancelled: every running sandbox once in every_s, some at a time, spread over the time."""
        while self._every_s > 0:
            asked = [entry for entry in self._node.live() if entry.row.state == "running"]
            waves = [asked[start : start + AT_ONCE] for start in range(0, len(asked), AT_ONCE)]
            for wave in waves:
                await asyncio.gather(*(self.ask(entry) for entry in wave))
                await asyncio.sleep(self._every_s / len(waves))
            known = {entry.row.id for entry in self._node.live()}
            self._heard = {one: at for one, at in self._heard.items() if one in known}
            self._missed = {one: times for one, times in self._missed.items() if one in known}
            if not waves:
                await asyncio.sleep(self._every_s)

    async def ask(self, entry: Entry) -> None:
        """One sandbox, once; never raises."""
        sandbox = entry.row.id
        try:
            channel = await self._execs.channel(entry)
            await channel.ping(timeout_s=min(PING_S, self._every_s))
        except StateError:
            return  # it has ended meanwhile
        except DsecError as error:
            if entry.row.state == "running":
                self._missed[sandbox] = self._missed.get(sandbox, 0) + 1
                if self._missed[sandbox] == MISSES:
                    log.warning("a sandbox's PID 1 does not answer", sandbox=sandbox, error=str(error))
            return
        self._heard[sandbox] = self._node.clock.monotonic()
        self._missed.pop(sandbox, None)

    def digest(self) -> str:
        """All that live. Without a sign of life yet, or none asked for, a sandbox counts as heard now.

        Made with each heartbeat on the daemon's own loop: a few milliseconds for thousands.
        """
        states: Counter[str] = Counter()
        backends: Counter[str] = Counter()
        now = oldest = self._node.clock.monotonic()
        for entry in self._node.live():
            row = entry.row
            states[row.state] += 1
            backends[row.backend] += 1
            if row.state == "running":
                oldest = min(oldest, self._heard.get(row.id, now))
        return digest(states, backends, now - oldest)

    def unwell(self) -> dict[str, str]:
        """Sandbox -> why. A reason does not change by itself, so that it is written once."""
        now = self._node.clock.now()
        found = ((sandbox, self._reason(entry, now)) for sandbox, entry in self._node.entries.items())
        return {sandbox: reason for sandbox, reason in found if reason}

    def _reason(self, entry: Entry, now: float) -> str:
        row = entry.row
        if row.state in ("exited", "lost"):
            told = row.state == "lost" or row.reason.partition("(")[0] in NOT_ASKED_FOR
            if told and now - (row.ended_at or 0.0) < TOLD_S:
                return f"{row.reason}: {row.message}" if row.message else row.reason
            return ""
        if entry.stop_failures:
            return "stop_failed: something of it can't be removed"
        if row.state == "running" and self._missed.get(row.id, 0) >= MISSES:
            return "no_answer: its PID 1 does not answer"
        return ""
