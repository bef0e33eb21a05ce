"""What the gateway remembers of sandboxes: whose they are, what they use, and how they were last seen.

Soft state: filled by replies and by listings of nodes, rebuilt after a restart. It answers for nodes that can't be
asked, and counts use per namespace. A namespace never changes, so it may be believed for ever; states may be old.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from libdsec.wire import LIVE_STATES, SandboxInfo

if TYPE_CHECKING:
    from collections.abc import Iterable

_LIVE = frozenset(LIVE_STATES)


@dataclass(slots=True)
class Usage:
    """Live sandboxes of a namespace and what they were promised."""

    sandboxes: int = 0
    cpus: float = 0.0
    memory_mib: int = 0
    disk_mib: int = 0

    def plus(self, sandboxes: int, cpus: float, memory_mib: int, disk_mib: int) -> Usage:
        """The sum, as a new value."""
        return Usage(
            self.sandboxes + sandboxes, self.cpus + cpus, self.memory_mib + memory_mib, self.disk_mib + disk_mib
        )


@dataclass(slots=True)
class _Seen:
    info: SandboxInfo
    at: float


class Roster:
    """Sandboxes by node. `at` and `as_of` are monotonic seconds."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, _Seen]] = {}
        self._usage: dict[str, Usage] = {}
        self._live: Counter[str] = Counter()

    def namespace_of(self, node: str, sandbox: str) -> str | None:
        """Whose it is, None when it was never seen."""
        seen = self._nodes.get(node, {}).get(sandbox)
        return seen.info.namespace if seen is not None else None

    def get(self, node: str, sandbox: str) -> SandboxInfo | None:
        """As last seen."""
        seen = self._nodes.get(node, {}).get(sandbox)
        return seen.info if seen is not None else None

    def on_node(self, node: str) -> list[SandboxInfo]:
        """All that were last seen there."""
        return [seen.info for seen in self._nodes.get(node, {}).values()]

    def usage(self, namespace: str) -> Usage:
        """Live use of a namespace over all nodes."""
        return self._usage.get(namespace, Usage())

    def live_on(self, node: str) -> int:
        """How many of the node's sandboxes were last seen live."""
        return self._live[node]

    def put(self, info: SandboxInfo, *, at: float) -> None:
        """A reply showed this sandbox. What is large and only the node can keep true is not kept."""
        kept = msgspec.structs.replace(info, timings_ms={}, policy={}, token="")
        mine = self._nodes.setdefault(info.node, {})
        before = mine.get(info.id)
        if before is not None:
            self._count(before.info, -1)
        mine[info.id] = _Seen(kept, at)
        self._count(kept, 1)

    def replace(self, node: str, infos: Iterable[SandboxInfo], *, as_of: float) -> None:
        """The node's whole listing, asked for at `as_of`: what is missing is gone, unless a later reply showed it."""
        listed = {info.id: info for info in infos}
        mine = self._nodes.setdefault(node, {})
        for sandbox in [one for one, seen in mine.items() if one not in listed and seen.at <= as_of]:
            self._count(mine.pop(sandbox).info, -1)
        for sandbox, info in listed.items():
            before = mine.get(sandbox)
            if before is None or before.at <= as_of:
                self.put(info, at=as_of)

    def forget(self, node: str) -> None:
        """Drop all of a node's."""
        for seen in self._nodes.pop(node, {}).values():
            self._count(seen.info, -1)
        self._live.pop(node, None)

    def _count(self, info: SandboxInfo, sign: int) -> None:
        if info.state not in _LIVE:
            return
        self._live[info.node] += sign
        total = self.usage(info.namespace).plus(sign, sign * info.cpus, sign * info.memory_mib, sign * info.disk_mib)
        if total.sandboxes:
            self._usage[info.namespace] = total
        else:
            self._usage.pop(info.namespace, None)  # so that sums of fractions leave no dust
