"""Keeps one of our processes registered in Consul: TTL heartbeats, health under a session, services of sandboxes.

Consul away: everything goes on, and is made good when it is back. An agent that restarted has forgotten us: we register
again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from libdsec.errors import DsecError

from nomad_dsec.cluster.consul import TXN_LIMIT
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nomad_dsec.cluster.consul import ConsulClient, Offer
    from nomad_dsec.cluster.health import Transitions
    from nomad_dsec.cluster.services import SandboxServices

log = get_log(__name__)
SESSION_TTL_S = 30.0
WRITES_A_STEP = 16 * TXN_LIMIT
CLOSE_S = 3.0


class Registration:
    """Run `run()` as a task of its own; `close()` deregisters.

    note: asked before each heartbeat, (healthy, text). The heartbeat goes on when health or services can't be written.
    """

    def __init__(
        self,
        client: ConsulClient,
        offer: Offer,
        *,
        note: Callable[[], tuple[bool, str]],
        transitions: Transitions | None = None,
        services: SandboxServices | None = None,
    ) -> None:
        self._client = client
        self._offer = offer
        self._note = note
        self._transitions = transitions
        self._services = services
        self._anew = True
        self._session = ""
        self._errors: dict[str, str] = {}
        self.registered = False

    @property
    def last_error(self) -> str:
        """The code of what fails now, empty when all is written."""
        return next(iter(self._errors.values()), "")

    async def run(self) -> None:
        """Until cancelled. Three missed heartbeats make the check critical."""
        while True:
            try:
                await self.step()
            except Exception:
                log.exception("a heartbeat failed unforeseen", service=self._offer.service_id)
            await asyncio.sleep(self._offer.ttl_s / 3)

    async def step(self) -> None:
        """One heartbeat and what is pending; errors are logged once for each change, never raised."""
        if not await self._try("heartbeat", self._beat):
            self.registered = False
            return
        await self._try("health", self._flush)
        await self._try("services", self._bring_services)

    async def _try(self, step: str, work: Callable[[], Awaitable[None]]) -> bool:
        me = self._offer.service_id
        try:
            await work()
        except DsecError as error:
            if self._errors.get(step) != error.code:
                log.warning("Consul is not kept up to date", error=str(error), service=me, step=step)
            self._errors[step] = error.code
            return False
        if self._errors.pop(step, ""):
            log.info("Consul is up to date again", service=me, step=step)
        return True

    async def _beat(self) -> None:
        healthy, note = self._note()
        me = self._offer.service_id
        if self.registered:
            try:
                await self._client.heartbeat(me, healthy=healthy, note=note)
            except DsecError:
                self.registered = False  # the agent may have restarted and forgotten us: register below
            else:
                return
        await self._client.register(self._offer, healthy=healthy)
        await self._client.heartbeat(me, healthy=healthy, note=note)
        self.registered = self._anew = True

    async def _flush(self) -> None:
        if self._transitions is None:
            return
        if self._session and not await self._client.renew_session(self._session):
            self._session = ""
            self._transitions.session_lost()
        puts = self._transitions.pending(self._session, limit=WRITES_A_STEP)
        if not puts:
            return
        if not self._session:
            self._session = await self._open_session()
            puts = self._transitions.pending(self._session, limit=WRITES_A_STEP)
        for start in range(0, len(puts), TXN_LIMIT):
            batch = puts[start : start + TXN_LIMIT]
            await self._client.write(batch)
            self._transitions.written(batch)

    async def _open_session(self) -> str:
        """Ours alone: a former daemon's session, which died without a word, holds the keys that we are to write."""
        name = self._offer.service_id
        for former in await self._client.sessions(name):
            await self._client.end_session(former)
        return await self._client.open_session(name, ttl_s=SESSION_TTL_S, delete=True)

    async def _bring_services(self) -> None:
        if self._services is not None:
            anew, self._anew = self._anew, False
            try:
                await self._services.step(anew=anew)
            except DsecError:
                self._anew = True
                raise

    async def close(self) -> None:
        """Deregister and end the session, within seconds; a Consul that is away removes both by itself."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._client.deregister(self._offer.service_id)
                if self._session:
                    await self._client.end_session(self._session)
                if self._services is not None:
                    await self._services.clear()
        except (DsecError, TimeoutError) as error:
            log.warning("could not deregister; Consul will by itself", error=repr(error))
