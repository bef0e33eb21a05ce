"""Sandboxes by id: whose they are, which node to ask, and what to say for nodes that can't be asked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
from libdsec.errors import DeniedError, DsecError, NotFoundError, PlatformError, UsageError
from libdsec.wire import LIVE_STATES, SandboxInfo, SandboxList

from nomad_dsec.gateway.nodes import LIST_TIMEOUT_S, MAX_LIST_BYTES, Standing
from nomad_dsec.ids import node_of
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nomad_dsec.gateway.keys import Principal
    from nomad_dsec.gateway.nodes import Node, NodeTable

log = get_log(__name__)
INFO_TIMEOUT_S = 10.0
VERB_TIMEOUT_S = 90.0  # a node's own bounds for stop and pause are 60
MAX_REPLY_BYTES = 1024 * 1024
NODE_LOST = "node_lost"
ALL_NAMESPACES = "*"


class Sandboxes:
    """Finds and asks about sandboxes on behalf of a principal."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table

    async def reach(self, principal: Principal, sandbox: str) -> Node:
        """The node to send a call to; NotFoundError alike for what is not there and for what is another's.

        Raises PlatformError node_unreachable (again later) or node_lost.
        """
        node = await self._find(principal, sandbox)
        if node.standing is Standing.LOST:
            raise PlatformError(
                NODE_LOST,
                f"node {node.id} with {sandbox} has been silent for too long",
                hint="take the sandbox for lost; should its node come back, so does the sandbox",
            )
        return node

    async def info(self, principal: Principal, sandbox: str) -> SandboxInfo:
        """The sandbox as its node says, or `lost (node_lost)` when the node is lost."""
        node = await self._find(principal, sandbox)
        if node.standing is Standing.LOST:
            known = self._table.roster.get(node.id, sandbox)
            if known is not None:
                return as_lost(known)
        return await self._ask(node, sandbox)

    async def verb(self, principal: Principal, sandbox: str, method: str, path: str, body: bytes | None) -> SandboxInfo:
        """A call that the node answers with the sandbox's new info, which is noted."""
        node = await self.reach(principal, sandbox)
        info = await node.client.call(
            method, path, SandboxInfo, body=body, timeout_s=VERB_TIMEOUT_S, max_bytes=MAX_REPLY_BYTES
        )
        self._table.roster.put(info, at=self._table.clock.monotonic())
        return info

    async def list(
        self, principal: Principal, *, namespace: str, states: Sequence[str], labels: Sequence[str]
    ) -> SandboxList:
        """All nodes' sandboxes of a namespace ("" is the caller's own, * all); from memory where a node is silent.

        No states means those that live, as nodes have it, and those that are lost with their node.
        """
        wanted = namespace or principal.namespace
        if wanted != principal.namespace and not principal.admin:
            raise DeniedError("other_namespace", "this key sees only its own namespace", field="namespace")
        pairs = [_pair(label) for label in labels]
        query = "&".join(
            [f"namespace={quote(wanted, safe='')}"] * (wanted != ALL_NAMESPACES)
            + [f"state={','.join(states)}"] * bool(states)
            + [f"label={quote(label, safe='')}" for label in labels]
        )
        live = self._table.live()
        replies = await asyncio.gather(*(self._list_one(node, query) for node in live))
        silent = [node.id for node, reply in zip(live, replies, strict=True) if reply is None]
        found = [info for reply in replies if reply is not None for info in reply.sandboxes]
        for node in self._table.all():
            if node.standing is not Standing.LIVE or node.id in silent:
                known = [info for info in self._table.roster.on_node(node.id) if states or info.state in LIVE_STATES]
                found += [as_lost(info) if node.standing is Standing.LOST else info for info in known]
        kept = [
            info
            for info in found
            if wanted in (info.namespace, ALL_NAMESPACES)
            and (not states or info.state in states)
            and all(info.labels.get(key) == value for key, value in pairs)
        ]
        kept.sort(key=lambda info: (info.created_at, info.id))
        return SandboxList(sandboxes=kept, stale_nodes=sorted({*silent, *self._table.unasked()}))

    async def _find(self, principal: Principal, sandbox: str) -> Node:
        node_id = node_of(sandbox)
        try:
            node = self._table.find(node_id)
        except NotFoundError as error:
            raise _no_sandbox(sandbox) from error
        namespace = self._table.roster.namespace_of(node_id, sandbox)
        if namespace is None:
            namespace = (await self._ask(node, sandbox)).namespace
        if not principal.may_see(namespace):
            raise _no_sandbox(sandbox)
        return node

    async def _ask(self, node: Node, sandbox: str) -> SandboxInfo:
        try:
            info = await node.client.call(
                "GET", f"/v1/sandboxes/{sandbox}", SandboxInfo, timeout_s=INFO_TIMEOUT_S, max_bytes=MAX_REPLY_BYTES
            )
        except NotFoundError as error:
            raise _no_sandbox(sandbox) from error
        self._table.roster.put(info, at=self._table.clock.monotonic())
        return info

    async def _list_one(self, node: Node, query: str) -> SandboxList | None:
        try:
            return await node.client.call(
                "GET", f"/v1/sandboxes?{query}", SandboxList, timeout_s=LIST_TIMEOUT_S, max_bytes=MAX_LIST_BYTES
            )
        except DsecError as error:
            log.warning("a node did not list its sandboxes", node=node.id, error=str(error))
            return None


def as_lost(info: SandboxInfo) -> SandboxInfo:
    """What to say of a sandbox whose node is lost; one that had ended before stays as it was."""
    if info.state not in LIVE_STATES:
        return info
    message = "its node has been silent for too long"
    return msgspec.structs.replace(info, state="lost", reason=NODE_LOST, message=message)


def _no_sandbox(sandbox: str) -> NotFoundError:
    return NotFoundError(
        "sandbox_not_found",
        f"there is no sandbox {sandbox[:80]}",
        field="sandbox",
        hint="it never existed, is not of your namespace, or ended so long ago that it is forgotten",
    )


def _pair(label: str) -> tuple[str, str]:
    key, equals, value = label.partition("=")
    if not equals or not key:
        raise UsageError("bad_query", f"{label[:80]!r} is not key=value", field="label", hint="give label=key=value")
    return key, value
