"""The node as others see it: what its backends can do, what is promised, what lives. Asked each second by gateways."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from libdsec.errors import DsecError
from libdsec.wire import NodeCapacity, NodeInfo

from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from nomad_dsec.node.core import Node
    from nomad_dsec.node.lanes import Lanes
    from nomad_dsec.node.supervisor import Supervisor

log = get_log(__name__)


class Fingerprint:
    """Makes NodeInfo; `seq` rises with each, so that late ones are told from new ones."""

    def __init__(self, node: Node, supervisor: Supervisor, lanes: Lanes) -> None:
        self._node = node
        self._supervisor = supervisor
        self._lanes = lanes
        self._seq = 0
        self.address = ""

    def capacity(self) -> NodeCapacity:
        """Totals and promises now."""
        node = self._node
        return NodeCapacity(
            cpus_total=node.capacity.totals.cpus,
            cpus_used=round(node.capacity.cpus_used, 3),
            memory_mib_total=node.capacity.totals.memory_mib,
            memory_mib_used=node.capacity.memory_mib_used,
            sandboxes=node.capacity.sandboxes,
            sandboxes_max=node.capacity.totals.sandboxes,
            starting=node.queue.starting + node.queue.waiting,
            starting_max=node.queue.starting_max,
            disk_mib_free=self._supervisor.disk_mib_free,
        )

    def counts(self) -> dict[str, int]:
        """Sandboxes by state, ended ones that are still remembered included."""
        counts: dict[str, int] = {}
        for entry in self._node.entries.values():
            counts[entry.row.state] = counts.get(entry.row.state, 0) + 1
        return counts

    async def info(self) -> NodeInfo:
        """All of it."""
        node = self._node
        self._seq += 1
        try:
            images = [image.digest for image in await node.images.ls()]
        except DsecError as error:
            log.warning("the image store can't be read", error=str(error))
            images = []
        backends = [await self._supervisor.fingerprint(name) for name in sorted(node.backends)]
        return NodeInfo(
            node=node.id,
            version=node.version,
            address=self.address,
            draining=node.draining,
            boot_id=node.boot_id,
            backends=[*backends, self._lanes.offer(backends)],
            capacity=self.capacity(),
            images=images,
            counts=self.counts(),
            seq=self._seq,
            seen_at=node.clock.now(),
        )


def machine_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine_memory_mib() -> int:
    """MemTotal of /proc/meminfo, proc(5)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) // 1024
    raise OSError("MemTotal is missing in /proc/meminfo")


def default_node_id() -> str:
    """From the host name: lower case, what may not be in a node id becomes a hyphen."""
    name = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname().partition(".")[0].lower())
    return name.strip("-")[:32].strip("-") or "node"
