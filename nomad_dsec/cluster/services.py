"""Sandboxes that are services of their own in Consul: those that asked for it, up to a cap.

Each is as well as its node's daemon (an alias check, which costs no heartbeat), and in maintenance with a reason while
it is unwell itself. Changes go a few at a time: a registration costs an agent some milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nomad_dsec.cluster.consul import Offer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nomad_dsec.cluster.consul import ConsulClient

ID_PREFIX = "dsec-sandbox-"
CHANGES_A_STEP = 64


class SandboxServices:
    """What the agent should have (`want`), brought there by `step`."""

    def __init__(self, client: ConsulClient, *, owner: str, limit: int) -> None:
        self._client = client
        self._owner = owner  # service id of the node daemon
        self._limit = limit
        self._wanted: dict[str, tuple[Offer, str]] = {}
        self._there: dict[str, tuple[Offer, str] | None] = {}
        self.refused = 0

    def offer(self, sandbox: str, *, name: str, address: str, port: int) -> Offer:
        """The service of one sandbox; its name begins with dsec-sandbox, as the access policy has it."""
        return Offer(
            name=ID_PREFIX + name,
            service_id=ID_PREFIX + sandbox,
            address=address,
            port=port,
            meta={"sandbox": sandbox, "owner": self._owner},
            alias_of=self._owner,
        )

    def want(self, offers: Mapping[str, Offer], unwell: Mapping[str, str]) -> None:
        """All that asked, by sandbox, the oldest first; those beyond the cap are counted in `refused`."""
        kept = list(offers.items())[: self._limit]
        self.refused = len(offers) - len(kept)
        self._wanted = {offer.service_id: (offer, unwell.get(sandbox, "")) for sandbox, offer in kept}

    async def step(self, *, anew: bool) -> bool:
        """Some changes; False when more are due. anew: what the agent has is not known. Raises as the client does."""
        if anew:
            mine = await self._client.registered(ID_PREFIX)
            self._there = {name: None for name, meta in mine.items() if meta.get("owner") == self._owner}
        changes = 0
        for name in [one for one in self._there if one not in self._wanted]:
            if changes == CHANGES_A_STEP:
                return False
            await self._client.deregister(name)
            del self._there[name]
            changes += 1
        for name, wanted in self._wanted.items():
            if self._there.get(name) == wanted:
                continue
            if changes == CHANGES_A_STEP:
                return False
            await self._bring(name, wanted)
            changes += 1
        return True

    async def _bring(self, name: str, wanted: tuple[Offer, str]) -> None:
        known, (offer, reason) = self._there.get(name), wanted
        if known is None or known[0] != offer:
            await self._client.register(offer)
        was_left = known is None and name in self._there  # it may be in maintenance since a former daemon
        if reason or was_left or (known is not None and known[1]):
            await self._client.maintenance(name, on=bool(reason), reason=reason)
        self._there[name] = wanted

    async def clear(self) -> None:
        """Deregister all, for a clean stop."""
        while self._there:
            name = next(iter(self._there))
            await self._client.deregister(name)
            del self._there[name]
