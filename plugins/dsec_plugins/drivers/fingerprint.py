"""What the client shows of a driver: health with a stable text, and attributes that do not vary from node to node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libdsec.errors import DsecError
from libdsec.wire import NodeInfo

from dsec_plugins.drivers.convert import pause
from dsec_plugins.proto import driver_pb2 as pb
from dsec_plugins.proto import structs_pb2

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator

    from dsec_plugins.drivers.base import Shared
    from dsec_plugins.drivers.kinds import DriverKind

_EVERY_S = 5.0

UNDETECTED = pb.FingerprintResponse.UNDETECTED
UNHEALTHY = pb.FingerprintResponse.UNHEALTHY
HEALTHY = pb.FingerprintResponse.HEALTHY


def judge(kind: DriverKind, info: NodeInfo) -> tuple[int, str, dict[str, str]]:
    """Health, its text, and attributes, from the node daemon's own fingerprint. Pure."""
    prefix = f"driver.{kind.name}"
    attributes = {f"{prefix}.version": info.version}
    if info.draining:
        return UNHEALTHY, "the node daemon is draining", attributes
    if not kind.backend:
        return HEALTHY, "ready", attributes
    found = next((row for row in info.backends if row.name == kind.backend), None)
    if found is None:
        return UNDETECTED, f"the node daemon does not offer the {kind.backend} backend", attributes
    attributes |= {f"{prefix}.{key}": value for key, value in sorted(found.attributes.items())}
    attributes |= {f"{prefix}.feature.{name}": "1" for name in sorted(found.features)}
    if not found.available:
        return UNHEALTHY, found.reason or "the backend is not available", attributes
    return HEALTHY, "ready", attributes


async def fingerprints(kind: DriverKind, shared: Shared, ending: asyncio.Event) -> AsyncIterator[Any]:
    """The first at once, then one a change. An attribute that goes is sent once more, empty: so the client drops it."""
    sent: tuple[int, str, dict[str, str]] | None = None
    while not ending.is_set():
        now = await _look(kind, shared)
        if now != sent:
            gone = {} if sent is None else {key: "" for key in sent[2] if key not in now[2]}
            yield _message(now[0], now[1], now[2] | gone)
            sent = now
        await pause(ending, _EVERY_S)


async def _look(kind: DriverKind, shared: Shared) -> tuple[int, str, dict[str, str]]:
    if not shared.config.enabled:
        return UNDETECTED, "switched off in the plugin's config", {}
    try:
        return judge(kind, await shared.node.call("GET", "/v1/node", NodeInfo, timeout_s=5.0))
    except DsecError as error:
        return UNHEALTHY, f"{error.code}: the node daemon does not answer", {}


def _message(health: int, text: str, attributes: dict[str, str]) -> Any:
    return pb.FingerprintResponse(
        health=health,
        health_description=text,
        attributes={key: structs_pb2.Attribute(string_val=value) for key, value in attributes.items()},
    )
