"""Where a stateless call goes: nodes that can take it, best first, and the reasons against the others. Pure.

A call holds no room that outlasts it, so what counts is how many this gateway has under way on each node. Nodes that
are about as busy are ordered by a hash of the program: the same program meets the same compile cache.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

from nomad_dsec.placement.feasible import mismatch
from nomad_dsec.placement.view import Demand

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nomad_dsec.placement.view import NodeView

BACKEND = "fncall"
LEVEL_PER_CORE = 2.0  # calls a core that are one level of business: within a level, the program's hash decides


def rank_nodes(
    views: Iterable[NodeView], *, digest: str, in_flight: Mapping[str, int], program: bytes
) -> tuple[Sequence[str], Mapping[str, int]]:
    """(node ids, best first; how many nodes were refused for each reason)."""
    demand = Demand(backend=BACKEND, cpus=0.0, memory_mib=0, disk_mib=0, digest=digest)
    refusals: Counter[str] = Counter()
    fit: list[NodeView] = []
    for view in views:
        reason = mismatch(view, demand)
        if reason:
            refusals[reason] += 1
        else:
            fit.append(view)
    if len(fit) > 1:
        home = hashlib.sha256(program).digest()
        fit.sort(key=lambda view: (_level(view, in_flight), _affinity(home, view.node)))
    return [view.node for view in fit], refusals


def _level(view: NodeView, in_flight: Mapping[str, int]) -> int:
    return int(in_flight.get(view.node, 0) / (max(view.cpus_total, 0.1) * LEVEL_PER_CORE))


def _affinity(home: bytes, node: str) -> bytes:
    return hashlib.sha256(home + node.encode()).digest()
