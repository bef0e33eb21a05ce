"""The network policy of a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libdsec.errors import NotSupported
from libdsec.wire import NetworkInfo

if TYPE_CHECKING:
    from libdsec._http import Transport


def not_supported(feature: str, backend: str, why: str) -> NotSupported:
    """The refusal of a feature, before anything happened."""
    return NotSupported(
        "not_supported",
        f"{feature} is not supported by the {backend} backend: {why}",
        details={"feature": feature, "backend": backend, "why": why},
    )


class AsyncNetwork:
    """What a sandbox may reach."""

    def __init__(self, transport: Transport, sandbox: str, backend: str) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self._backend = backend

    async def get(self) -> NetworkInfo:
        """The policy in force and its generation."""
        return await self._transport.request("GET", f"/v1/sandboxes/{self._sandbox}/network", NetworkInfo)

    async def set(self, policy: dict[str, Any]) -> NetworkInfo:
        """Replace the whole policy. Raises NotSupported: the policy is fixed at create in this version."""
        del policy
        raise not_supported("network.set", self._backend, "the network is chosen at create and fixed from then on")
