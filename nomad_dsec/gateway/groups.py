"""One create carried out: place, journal, ask the nodes, try elsewhere, and undo when it can't be whole."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from libdsec.errors import CapacityError, DeniedError, DsecError, ProtocolError, UsageError
from libdsec.wire import CreateFailure, CreateReply, NodeCreateRequest, SandboxInfo

from nomad_dsec.gateway.intents import record_statements, settle_statements
from nomad_dsec.gateway.nodes import Standing
from nomad_dsec.ids import new_sandbox_id
from nomad_dsec.log import get_log
from nomad_dsec.placement import feasible
from nomad_dsec.placement.decide import no_room, place
from nomad_dsec.placement.view import Demand

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from libdsec.wire import CreateRequest

    from nomad_dsec.clock import Clock
    from nomad_dsec.gateway.db import Database
    from nomad_dsec.gateway.failpoints import Failpoints
    from nomad_dsec.gateway.intents import Reaper
    from nomad_dsec.gateway.metrics import GatewayMetrics
    from nomad_dsec.gateway.nodes import Node, NodeTable
    from nomad_dsec.placement.decide import Decision
    from nomad_dsec.placement.ledger import Ledger, Reservation

log = get_log(__name__)
IDS_MAX = 1000  # ids in one request to a node: wire.NodeCreateRequest
START_SLACK_S = 75.0  # beyond the wait for a turn: a node's own bound for a start is 60
UNDO_WAIT_S = 15.0
BLIND_ASKS = 4  # nodes asked for an image that no listing shows yet, such as one imported a second ago
REPLY_BYTES_EACH = 64 * 1024
CAPACITY = "capacity"
PASSING = frozenset({"starting_limit", "queue_full", "node_unreachable", "shutting_down"})  # worth the same node again
_PAUSE_FIRST_S, _PAUSE_MAX_S = 0.05, 1.0
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What every create shares."""

    table: NodeTable
    ledger: Ledger
    db: Database
    reaper: Reaper
    clock: Clock
    rng: random.Random
    metrics: GatewayMetrics
    failpoints: Failpoints


@dataclass(slots=True, kw_only=True, eq=False)
class Portion:
    """Ids for one request to one node, and what came of it."""

    node: Node
    ids: list[str]
    reservation: Reservation
    made: list[SandboxInfo] = field(default_factory=list)
    failures: list[CreateFailure] = field(default_factory=list)
    error: DsecError | None = None


class GroupCreate:
    """`count` alike sandboxes of one namespace. `run` once; after an error or cancellation nothing of it stays."""

    def __init__(self, engine: Engine, namespace: str, request: CreateRequest, digest: str) -> None:
        self._engine = engine
        self._namespace = namespace
        self._request = request
        self._digest = digest
        self._deadline = engine.clock.monotonic() + request.wait_s
        self._demand = Demand(
            backend=request.backend,
            cpus=request.cpus,
            memory_mib=request.memory_mib,
            disk_mib=request.disk_mib,
            qos=request.qos,
            digest=digest,
        )
        self._left = request.count
        self._excluded: dict[str, str] = {}
        self._refusals: dict[str, int] = {}
        self._errors: list[DsecError] = []
        self._made: list[SandboxInfo] = []
        self._failures: list[CreateFailure] = []
        self._open: set[str] = set()  # ids that a node may have and nobody holds yet

    async def run(self) -> CreateReply:
        """The sandboxes; all of them unless all_or_none is false. CapacityError with refusals, or what nodes said.

        The ids of the reply are still journaled: the caller settles them once the reply is certain.
        """
        try:
            await self._fill()
        except BaseException as error:
            self._undo()
            if not isinstance(error, asyncio.CancelledError):
                await self._engine.reaper.wait_tried(list(self._open), timeout_s=UNDO_WAIT_S)
            raise
        return CreateReply(sandboxes=self._made, failures=self._failures)

    def _undo(self) -> None:
        if self._open:
            log.info("a create is undone", namespace=self._namespace, count=len(self._open))
            self._engine.reaper.doom(self._open, passes=2)

    async def _fill(self) -> None:
        pause_s = _PAUSE_FIRST_S
        while self._left:
            with self._engine.metrics.step("place"):
                decision = self._place()
            self._refusals = dict(decision.refusals)
            whole = decision.unplaced == 0 or not self._request.all_or_none
            if decision.shares and whole:
                await self._ask_all(decision)
                if not self._left:
                    return
            elif not self._may_pass():
                self._give_up(decision.unplaced)
                return
            else:  # nowhere else to go: ask those again whose reason passes by itself
                self._excluded = {node: why for node, why in self._excluded.items() if why not in PASSING}
            if self._engine.clock.monotonic() + pause_s >= self._deadline:
                self._give_up(self._left)
                return
            await asyncio.sleep(pause_s * self._engine.rng.uniform(0.5, 1.5))
            pause_s = min(pause_s * 2, _PAUSE_MAX_S)

    def _place(self) -> Decision:
        if not self._digest and list(self._excluded.values()).count(feasible.IMAGE) >= BLIND_ASKS:
            raise self._engine.table.images.not_found(self._request.image)
        engine = self._engine
        views = engine.table.views()
        return place(views, self._demand, self._left, ledger=engine.ledger, rng=engine.rng, excluded=self._excluded)

    def _may_pass(self) -> bool:
        """Whether waiting can help: all that stands against it is a node that restarts or is busy starting."""
        table = self._engine.table
        if not table.by_id:
            return bool(table.unheard())
        reasons = set(self._refusals) | set(self._excluded.values())
        lasting = {feasible.BACKEND, feasible.FEATURE, feasible.QOS, feasible.IMAGE, feasible.TOO_LARGE}
        passing = reasons - lasting
        if not passing or not passing <= PASSING | {feasible.STALE}:
            return False
        return passing != {feasible.STALE} or any(node.standing is Standing.STALE for node in table.all())

    def _give_up(self, unplaced: int) -> None:
        """Raise for a gang or when nothing was made; else report the rest as failures."""
        engine, request = self._engine, self._request
        engine.metrics.refused(self._refusals)
        error = self._verdict(unplaced)
        if request.all_or_none or not (self._made or self._failures):
            raise error
        body = msgspec.to_builtins(error.to_body())
        self._failures.extend(CreateFailure(id="", error=body) for _ in range(self._left))
        self._left = 0

    def _verdict(self, unplaced: int) -> DsecError:
        reasons = set(self._refusals)
        if not self._digest and reasons and reasons <= {feasible.IMAGE}:
            return self._engine.table.images.not_found(self._request.image)
        faults = [error for error in self._errors if not isinstance(error, CapacityError)]
        if faults and reasons <= {error.code for error in faults}:
            fault = faults[-1]
            fault.details.setdefault("refusals", self._refusals)
            return fault
        return no_room(self._demand, wanted=self._request.count, unplaced=unplaced, refusals=self._refusals)

    async def _ask_all(self, decision: Decision) -> None:
        engine = self._engine
        portions = [
            portion
            for node, share in decision.shares.items()
            for portion in self._portions(engine.table.find(node), share)
        ]
        ids = [one for portion in portions for one in portion.ids]
        self._open.update(ids)
        try:
            engine.failpoints.reach("placed")
            with engine.metrics.step("journal"):
                # survives our death; a host that loses power may forget it, and then the TTL ends what was made
                await engine.db.write(*record_statements(ids, engine.clock.now()), durable=False)
            engine.failpoints.reach("journaled")
            with engine.metrics.step("node"):
                await self._ask_each(portions)
        finally:
            for portion in portions:
                engine.ledger.release(portion.reservation)  # harmless for those that are settled
        engine.failpoints.reach("node_replied")
        for portion in portions:
            self._take(portion)

    async def _ask_each(self, portions: Sequence[Portion]) -> None:
        if len(portions) == 1:
            await self._ask(portions[0])
            return
        async with asyncio.TaskGroup() as group:
            for portion in portions:
                group.create_task(self._ask(portion))

    def _portions(self, node: Node, share: int) -> list[Portion]:
        engine, now, portions = self._engine, self._engine.clock.monotonic(), []
        while share:
            count = min(share, IDS_MAX)
            portions.append(
                Portion(
                    node=node,
                    ids=[new_sandbox_id(node.id) for _ in range(count)],
                    reservation=engine.ledger.reserve(node.id, self._demand, count, now=now),
                )
            )
            share -= count
        return portions

    async def _ask(self, portion: Portion) -> None:
        """Fills the portion; raises only when cancelled."""
        engine, node, count = self._engine, portion.node, len(portion.ids)
        sent_at = engine.clock.monotonic()
        wait_s = max(0.1, self._deadline - sent_at)
        spec = msgspec.structs.replace(self._request, count=count, idempotency_key="", wait_s=wait_s)
        body = NodeCreateRequest(ids=portion.ids, namespace=self._namespace, digest=self._digest, spec=spec)
        try:
            reply, headers = await node.client.call_with_headers(
                "POST",
                "/v1/sandboxes",
                CreateReply,
                body=_encoder.encode(body),
                timeout_s=wait_s + START_SLACK_S,
                max_bytes=REPLY_BYTES_EACH * (count + 1),
            )
            self._check(portion, reply)
        except DsecError as error:
            portion.error = error
            return
        portion.made, portion.failures = reply.sandboxes, reply.failures
        now = engine.clock.monotonic()
        engine.ledger.settle(portion.reservation, now=now)
        engine.table.note_capacity(node, headers, as_of=sent_at)

    def _check(self, portion: Portion, reply: CreateReply) -> None:
        """The node answers for exactly the ids it was asked for; anything else would be a lie or a mix-up."""
        named = [info.id for info in reply.sandboxes] + [failure.id for failure in reply.failures]
        honest = sorted(named) == sorted(portion.ids) and all(
            info.node == portion.node.id and info.namespace == self._namespace for info in reply.sandboxes
        )
        if not honest:
            raise ProtocolError("bad_node_reply", f"node {portion.node.id} answered a create for other sandboxes")
        if reply.failures and self._request.all_or_none:
            raise ProtocolError("bad_node_reply", f"node {portion.node.id} made part of a gang")

    def _take(self, portion: Portion) -> None:
        """Account for what a portion became."""
        engine, error = self._engine, portion.error
        if error is None:
            now = engine.clock.monotonic()
            for info in portion.made:
                engine.table.roster.put(info, at=now)
            self._made.extend(portion.made)
            self._left -= len(portion.made)
            self._take_failures(portion)
            return
        self._errors.append(error)
        if isinstance(error, CapacityError | UsageError | DeniedError):
            self._close(portion.ids)  # the node said that it made nothing
        else:
            engine.reaper.doom(portion.ids, passes=2)
            self._open.difference_update(portion.ids)
        if isinstance(error, UsageError | DeniedError):
            raise error  # the same everywhere
        self._exclude(portion.node, error.code)
        log.info("a node refused a create", node=portion.node.id, code=error.code, count=len(portion.ids))

    def _take_failures(self, portion: Portion) -> None:
        """Members of a group that need not be whole: those without room there are tried elsewhere."""
        self._close([failure.id for failure in portion.failures])
        for failure in portion.failures:
            if failure.error.get("kind") == CapacityError.kind:
                self._exclude(portion.node, str(failure.error.get("code", CAPACITY)))
            else:
                self._failures.append(failure)
                self._left -= 1

    def _exclude(self, node: Node, code: str) -> None:
        if node.id not in self._excluded:
            self._refusals[code] = self._refusals.get(code, 0) + 1
        self._excluded[node.id] = code

    def _close(self, ids: Sequence[str]) -> None:
        if ids:
            self._open.difference_update(ids)
            self._engine.db.write_nowait(*settle_statements(ids))
