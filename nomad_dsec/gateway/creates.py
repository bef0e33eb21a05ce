"""Creates as callers see them: bounded, within quota, once per idempotency key, undone when nobody gets the reply."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from libdsec.errors import CapacityError, DsecError, PlatformError
from libdsec.wire import CreateReply

from nomad_dsec.gateway.groups import Engine, GroupCreate
from nomad_dsec.gateway.idempotency import ReplyStore, check_same, fingerprint
from nomad_dsec.gateway.intents import settle_statements
from nomad_dsec.gateway.roster import Usage
from nomad_dsec.gateway.secret_refs import refuse
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from libdsec.wire import CreateRequest

    from nomad_dsec.gateway.quotas import Quotas
    from nomad_dsec.gateway.secret_refs import NamespaceSecrets

log = get_log(__name__)
BUSY_RETRY_S = 1.0
CLAIM_GRACE_S = 5.0  # a keyed create whose reply reached nobody waits so long for its caller to ask again
ABANDON_WAIT_S = 30.0
_encoder = msgspec.json.Encoder()


@dataclass(slots=True, eq=False, kw_only=True)
class Flight:
    """One create under way or just done. `reply` is the encoded CreateReply."""

    namespace: str
    key: str
    body: bytes
    done: asyncio.Future[bytes]
    task: asyncio.Task[None] | None = None
    waiters: int = 0
    ids: tuple[str, ...] = ()
    delivered: bool = False


class Creates:
    """All creates of this gateway. `spawn` runs a coroutine in the background and never fails for what it raises."""

    def __init__(
        self,
        engine: Engine,
        quotas: Quotas,
        *,
        inflight_max: int,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        secrets: NamespaceSecrets | None = None,
    ) -> None:
        self._engine = engine
        self._quotas = quotas
        self._inflight_max = inflight_max
        self._inflight = 0
        self._spawn = spawn
        self._secrets = secrets
        self._replies = ReplyStore(engine.db, engine.clock)
        self._flights: dict[tuple[str, str], Flight] = {}

    async def create(self, namespace: str, request: CreateRequest) -> Flight:
        """Returns with `done` set; the caller then says `delivered` or `undelivered`.

        Raises UsageError, DeniedError and CapacityError (quota, no room, busy), or the fault that nodes met. A caller
        that is cancelled gives up its share; when no other waits for the same key, the create is undone.
        """
        flight = self._join_or_start(namespace, request)
        flight.waiters += 1
        try:
            await asyncio.shield(flight.done)
        except asyncio.CancelledError:
            self._leave(flight)
            raise
        except DsecError:
            flight.waiters -= 1
            raise
        return flight

    def delivered(self, flight: Flight) -> None:
        """The reply went out."""
        flight.waiters -= 1
        flight.delivered = True
        self._forget(flight)

    def undelivered(self, flight: Flight) -> None:
        """The connection was gone before the reply was out."""
        self._leave(flight)

    async def abandon(self, namespace: str, key: str) -> None:
        """The caller of this key gave up and takes no reply: what the key made is removed. Harmless when repeated.

        HTTP can't tell whether a reply that was sent was also read; this is how a client that was cancelled in that
        very moment says that it holds nothing.
        """
        flight = self._flights.get((namespace, key))
        if flight is not None:
            self._forget(flight)  # also one whose reply is on its way: a repeat of the key must not join it
            if not flight.done.done():
                assert flight.task is not None
                flight.task.cancel()
                return
        stored = self._replies.find(namespace, key, None)
        if stored is not None:
            reply: CreateReply = msgspec.json.decode(stored, type=CreateReply)
            ids = [info.id for info in reply.sandboxes]
            self._engine.reaper.doom(ids)
            await self._replies.forget(namespace, key)
            await self._engine.reaper.wait_tried(ids, timeout_s=ABANDON_WAIT_S)

    def purge(self) -> None:
        """Drop old replies; called now and then."""
        self._replies.purge_nowait()

    def _join_or_start(self, namespace: str, request: CreateRequest) -> Flight:
        key = request.idempotency_key
        body = fingerprint(namespace, request) if key else b""
        loop = asyncio.get_running_loop()
        if key:
            flight = self._flights.get((namespace, key))
            if flight is not None:
                check_same(flight.body, body, key)
                return flight
            stored = self._replies.find(namespace, key, body)
            if stored is not None:
                flight = Flight(namespace=namespace, key=key, body=body, done=loop.create_future(), delivered=True)
                flight.done.set_result(stored)
                return flight
        if self._inflight >= self._inflight_max:
            raise CapacityError(
                "busy",
                f"{self._inflight} creates are under way, which is the most at once",
                hint="create more slowly, or run more gateways",
                retry_after_s=BUSY_RETRY_S,
            )
        flight = Flight(namespace=namespace, key=key, body=body, done=loop.create_future())
        if key:
            self._flights[namespace, key] = flight
        self._inflight += 1
        flight.task = self._spawn(self._run(flight, request))
        return flight

    async def _run(self, flight: Flight, request: CreateRequest) -> None:
        """Resolves the flight, whatever happens; what is raised goes to those who wait."""
        metrics = self._engine.metrics
        metrics.inflight.inc()
        try:
            with metrics.step("total"):
                reply = await self._carry_out(flight, request)
        except DsecError as error:
            metrics.created(error.code)
            self._fail(flight, error)
        except asyncio.CancelledError:
            metrics.created("abandoned")
            self._fail(flight, PlatformError("create_abandoned", "the create was given up while it ran"))
            raise
        except Exception:
            self._fail(flight, PlatformError("internal_error", "the gateway failed on this create; see its log"))
            raise
        else:
            metrics.created("ok")
            flight.done.set_result(reply)
        finally:
            self._inflight -= 1
            metrics.inflight.dec()

    async def _carry_out(self, flight: Flight, request: CreateRequest) -> bytes:
        engine, namespace, count = self._engine, flight.namespace, request.count
        wanted = Usage(count, request.cpus * count, request.memory_mib * count, request.disk_mib * count)
        await self._quotas.check(namespace, wanted)
        with self._quotas.hold(namespace, wanted):
            digest = await self._resolve(request.image)
            if request.secret_refs:
                request = await self._look_up(namespace, request)
            reply = await GroupCreate(engine, namespace, request, digest).run()
        flight.ids = tuple(info.id for info in reply.sandboxes)
        try:
            encoded = _encoder.encode(reply)
            statements = settle_statements(flight.ids)
            if flight.key:
                statements.append(self._replies.keep_statement(namespace, flight.key, flight.body, encoded))
            with engine.metrics.step("settle"):
                await engine.db.write(*statements, durable=False)
        except BaseException:
            engine.reaper.doom(flight.ids)
            if flight.key:
                self._replies.forget_nowait(namespace, flight.key)  # the write may have come through after all
            raise
        engine.failpoints.reach("settled")
        return encoded

    async def _resolve(self, image: str) -> str:
        images = self._engine.table.images
        digest = images.resolve(image)
        if not digest:
            await self._engine.table.refresh_images()
            digest = images.resolve(image)
        return digest

    async def _look_up(self, namespace: str, request: CreateRequest) -> CreateRequest:
        """The values live in this copy of the request only; the flight keeps the one with references."""
        if self._secrets is None:
            raise refuse(request)
        with self._engine.metrics.step("secrets"):
            return await self._secrets.fill(namespace, request)

    def _fail(self, flight: Flight, error: DsecError) -> None:
        self._forget(flight)
        flight.done.set_exception(error)
        flight.done.exception()  # nobody may be left to take it

    def _forget(self, flight: Flight) -> None:
        if self._flights.get((flight.namespace, flight.key)) is flight:
            del self._flights[flight.namespace, flight.key]

    def _leave(self, flight: Flight) -> None:
        flight.waiters -= 1
        if flight.waiters or flight.delivered:
            return
        if not flight.done.done():
            self._forget(flight)  # a repeat of the key starts afresh
            assert flight.task is not None
            flight.task.cancel()
        elif flight.done.exception() is None:
            self._spawn(self._reclaim(flight))

    async def _reclaim(self, flight: Flight) -> None:
        """Made, and nobody has it: give a keyed create a moment to be asked for again, then undo it."""
        if flight.key:
            await asyncio.sleep(CLAIM_GRACE_S)
        if flight.delivered or flight.waiters:
            return
        log.info("a create whose reply reached nobody is undone", namespace=flight.namespace, count=len(flight.ids))
        self._forget(flight)
        if flight.key:
            self._replies.forget_nowait(flight.namespace, flight.key)
        self._engine.reaper.doom(flight.ids)
