"""Health of sandboxes in Consul, in three grains, so that 3,200 sandboxes cost an agent next to nothing.

(a) the node's TTL check carries a digest; (b) transitions to unhealthy and back go to KV in batches, under a session
whose loss removes them; (c) a sandbox that asks for it is a service of its own, up to a cap. Pure: what to write only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nomad_dsec.cluster.consul import Put

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PREFIX = "dsec/nodes"  # <PREFIX>/<node>/unhealthy/<sandbox>: a policy may give each node its own
PENDING_MAX = 4096  # unhealthy sandboxes that are told of
REASON_CHARS = 512


def digest(states: Mapping[str, int], backends: Mapping[str, int], oldest_heartbeat_s: float) -> str:
    """The note of the node's check: sandboxes by state and by backend, age of the oldest sign of life. Under 1 KiB."""
    told = {"states": dict(states), "backends": dict(backends), "oldest_heartbeat_s": round(oldest_heartbeat_s, 1)}
    return json.dumps(told)


@dataclass(slots=True)
class Transitions:
    """Unhealthy sandboxes as Consul should have them, and what was not written yet. Bounded: those beyond PENDING_MAX
    are not told of, and counted in `untold`.
    """

    node: str
    _wanted: dict[str, str] = field(default_factory=dict)
    _written: dict[str, str] = field(default_factory=dict)
    untold: int = 0

    def want(self, unwell: Mapping[str, str]) -> None:
        """All that are unwell now, by reason; those that are not in it are well or gone. What is told stays told."""
        kept = {one: unwell[one] for one in self._wanted if one in unwell}
        for sandbox, reason in unwell.items():
            if len(kept) >= PENDING_MAX:
                break
            kept[sandbox] = reason
        self.untold = len(unwell) - len(kept)
        self._wanted = {one: _plain(reason) for one, reason in kept.items()}

    def pending(self, session: str, *, limit: int = PENDING_MAX) -> list[Put]:
        """Writes that bring Consul to what is wanted, at most `limit`: the rest comes with the next call."""
        puts = [
            Put(key=self._key(sandbox), value=reason.encode(), session=session)
            for sandbox, reason in self._wanted.items()
            if self._written.get(sandbox) != reason
        ]
        puts += [Put(key=self._key(sandbox), value=None) for sandbox in self._written if sandbox not in self._wanted]
        return puts[:limit]

    def written(self, puts: Iterable[Put]) -> None:
        """These writes arrived."""
        for put in puts:
            sandbox = put.key.rpartition("/")[2]
            if put.value is None:
                self._written.pop(sandbox, None)
            else:
                self._written[sandbox] = put.value.decode()

    def session_lost(self) -> None:
        """Consul has removed our keys: all must be written again."""
        self._written.clear()

    def _key(self, sandbox: str) -> str:
        return f"{PREFIX}/{self.node}/unhealthy/{sandbox}"


def _plain(reason: str) -> str:
    return reason[:REASON_CHARS].encode("utf-8", "replace").decode()
