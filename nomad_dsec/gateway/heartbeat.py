"""Keeps the node table true: follows the source of endpoints, beats each, marks the silent, fetches what changed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from libdsec.errors import DsecError, ProtocolError
from libdsec.wire import LIVE_STATES, NodeInfo

from nomad_dsec.gateway.clients import NodeClient
from nomad_dsec.gateway.nodes import Node, Standing
from nomad_dsec.ids import NODE_PATTERN
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from nomad_dsec.gateway.endpoints import Endpoint, NodeSource
    from nomad_dsec.gateway.nodes import NodeTable

log = get_log(__name__)
MAX_INFO_BYTES = 8 * 1024 * 1024


class Heartbeats:
    """One task an endpoint. on_seen is told (node id, endpoint name) when a node is first heard."""

    def __init__(self, table: NodeTable, source: NodeSource, *, on_seen: Callable[[str, str], None]) -> None:
        self._table = table
        self._source = source
        self._on_seen = on_seen
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._follow_source(group)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._table.pace.source_s):
                        await self._source.changed.wait()

    async def _follow_source(self, group: asyncio.TaskGroup) -> None:
        self._source.changed.clear()
        try:
            async with asyncio.timeout(self._table.pace.source_s):
                endpoints = dict.fromkeys(await self._source.endpoints())
        except (DsecError, TimeoutError, OSError) as error:
            log.warning("the source of nodes failed; the last known ones are kept", error=str(error))
            return
        nodes = self._table.by_endpoint
        for endpoint in endpoints:
            if endpoint not in nodes and not self._has_twin(endpoint):
                node = nodes[endpoint] = Node(NodeClient(endpoint))
                self._tasks[endpoint] = group.create_task(self._beat(node), name=f"heartbeat {endpoint.name}")
        for endpoint in [one for one in nodes if one not in endpoints or self._has_twin(one)]:
            if self._may_forget(nodes[endpoint]):
                self._tasks.pop(endpoint).cancel()
                node = nodes.pop(endpoint)
                self._table.drop(node)
                await node.client.close()
        self._table.changed.set()

    def _has_twin(self, endpoint: Endpoint) -> bool:
        """Whether this discovered endpoint is a node that is reached already as the settings say."""
        known = self._table.by_id.get(endpoint.node) if endpoint.node else None
        return known is not None and not known.client.endpoint.node and known.standing is Standing.LIVE

    def _may_forget(self, node: Node) -> bool:
        """One that its source no longer names is kept while it answers, and for long after: it may have sandboxes."""
        if node.info is None or self._table.by_id.get(node.id) is not node:
            return True  # never heard, or known under another endpoint now
        silent_s = self._table.clock.monotonic() - (node.heard_at or 0.0)
        return node.standing is Standing.LOST and silent_s >= self._table.pace.forget_s

    async def _beat(self, node: Node) -> None:
        table = self._table
        while True:
            began = table.clock.monotonic()
            try:
                info = await node.client.call(
                    "GET", "/v1/node", NodeInfo, timeout_s=table.pace.timeout_s, max_bytes=MAX_INFO_BYTES
                )
                await self._heard(node, info, as_of=began)
            except DsecError as error:
                await self._missed(node, error)
            except Exception as error:
                log.exception("a heartbeat failed unforeseen", endpoint=node.client.endpoint.name)
                node.error = repr(error)
            table.changed.set()
            await asyncio.sleep(max(0.02, table.pace.heartbeat_s - (table.clock.monotonic() - began)))

    async def _heard(self, node: Node, info: NodeInfo, *, as_of: float) -> None:
        table = self._table
        self._check_identity(node, info)
        known, was = node.info, node.standing
        node.heard_at = table.clock.monotonic()
        node.error = ""
        node.info = msgspec.structs.replace(info, seen_at=table.clock.now(), stale=False)
        node.standing = Standing.LIVE
        table.by_id[info.node] = node
        returned = was is not Standing.LIVE
        if returned:
            log.info("a node answers", node=info.node, endpoint=node.client.endpoint.name, was=was.value)
            self._on_seen(info.node, node.client.endpoint.name)
        table.ledger.report(info.node, as_of=as_of)
        if known is None or returned or known.images != info.images:
            await table.list_images(node)
        table.refresh_view(node)
        live = sum(number for state, number in info.counts.items() if state in LIVE_STATES)
        if returned or live != table.roster.live_on(info.node):
            await table.list_sandboxes(node, 0.0 if returned else table.pace.roster_s)

    def _check_identity(self, node: Node, info: NodeInfo) -> None:
        table, name = self._table, node.client.endpoint.name
        if NODE_PATTERN.fullmatch(info.node) is None:
            raise ProtocolError("bad_node_reply", f"{name} calls itself {info.node[:60]!r}")
        if node.client.endpoint.node not in ("", info.node):
            raise ProtocolError("wrong_node", f"{name} calls itself {info.node}, not {node.client.endpoint.node}")
        if node.info is not None and node.id != info.node:
            table.drop(node)
            node.info = None
            node.standing = Standing.UNKNOWN
        other = table.by_id.get(info.node)
        if other is not None and other is not node and other.standing is Standing.LIVE:
            if other.client.endpoint.node and not node.client.endpoint.node:
                self._source.changed.set()  # what the settings say goes before what was discovered
                return
            raise ProtocolError(
                "duplicate_node",
                f"{name} and {other.client.endpoint.name} both call themselves {info.node}",
                hint="give each node daemon its own node.id",
            )

    async def _missed(self, node: Node, error: DsecError) -> None:
        table = self._table
        if str(error) != node.error:
            log.warning("a heartbeat failed", endpoint=node.client.endpoint.name, error=str(error))
        node.error = str(error)
        if node.heard_at is None or node.info is None:
            return
        silent_s = table.clock.monotonic() - node.heard_at
        if silent_s >= table.pace.lost_s and node.standing is not Standing.LOST:
            node.standing = Standing.LOST
            log.error("a node is lost", node=node.id, silent_s=round(silent_s, 1))
            await node.client.close()  # whoever waits for it learns so now
        elif silent_s >= table.pace.stale_s and node.standing is Standing.LIVE:
            node.standing = Standing.STALE
            log.warning("a node is stale", node=node.id, silent_s=round(silent_s, 1))
        table.refresh_view(node)
