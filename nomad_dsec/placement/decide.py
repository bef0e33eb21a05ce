"""The decision: which node takes how many of a group, or an error that counts the nodes refused per reason."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libdsec.errors import CapacityError

from nomad_dsec.placement import feasible
from nomad_dsec.placement.rank import score, step

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from nomad_dsec.placement.ledger import Ledger
    from nomad_dsec.placement.view import Demand, NodeView

SAMPLE = 8  # nodes looked at for one sandbox: near the best choice at a cost that does not grow with the cluster
RETRY_AFTER_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`shares`: node -> how many; `unplaced`: how many found no room; `refusals`: reason -> nodes that gave it."""

    shares: Mapping[str, int]
    unplaced: int
    refusals: Mapping[str, int]


def place(
    nodes: Sequence[NodeView],
    demand: Demand,
    count: int,
    *,
    ledger: Ledger,
    rng: random.Random,
    excluded: Mapping[str, str] | None = None,
    sample: int = SAMPLE,
) -> Decision:
    """Choose nodes for `count` alike sandboxes; reserves nothing.

    excluded: node -> the reason it gave when it was asked, for nodes that this create must not ask again.
    """
    refused = dict(excluded or {})
    asked = [view for view in nodes if view.node not in refused]
    if count == 1 and len(asked) > sample:
        best = _best(rng.sample(asked, sample), demand, ledger, {})
        if best is not None:
            return Decision(shares={best.node: 1}, unplaced=0, refusals={})
    if count == 1:
        best = _best(asked, demand, ledger, refused)
        shares = {best.node: 1} if best is not None else {}
    else:
        shares = _spread(asked, demand, count, ledger, refused)
    return Decision(shares=shares, unplaced=count - sum(shares.values()), refusals=Counter(refused.values()))


def _best(views: Sequence[NodeView], demand: Demand, ledger: Ledger, refused: dict[str, str]) -> NodeView | None:
    """The best feasible node; `refused` receives the others' reasons."""
    best, best_score = None, 0.0
    for view in views:
        unseen = ledger.unseen(view.node)
        reason = feasible.refusal(view, demand, unseen)
        if reason:
            refused[view.node] = reason
            continue
        value = score(view, demand, unseen, ledger.in_flight(view.node))
        if best is None or value < best_score:
            best, best_score = view, value
    return best


def _spread(
    views: Sequence[NodeView], demand: Demand, count: int, ledger: Ledger, refused: dict[str, str]
) -> dict[str, int]:
    """Fill the emptiest node first, re-ranking after each portion; a full node's scarce resource goes to `refused`."""
    rooms: dict[str, tuple[int, str]] = {}
    heap: list[tuple[float, str, float]] = []
    for view in views:
        unseen = ledger.unseen(view.node)
        reason = feasible.mismatch(view, demand)
        if reason:
            refused[view.node] = reason
            continue
        rooms[view.node] = feasible.room(view, demand, unseen)
        heap.append((score(view, demand, unseen, ledger.in_flight(view.node)), view.node, step(view, demand)))
    heapq.heapify(heap)
    shares: dict[str, int] = {}
    portion = max(1, count // 256)  # bounds the work for a group of thousands
    left = count
    while left and heap:
        value, node, rise = heap[0]
        free, scarce = rooms[node]
        taken = min(portion, left, free)
        if taken == 0:
            refused[node] = scarce
            heapq.heappop(heap)
            continue
        left -= taken
        shares[node] = shares.get(node, 0) + taken
        rooms[node] = (free - taken, scarce)
        heapq.heapreplace(heap, (value + rise * taken, node, rise))
    return shares


def no_room(demand: Demand, *, wanted: int, unplaced: int, refusals: Mapping[str, int]) -> CapacityError:
    """The CapacityError of a create that found no place: per reason, how many nodes refused."""
    known = sum(refusals.values())
    said = ", ".join(f"{number} {reason}" for reason, number in sorted(refusals.items())) or "the gateway knows no node"
    details = {
        "refusals": dict(refusals),
        "nodes": known,
        "wanted": wanted,
        "unplaced": unplaced,
        "demand": {
            "backend": demand.backend,
            "cpus": demand.cpus,
            "memory_mib": demand.memory_mib,
            "disk_mib": demand.disk_mib,
            "qos": demand.qos,
            "digest": demand.digest,
        },
    }
    code, hint, retry = _verdict(refusals)
    return CapacityError(
        code,
        f"{unplaced} of {wanted} sandboxes found no node; nodes by reason: {said}",
        hint=hint,
        retry_after_s=retry,
        details=details,
    )


def _verdict(refusals: Mapping[str, int]) -> tuple[str, str, float | None]:
    """Code, hint and retry time: the reasons that pass by themselves win over those that need an operator."""
    lasting = {
        feasible.TOO_LARGE: ("capacity", "ask for less: no node is that large"),
        feasible.BACKEND: ("backend_unavailable", "see `dsec node ls` and `dsec doctor` for what each node can do"),
        feasible.FEATURE: ("backend_unavailable", "no node's backend has the feature that was asked for"),
        feasible.QOS: ("capacity", "no node takes this qos class"),
        feasible.IMAGE: ("image_missing", "import the image on a node with room"),
    }
    if not refusals:
        return "no_nodes", "start a node daemon and name it in gateway.nodes", RETRY_AFTER_S
    passing = {reason: number for reason, number in refusals.items() if reason not in lasting}
    if not passing:
        reason = max(refusals, key=lambda one: (refusals[one], one))
        code, hint = lasting[reason]
        return code, hint, None
    if set(passing) <= {feasible.STALE}:
        return "no_nodes", "no node answers; see `dsec node ls`", RETRY_AFTER_S
    if set(passing) <= {feasible.DRAINING, feasible.STALE}:
        return "draining", "end the drain or add nodes", RETRY_AFTER_S
    return "capacity", "kill idle sandboxes, ask for less, or try again later", RETRY_AFTER_S
