"""Quotas of a namespace: sandboxes, cores, memory, disk. What is being created counts before it exists."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import msgspec
from libdsec.errors import CapacityError, DeniedError
from msgspec import Meta

from nomad_dsec.gateway.roster import Usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from nomad_dsec.gateway.db import Database
    from nomad_dsec.gateway.roster import Roster

RETRY_AFTER_S = 5.0


class Quota(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Upper bounds; None is no bound. cpus in cores, memory and disk (writable layers) in MiB."""

    sandboxes: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    cpus: Annotated[float, Meta(ge=0)] | None = None
    memory_mib: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    disk_mib: Annotated[int, Meta(ge=0, le=2**53)] | None = None


UNLIMITED = Quota()


class Quotas:
    """Bounds and what is held of them. Use by other gateway replicas shows with the next listing of the nodes."""

    def __init__(self, db: Database, roster: Roster, refresh: Callable[[], Awaitable[None]]) -> None:
        self._db = db
        self._roster = roster
        self._refresh = refresh
        self._quotas: dict[str, Quota] = {}
        self._held: dict[str, Usage] = {}
        self.reload()

    def reload(self) -> None:
        """Read all quotas."""
        rows = self._db.read("SELECT namespace, sandboxes, cpus, memory_mib, disk_mib FROM quotas")
        self._quotas = {
            row[0]: Quota(sandboxes=row[1], cpus=row[2], memory_mib=row[3], disk_mib=row[4]) for row in rows
        }

    def of(self, namespace: str) -> Quota:
        """The bounds of a namespace."""
        return self._quotas.get(namespace, UNLIMITED)

    def usage(self, namespace: str) -> Usage:
        """Live use and what is being created."""
        held = self._held.get(namespace, Usage())
        return self._roster.usage(namespace).plus(held.sandboxes, held.cpus, held.memory_mib, held.disk_mib)

    async def set(self, namespace: str, quota: Quota) -> None:
        """Replace the bounds; what runs already stays."""
        await self._db.write(
            (
                "INSERT OR REPLACE INTO quotas (namespace, sandboxes, cpus, memory_mib, disk_mib) "
                "VALUES (?, ?, ?, ?, ?)",
                (namespace, quota.sandboxes, quota.cpus, quota.memory_mib, quota.disk_mib),
            )
        )
        self._quotas[namespace] = quota

    async def check(self, namespace: str, wanted: Usage) -> None:
        """Return when it fits; asks the nodes again before it refuses, since sandboxes end by themselves.

        Raises DeniedError quota_exceeded when it never can fit, CapacityError quota_exceeded when it may later.
        """
        quota = self._quotas.get(namespace)
        if quota is None or _over(quota, self.usage(namespace), wanted) is None:
            return
        await self._refresh()
        over = _over(quota, self.usage(namespace), wanted)
        if over is not None:
            raise _refused(namespace, *over)

    @contextmanager
    def hold(self, namespace: str, wanted: Usage) -> Iterator[None]:
        """Count `wanted` as used while the block runs. Call right after check, with no await between."""
        held = self._held.get(namespace, Usage())
        self._held[namespace] = held.plus(wanted.sandboxes, wanted.cpus, wanted.memory_mib, wanted.disk_mib)
        try:
            yield
        finally:
            left = self._held[namespace].plus(-wanted.sandboxes, -wanted.cpus, -wanted.memory_mib, -wanted.disk_mib)
            if left.sandboxes:
                self._held[namespace] = left
            else:
                del self._held[namespace]


def _over(quota: Quota, used: Usage, wanted: Usage) -> tuple[str, float, float, float] | None:
    """(resource, limit, used, wanted) of a bound that would be passed, one that never fits before others."""
    rows = (
        ("sandboxes", quota.sandboxes, used.sandboxes, wanted.sandboxes),
        ("cpus", quota.cpus, used.cpus, wanted.cpus),
        ("memory_mib", quota.memory_mib, used.memory_mib, wanted.memory_mib),
        ("disk_mib", quota.disk_mib, used.disk_mib, wanted.disk_mib),
    )
    over = [
        (name, limit, have, more)
        for name, limit, have, more in rows
        if limit is not None and have + more > limit + 1e-9
    ]
    return max(over, key=lambda row: row[3] > row[1], default=None)


def _refused(namespace: str, resource: str, limit: float, used: float, wanted: float) -> DeniedError | CapacityError:
    details = {"resource": resource, "limit": limit, "used": used, "wanted": wanted, "namespace": namespace}
    said = f"namespace {namespace} may use {limit:g} {resource}, uses {used:g}, and {wanted:g} more were asked for"
    if wanted > limit:
        return DeniedError(
            "quota_exceeded", said, field=resource, hint="ask for less, or for more quota", details=details
        )
    return CapacityError(
        "quota_exceeded",
        said,
        field=resource,
        hint="kill sandboxes that are no longer used, or ask for more quota",
        retry_after_s=RETRY_AFTER_S,
        details=details,
    )
