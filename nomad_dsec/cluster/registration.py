"""Keeps one of our processes registered in Consul: TTL heartbeats, and transitions under a session.

Consul away: everything goes on, and is made good when it is back. An agent that restarted has forgotten us: we register
again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from libdsec.errors import DsecError

from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from nomad_dsec.cluster.consul import ConsulClient
    from nomad_dsec.cluster.health import Transitions

log = get_log(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What is registered. ttl_s: three missed heartbeats make it critical."""

    name: str
    service_id: str
    address: str
    port: int
    tags: tuple[str, ...] = ()
    meta: dict[str, str] = field(default_factory=dict)
    ttl_s: float = 15.0


class Registration:
    """Run `run()` as a task of its own; `close()` deregisters."""

    def __init__(
        self,
        client: ConsulClient,
        identity: Identity,
        *,
        note: Callable[[], tuple[bool, str]],
        transitions: Transitions | None = None,
    ) -> None:
        self._client = client
        self._identity = identity
        self._note = note
        self._transitions = transitions
        self._registered = False
        self._session = ""
        self.last_error = ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(self._identity.ttl_s / 3)

    async def step(self) -> None:
        """One heartbeat and what is pending; errors are logged once for each change, never raised."""
        try:
            await self._beat()
            await self._flush()
        except DsecError as error:
            self._registered = False
            if error.code != self.last_error:
                log.warning("Consul is not kept up to date", error=str(error), service=self._identity.service_id)
            self.last_error = error.code
            return
        if self.last_error:
            log.info("Consul is up to date again", service=self._identity.service_id)
        self.last_error = ""

    async def _beat(self) -> None:
        healthy, note = self._note()
        if self._registered:
            try:
                await self._client.heartbeat(self._identity.service_id, healthy=healthy, note=note)
            except DsecError:
                self._registered = False  # the agent may have restarted and forgotten us: register below
            else:
                return
        me = self._identity
        await self._client.register(
            name=me.name,
            service_id=me.service_id,
            address=me.address,
            port=me.port,
            ttl_s=me.ttl_s,
            tags=me.tags,
            meta=me.meta,
        )
        await self._client.heartbeat(me.service_id, healthy=healthy, note=note)
        self._registered = True

    async def _flush(self) -> None:
        if self._transitions is None:
            return
        if self._session and not await self._client.renew_session(self._session):
            self._session = ""
            self._transitions.session_lost()
        puts = self._transitions.pending(self._session or "-")
        if not puts:
            return
        if not self._session:
            self._session = await self._client.open_session(self._identity.service_id, ttl_s=30.0, delete=True)
            puts = self._transitions.pending(self._session)
        await self._client.write(puts)
        self._transitions.written(puts)

    async def close(self) -> None:
        """Deregister and end the session; a Consul that is away removes both by itself."""
        try:
            if self._session:
                await self._client.end_session(self._session)
            await self._client.deregister(self._identity.service_id)
        except DsecError as error:
            log.warning("could not deregister; Consul will by itself", error=str(error))
