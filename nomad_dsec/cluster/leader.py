"""One leader at a time by a Consul lock: held as long as its session is renewed, lost at once when it is not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from libdsec.errors import DsecError

if TYPE_CHECKING:
    from nomad_dsec.cluster.consul import ConsulClient


class LeaderLock:
    """`await step()` every third of the TTL; act only while `is_leader(now)`.

    The leader counts its own lease from before the renewal was sent, so it stops acting no later than Consul gives the
    lock away: two leaders are never active, whatever the network does.
    """

    def __init__(self, client: ConsulClient, key: str, name: str, *, ttl_s: float = 15.0) -> None:
        self._client = client
        self._key = key
        self._name = name
        self._ttl_s = max(10.0, ttl_s)
        self._session = ""
        self._held_until = 0.0

    def is_leader(self, now: float) -> bool:
        """By the loop's clock (asyncio's `loop.time()`)."""
        return now < self._held_until

    async def step(self) -> bool:
        """Renew, or try to take; False when another leads or Consul is away."""
        began = asyncio.get_running_loop().time()
        try:
            if self._session and not await self._client.renew_session(self._session):
                self._session = ""
            if not self._session:
                self._held_until = 0.0
                self._session = await self._client.open_session(self._name, ttl_s=self._ttl_s, delete=False)
            if await self._client.try_lock(self._key, self._name.encode(), self._session):
                self._held_until = began + self._ttl_s
            else:
                self._held_until = 0.0
        except DsecError:
            return self.is_leader(asyncio.get_running_loop().time())
        return self._held_until > 0

    async def close(self) -> None:
        """Give the lock back."""
        self._held_until = 0.0
        if self._session:
            session, self._session = self._session, ""
            await self._client.unlock(self._key, session)
            await self._client.end_session(session)
