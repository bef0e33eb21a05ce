"""The table of nodes: what each last said, and who is stale or lost.

live: answered lately. stale: missed heartbeats; takes no creates, calls to it may fail. lost: silent for so long that
its sandboxes are reported `lost (node_lost)`; should it come back, what it says is the truth again.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from libdsec.errors import DsecError, NotFoundError, PlatformError
from libdsec.wire import ImageList, NodeCapacity, NodeInfo, SandboxList

from nomad_dsec.log import get_log
from nomad_dsec.placement.view import NodeView, view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nomad_dsec.clock import Clock
    from nomad_dsec.gateway.clients import NodeClient
    from nomad_dsec.gateway.endpoints import Endpoint
    from nomad_dsec.gateway.images import ImageIndex
    from nomad_dsec.gateway.roster import Roster
    from nomad_dsec.placement.ledger import Ledger

log = get_log(__name__)
MAX_INFO_BYTES = 8 * 1024 * 1024
MAX_LIST_BYTES = 256 * 1024 * 1024
LIST_TIMEOUT_S = 30.0
NODE_HEADER = "x-dsec-node"


class Standing(enum.Enum):
    """How much a node's last word is worth."""

    UNKNOWN = "unknown"
    LIVE = "live"
    STALE = "stale"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between and before things. roster_s: between listings of a node whose counts moved. forget_s: how long a
    silent node that its source no longer names is remembered, with its sandboxes as lost.
    """

    heartbeat_s: float = 1.0
    timeout_s: float = 2.0
    stale_s: float = 3.5
    lost_s: float = 60.0
    roster_s: float = 5.0
    source_s: float = 5.0
    forget_s: float = 3600.0


@dataclass(slots=True, eq=False)
class Node:
    """One endpoint and what is known of it. Instants are monotonic."""

    client: NodeClient
    info: NodeInfo | None = None
    heard_at: float | None = None
    standing: Standing = Standing.UNKNOWN
    error: str = ""
    roster_at: float | None = None
    view: NodeView | None = None
    listing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        """The node's id; only once it was heard."""
        assert self.info is not None
        return self.info.node


class NodeTable:
    """All nodes of this gateway; heartbeat.py keeps it true."""

    def __init__(
        self, *, clock: Clock, ledger: Ledger, roster: Roster, images: ImageIndex, pace: Pace | None = None
    ) -> None:
        self.pace = pace or Pace()
        self.clock = clock
        self.ledger = ledger
        self.roster = roster
        self.images = images
        self.by_endpoint: dict[Endpoint, Node] = {}
        self.by_id: dict[str, Node] = {}
        self.remembered: dict[str, str] = {}  # node id -> endpoint name, of a former run
        self.is_partial: Callable[[], bool] = lambda: False  # may there be nodes that the source does not know of
        self.changed = asyncio.Event()
        self._images_at = float("-inf")

    def all(self) -> list[Node]:
        """Every node that was heard at least once."""
        return list(self.by_id.values())

    def unheard(self) -> list[Node]:
        """Endpoints that have never answered, or answered as a node that another endpoint is."""
        return [node for node in self.by_endpoint.values() if node.info is None]

    def live(self) -> list[Node]:
        """Those worth asking."""
        return [node for node in self.by_id.values() if node.standing is Standing.LIVE]

    def views(self) -> list[NodeView]:
        """For placement."""
        return [node.view for node in self.by_id.values() if node.view is not None]

    def find(self, node: str) -> Node:
        """The node of this id, live or not.

        Raises NotFoundError when every endpoint has told its name and none is it; else PlatformError node_unreachable,
        since it may be one that has not answered yet, or that Consul would tell of.
        """
        found = self.by_id.get(node)
        if found is not None:
            return found
        unheard = self.unheard()
        if unheard or not self.by_endpoint or self.is_partial():
            raise PlatformError(
                "node_unreachable",
                f"node {node} has not been heard yet",
                hint="try again; `dsec node ls` shows which endpoints do not answer",
                retry_after_s=1.0,
                details={"sent": False},
            )
        raise NotFoundError(
            "node_not_found", f"there is no node {node!r} here", field="node", hint="see `dsec node ls`"
        )

    def infos(self) -> list[NodeInfo]:
        """Every node as last heard, stale ones marked, those never heard with their former name."""
        infos = []
        for node in self.all():
            if node.info is not None:
                stale, address = node.standing is not Standing.LIVE, node.client.endpoint.name
                infos.append(msgspec.structs.replace(node.info, stale=stale, address=address, error=node.error))
        names = {endpoint: node for node, endpoint in self.remembered.items()}
        for node in self.unheard():
            address = node.client.endpoint.name
            infos.append(
                NodeInfo(node=names.get(address, ""), address=address, stale=True, error=node.error or "not heard yet")
            )
        return infos

    def unasked(self) -> list[str]:
        """Nodes that can't be asked now: stale and lost ones, and those known from a former run and not heard yet."""
        silent = {node.client.endpoint.name for node in self.unheard()}
        return sorted(
            {node.id for node in self.all() if node.standing is not Standing.LIVE}
            | {node for node, endpoint in self.remembered.items() if endpoint in silent}
        )

    async def wait_heard(self, *, timeout_s: float) -> None:
        """Until each endpoint has answered once, or the time is over."""
        deadline = self.clock.monotonic() + timeout_s
        while self.unheard() or not self.by_endpoint:
            left = deadline - self.clock.monotonic()
            if left <= 0:
                return
            self.changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self.changed.wait()
            except TimeoutError:
                return

    def note_capacity(self, node: Node, headers: Mapping[str, str], *, as_of: float) -> None:
        """A reply carried the node's capacity; as_of is when its request was sent. Strange values are ignored."""
        raw = headers.get(NODE_HEADER)
        if raw is None or node.info is None:
            return
        try:
            capacity: NodeCapacity = msgspec.json.decode(raw, type=NodeCapacity)
        except (msgspec.ValidationError, msgspec.DecodeError):
            return
        node.info = msgspec.structs.replace(node.info, capacity=capacity)
        self.ledger.report(node.id, as_of=as_of)
        self.refresh_view(node)

    async def refresh_images(self, *, max_age_s: float = 1.0) -> None:
        """Ask every live node what images it has, unless that was done less than max_age_s ago."""
        now = self.clock.monotonic()
        if now - self._images_at >= max_age_s:
            self._images_at = now
            await asyncio.gather(*(self.list_images(node) for node in self.live()))

    async def refresh_rosters(self, *, max_age_s: float = 1.0) -> None:
        """Ask live nodes for their sandboxes, those that were asked less than max_age_s ago excepted."""
        now = self.clock.monotonic()
        due = [node for node in self.live() if node.roster_at is None or now - node.roster_at >= max_age_s]
        await asyncio.gather(*(self.list_sandboxes(node, max_age_s) for node in due))

    def drop(self, node: Node) -> None:
        """Forget a node and all that was learnt from it."""
        if node.info is not None and self.by_id.get(node.id) is node:
            del self.by_id[node.id]
            self.images.forget(node.id)
            self.roster.forget(node.id)
            self.ledger.forget(node.id)

    async def close(self) -> None:
        """Cut all connections."""
        await asyncio.gather(*(node.client.close() for node in self.by_endpoint.values()))

    def refresh_view(self, node: Node) -> None:
        """After anything that placement looks at."""
        if node.info is not None:
            stale = node.standing is not Standing.LIVE
            node.view = view_of(node.info, stale=stale, images=self.images.digests_on(node.id))

    async def list_images(self, node: Node) -> None:
        """Learn the node's images; a failure is logged and the old ones stay."""
        try:
            listing = await node.client.call(
                "GET", "/v1/images", ImageList, timeout_s=LIST_TIMEOUT_S, max_bytes=MAX_LIST_BYTES
            )
        except DsecError as error:
            log.warning("a node did not list its images", endpoint=node.client.endpoint.name, error=str(error))
            return
        self.images.replace(node.id, listing.images)
        self.refresh_view(node)

    async def list_sandboxes(self, node: Node, max_age_s: float) -> None:
        """Learn the node's sandboxes unless that was done less than max_age_s ago."""
        async with node.listing:
            now = self.clock.monotonic()
            if node.roster_at is not None and now - node.roster_at < max_age_s:
                return
            try:
                listing = await node.client.call(
                    "GET", "/v1/sandboxes", SandboxList, timeout_s=LIST_TIMEOUT_S, max_bytes=MAX_LIST_BYTES
                )
            except DsecError as error:
                log.warning("a node did not list its sandboxes", endpoint=node.client.endpoint.name, error=str(error))
                return
            node.roster_at = now
            mine = [info for info in listing.sandboxes if info.node == node.id]
            self.roster.replace(node.id, mine, as_of=now)
