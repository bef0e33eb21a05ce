"""Where processes of ours are, by blocking queries of Consul. Away, the last good view is kept and called stale."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from libdsec.errors import DsecError

from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from nomad_dsec.cluster.consul import ConsulClient, Service

log = get_log(__name__)
WAIT_S = 10.0  # an agent that hangs is noticed within this and a call's deadline
PAUSE_S = 1.0  # after a failure
BREATH_S = 0.2  # between answers: a node that flaps does not make us spin


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What was last seen. stale: Consul has not confirmed it since; error: why."""

    services: tuple[Service, ...] = ()
    index: int = 0
    stale: bool = True
    error: str = ""


class Discovery:
    """Run `run()` as a task; read `view`; `changed` is set with each change of it (who waits clears it)."""

    def __init__(self, client: ConsulClient, name: str) -> None:
        self._client = client
        self._name = name
        self._confirmed_at: float | None = None
        self.view = View()
        self.changed = asyncio.Event()

    def age_s(self) -> float | None:
        """Seconds since Consul last confirmed the view, None when it never did."""
        if self._confirmed_at is None:
            return None
        return asyncio.get_running_loop().time() - self._confirmed_at

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            answered = False
            try:
                answered = await self.step(wait_s=WAIT_S)
            except Exception:
                log.exception("a query failed unforeseen", service=self._name)
            await asyncio.sleep(BREATH_S if answered else PAUSE_S)

    async def step(self, *, wait_s: float) -> bool:
        """One query; False when Consul did not answer (the view is then stale, never empty for that reason)."""
        try:
            index, services = await self._client.services(self._name, index=self.view.index, wait_s=wait_s)
        except DsecError as error:
            if str(error) != self.view.error:
                log.warning("Consul is away; the last view is kept", service=self._name, error=str(error))
            self._set(replace(self.view, stale=True, index=0, error=str(error)))
            return False
        if self.view.stale:
            log.info("Consul tells", service=self._name, instances=len(services))
        self._confirmed_at = asyncio.get_running_loop().time()
        if index < self.view.index:  # the index went back: a restored server; ask again from the start
            index = 0
        self._set(View(services=tuple(sorted(services, key=lambda row: row.service_id)), index=index, stale=False))
        return True

    def _set(self, view: View) -> None:
        changed = (view.services, view.stale) != (self.view.services, self.view.stale)
        self.view = view
        if changed:
            self.changed.set()
