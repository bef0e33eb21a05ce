"""What placement knows of a node and of a demand. Views are snapshots: the node has the last word."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from libdsec.wire import NodeInfo

LAZY_IMAGES = "lazy_images"  # backend feature: starts without the whole image on the node
QOS_ATTRIBUTE = "qos"  # backend attribute: comma-separated classes on offer; absent means all


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One sandbox, as far as placement cares. cpus: cores; memory and disk: MiB; digest "" matches any node."""

    backend: str
    cpus: float
    memory_mib: int
    disk_mib: int
    qos: str = "latency_sensitive"
    digest: str = ""
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One backend of a node: usable or why not, its features, and the qos classes it takes (empty: all)."""

    reason: str = ""
    available: bool = True
    features: frozenset[str] = frozenset()
    qos: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node: promised and used resources after overcommit, as its last report said."""

    node: str
    cpus_total: float
    memory_mib_total: int
    sandboxes_max: int
    cpus_used: float = 0.0
    memory_mib_used: int = 0
    sandboxes: int = 0
    starting: int = 0
    starting_max: int = 0
    disk_mib_free: int = 0
    draining: bool = False
    stale: bool = False
    offers: Mapping[str, Offer] = field(default_factory=dict)
    images: frozenset[str] = frozenset()


def view_of(info: NodeInfo, *, stale: bool = False, images: Iterable[str] = ()) -> NodeView:
    """The view of a node's report; `images` adds digests that were learnt from elsewhere."""
    capacity = info.capacity
    offers = {
        backend.name: Offer(
            available=backend.available,
            reason=backend.reason,
            features=frozenset(backend.features),
            qos=frozenset(
                part.strip() for part in backend.attributes.get(QOS_ATTRIBUTE, "").split(",") if part.strip()
            ),
        )
        for backend in info.backends
    }
    return NodeView(
        node=info.node,
        cpus_total=capacity.cpus_total,
        memory_mib_total=capacity.memory_mib_total,
        sandboxes_max=capacity.sandboxes_max,
        cpus_used=capacity.cpus_used,
        memory_mib_used=capacity.memory_mib_used,
        sandboxes=capacity.sandboxes,
        starting=capacity.starting,
        starting_max=capacity.starting_max,
        disk_mib_free=capacity.disk_mib_free,
        draining=info.draining,
        stale=stale,
        offers=offers,
        images=frozenset(info.images).union(images),
    )
