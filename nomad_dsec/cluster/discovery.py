"""Where the node daemons are, by blocking queries of Consul. Away, the last good view is kept and called stale."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from libdsec.errors import DsecError

from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from nomad_dsec.cluster.consul import ConsulClient, Service

log = get_log(__name__)
_WAIT_S = 30.0
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What was last seen. stale: Consul has not confirmed it since."""

    services: tuple[Service, ...] = ()
    index: int = 0
    stale: bool = True


class Discovery:
    """Run `run()` as a task; read `view`, or wait for a change by `changed`."""

    def __init__(self, client: ConsulClient, name: str) -> None:
        self._client = client
        self._name = name
        self.view = View()
        self.changed = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if not await self.step(wait_s=_WAIT_S):
                await asyncio.sleep(_PAUSE_S)

    async def step(self, *, wait_s: float) -> bool:
        """One query; False when Consul did not answer (the view is then stale, never empty for that reason)."""
        try:
            index, services = await self._client.services(self._name, index=self.view.index, wait_s=wait_s)
        except DsecError as error:
            if not self.view.stale:
                log.warning("Consul is away; the last view of the nodes is kept", error=str(error))
            self._set(replace(self.view, stale=True, index=0))
            return False
        if index < self.view.index:  # the index went back: a restored server; ask again from the start
            index = 0
        self._set(View(services=tuple(sorted(services, key=lambda row: row.service_id)), index=index, stale=False))
        return True

    def _set(self, view: View) -> None:
        if (view.services, view.stale) != (self.view.services, self.view.stale):
            self.changed.set()
        self.view = view
