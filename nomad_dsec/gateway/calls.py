"""Stateless calls on behalf of a namespace: which node, what when it refuses or dies, and which call to cancel.

A request passes through as it came and so does its reply; only what placement needs is read. A call has no state, so
one that met a full, draining or dying node is simply given to the next.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
from libdsec._fncall_requests import longest_s
from libdsec.errors import CapacityError, DeadlineExceeded, DsecError, PlatformError, UsageError
from libdsec.wire_fncall import (
    DIGEST_HEADER,
    MAX_CALL_BYTES,
    NAMESPACE_HEADER,
    CancelRequest,
    Checker,
    FnLimits,
    FnRequest,
    LanguageList,
)

from nomad_dsec.gateway.clients import MAX_ERROR_BYTES, error_of
from nomad_dsec.httpd import DECODE_ERRORS, JSON_TYPE, usage_from_decode
from nomad_dsec.log import get_log
from nomad_dsec.placement.calls import rank_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nomad_dsec.gateway.nodes import Node, NodeTable
    from nomad_dsec.gateway.shares import Shares

log = get_log(__name__)
CALL, SUBMIT, CANCEL, LANGUAGES = "/v1/fncall", "/v1/fncall/submit", "/v1/fncall/cancel", "/v1/fncall/languages"
RETRY_AFTER_S = 0.5
NODES_TRIED_MAX = 4
LANGUAGES_TIMEOUT_S = 60.0
CANCEL_TIMEOUT_S = 10.0
_EARLIER_S = 15.0  # the gateway gives up before its caller does, so that the caller learns why
_LARGE_BYTES = 1024 * 1024
CHUNKED_MAX_BYTES = 4 * 1024 * 1024
_DEFAULTS = FnRequest(image="-")


class Head(msgspec.Struct, kw_only=True):
    """What the gateway reads of a call; the node checks all of it."""

    image: str = ""
    code: str = ""
    call_id: str = ""
    limits: FnLimits = msgspec.field(default_factory=FnLimits)
    compile_limits: FnLimits = msgspec.field(default_factory=lambda: _DEFAULTS.compile_limits)
    checker: Checker = msgspec.field(default_factory=Checker)
    queue_timeout_s: float = _DEFAULTS.queue_timeout_s


class _SubmitHead(msgspec.Struct, kw_only=True):
    program: Head
    tests: list[msgspec.Raw] = []


_call_decoder: msgspec.json.Decoder[Head] = msgspec.json.Decoder(Head)
_submit_decoder: msgspec.json.Decoder[_SubmitHead] = msgspec.json.Decoder(_SubmitHead)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call on its way. longest_s: within which its node must have answered."""

    namespace: str
    path: str
    body: bytes
    head: Head
    digest: str
    longest_s: float


class Calls:
    """All calls of this gateway."""

    def __init__(self, table: NodeTable, shares: Shares) -> None:
        self._table = table
        self._shares = shares
        self._on_node: Counter[str] = Counter()
        self._where: dict[tuple[str, str], Node] = {}

    @property
    def under_way(self) -> int:
        """How many calls wait for their node now."""
        return self._shares.calls

    def hold(self, namespace: str, body_bytes: int | None) -> AbstractContextManager[None]:
        """Count a call while the block runs, from before its body is read, as long as `body_max` says. Or `busy`."""
        return self._shares.hold(namespace, CHUNKED_MAX_BYTES if body_bytes is None else body_bytes)

    async def run(self, namespace: str, path: str, body: bytes) -> tuple[bytes, str]:
        """The node's reply to a body for CALL or SUBMIT, as JSON, and the node's id. Within `hold`.

        Raises what the node says, CapacityError no_node, PlatformError node_unreachable. A caller that is cancelled
        cancels the call on its node.
        """
        head, tests = await _read_head(path, body)
        call = _Call(
            namespace=namespace,
            path=path,
            body=body,
            head=head,
            digest=await self._resolve(head.image),
            longest_s=longest_s(head, tests=tests) - _EARLIER_S,
        )
        return await self._first_that_takes(call)

    async def cancel(self, namespace: str, request: CancelRequest) -> None:
        """End a call: on its node when it is ours, else on every node that runs calls (another gateway's it may be)."""
        node = self._where.get((namespace, request.call_id))
        nodes = [node] if node is not None else [one for one in self._table.live() if _offers_calls(one)]
        body = msgspec.json.encode(request)
        await asyncio.gather(*(self._cancel_on(node, namespace, body) for node in nodes))

    async def languages(self, image: str) -> LanguageList:
        """What an image can run, as a node that has it found out."""
        digest = await self._resolve(image)
        node = self._ranked(digest, b"")[0]
        path = f"{LANGUAGES}?image={quote(digest, safe='')}"
        return await node.client.call(
            "GET", path, LanguageList, timeout_s=LANGUAGES_TIMEOUT_S, max_bytes=MAX_ERROR_BYTES
        )

    def is_ready(self) -> bool:
        """Some node takes calls."""
        return any(_offers_calls(node) for node in self._table.live())

    def only_image(self) -> str:
        """The digest of the one image there is, "" when there are none or several."""
        images = self._table.images.listing().images
        return images[0].digest if len(images) == 1 else ""

    async def _resolve(self, image: str) -> str:
        if not image:
            raise UsageError("no_image", "no image is named", field="image", hint="`dsec image ls` shows what there is")
        digest = self._table.images.resolve(image)
        if not digest:
            await self._table.refresh_images()
            digest = self._table.images.resolve(image)
        if not digest:
            raise self._table.images.not_found(image)
        return digest

    def _ranked(self, digest: str, program: bytes) -> list[Node]:
        names, refusals = rank_nodes(self._table.views(), digest=digest, in_flight=self._on_node, program=program)
        nodes = [self._table.by_id[name] for name in names if name in self._table.by_id]
        if not nodes:
            raise CapacityError(
                "no_node",
                "no node can take this call",
                hint="`dsec node ls` shows the nodes and their backends",
                retry_after_s=RETRY_AFTER_S if self._table.unasked() else None,
                details={"refusals": dict(refusals)},
            )
        return nodes

    async def _first_that_takes(self, call: _Call) -> tuple[bytes, str]:
        last: DsecError | None = None
        for node in self._ranked(call.digest, call.head.code.encode("utf-8", "replace"))[:NODES_TRIED_MAX]:
            try:
                with self._counted(node, call):
                    return await self._send(node, call), node.id
            except CapacityError as error:
                last = error
            except PlatformError as error:
                if error.code != "node_unreachable":
                    raise
                log.warning("a call is given to the next node", node=node.id, call=call.head.call_id, error=str(error))
                last = error
        assert last is not None
        raise last

    @contextmanager
    def _counted(self, node: Node, call: _Call) -> Iterator[None]:
        place = (call.namespace, call.head.call_id)
        self._on_node[node.id] += 1
        if call.head.call_id:
            self._where[place] = node
        try:
            yield
        finally:
            self._on_node[node.id] -= 1
            self._where.pop(place, None)

    async def _send(self, node: Node, call: _Call) -> bytes:
        headers = _headers(call.namespace) | {DIGEST_HEADER: call.digest}
        client = node.client
        try:
            async with (
                asyncio.timeout(call.longest_s),
                client.open("POST", call.path, data=call.body, headers=headers) as reply,
            ):
                if reply.status >= 400:
                    raise error_of(await client.read(reply, MAX_ERROR_BYTES), reply.status, client.endpoint.name)
                return await client.read(reply, MAX_CALL_BYTES)
        except TimeoutError as late:
            raise DeadlineExceeded(
                "node_timeout", f"node {node.id} did not answer a call within {call.longest_s:g} s"
            ) from late

    async def _cancel_on(self, node: Node, namespace: str, body: bytes) -> None:
        try:
            async with (
                asyncio.timeout(CANCEL_TIMEOUT_S),
                node.client.open("POST", CANCEL, data=body, headers=_headers(namespace)) as reply,
            ):
                await node.client.read(reply, MAX_ERROR_BYTES)
        except (DsecError, TimeoutError) as error:
            log.warning("a cancel did not reach a node", node=node.id, error=str(error))


async def _read_head(path: str, body: bytes) -> tuple[Head, int]:
    """What placement needs, and the number of tests. Large bodies are read in a thread: the loop stays free."""
    if len(body) > _LARGE_BYTES:
        return await asyncio.to_thread(_decode_head, path, body)
    return _decode_head(path, body)


def _decode_head(path: str, body: bytes) -> tuple[Head, int]:
    try:
        if path == SUBMIT:
            submitted = _submit_decoder.decode(body)
            return submitted.program, len(submitted.tests)
        return _call_decoder.decode(body), 1
    except DECODE_ERRORS as error:
        raise usage_from_decode(error, "the call") from error


def body_max(body_bytes: int | None) -> int:
    """How long a body may be that says this of its length: one that says nothing must be short."""
    return CHUNKED_MAX_BYTES if body_bytes is None else MAX_CALL_BYTES


def _headers(namespace: str) -> dict[str, str]:
    return {NAMESPACE_HEADER: namespace, "Content-Type": JSON_TYPE}


def _offers_calls(node: Node) -> bool:
    offer = node.view.offers.get("fncall") if node.view is not None else None
    return offer is not None and offer.available
