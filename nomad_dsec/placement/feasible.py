"""Feasible: may this node take it, and if not, the one reason that names what must change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nomad_dsec.placement.view import LAZY_IMAGES

if TYPE_CHECKING:
    from nomad_dsec.placement.ledger import Unseen
    from nomad_dsec.placement.view import Demand, NodeView

STALE = "stale"
DRAINING = "draining"
BACKEND = "backend_unavailable"
FEATURE = "feature_missing"
QOS = "qos_not_offered"
IMAGE = "image_missing"
CPUS = "cpus"
MEMORY = "memory"
DISK = "disk"
SANDBOXES = "sandboxes_max"
TOO_LARGE = "larger_than_node"

ROOM_REASONS = frozenset({CPUS, MEMORY, DISK, SANDBOXES})
_EPSILON = 1e-9  # sums of fractions of cores
_MANY = 1_000_000


def mismatch(view: NodeView, demand: Demand) -> str:
    """Why the node can't take it however empty it is, most lasting reason first; "" when it can."""
    offer = view.offers.get(demand.backend)
    if view.stale:
        return STALE
    if offer is None or not offer.available:
        return BACKEND
    if not demand.features <= offer.features:
        return FEATURE
    if offer.qos and demand.qos not in offer.qos:
        return QOS
    if demand.digest and demand.digest not in view.images and LAZY_IMAGES not in offer.features:
        return IMAGE
    if demand.cpus > view.cpus_total + _EPSILON or demand.memory_mib > view.memory_mib_total:
        return TOO_LARGE
    return DRAINING if view.draining else ""


def room(view: NodeView, demand: Demand, unseen: Unseen) -> tuple[int, str]:
    """How many more fit, and the resource that runs out first. Assumes no mismatch."""
    bounds = (
        (view.sandboxes_max - view.sandboxes - unseen.sandboxes, SANDBOXES),
        (_fit(view.memory_mib_total - view.memory_mib_used - unseen.memory_mib, demand.memory_mib), MEMORY),
        (_fit(view.cpus_total - view.cpus_used - unseen.cpus, demand.cpus), CPUS),
        (_MANY if demand.disk_mib <= view.disk_mib_free else 0, DISK),  # a ceiling, not a promise: layers are thin
    )
    count, reason = min(bounds, key=lambda bound: bound[0])
    return max(0, count), reason


def refusal(view: NodeView, demand: Demand, unseen: Unseen) -> str:
    """The reason against placing one sandbox there; "" when it fits."""
    reason = mismatch(view, demand)
    if reason:
        return reason
    count, scarce = room(view, demand, unseen)
    return "" if count else scarce


def _fit(free: float, each: float) -> int:
    return math.floor((free + _EPSILON) / each) if each > 0 else _MANY
