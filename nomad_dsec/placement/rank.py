"""Rank: lower is better. Spread by the scarcer of CPU and memory, away from nodes that are busy starting."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nomad_dsec.placement.ledger import Unseen
    from nomad_dsec.placement.view import Demand, NodeView

STARTING_WEIGHT = 0.5  # a full start queue weighs as much as half a node of promised room
COLD_IMAGE = 0.3  # a lazily fetched image costs start time, so a warm node may be this much fuller


def score(view: NodeView, demand: Demand, unseen: Unseen, in_flight: int) -> float:
    """Share of the scarcer resource in use after placing one, plus start pressure, plus a cold image's price."""
    cpus = (view.cpus_used + unseen.cpus + demand.cpus) / max(view.cpus_total, 1e-9)
    memory = (view.memory_mib_used + unseen.memory_mib + demand.memory_mib) / max(view.memory_mib_total, 1)
    starting = max(view.starting, in_flight) / max(view.starting_max, 1)
    cold = COLD_IMAGE if demand.digest and demand.digest not in view.images else 0.0
    return max(cpus, memory) + STARTING_WEIGHT * min(starting, 2.0) + cold


def step(view: NodeView, demand: Demand) -> float:
    """How much the score of a node rises with each further sandbox of a group."""
    cpus = demand.cpus / max(view.cpus_total, 1e-9)
    memory = demand.memory_mib / max(view.memory_mib_total, 1)
    return max(cpus, memory) + STARTING_WEIGHT / max(view.starting_max, 1)
