"""What the node daemon remembers of a sandbox: a frozen row, replaced as a whole. Pure; the journal stores it."""

from __future__ import annotations

from typing import Any

import msgspec
from libdsec.wire import SandboxInfo, State
from libdsec.wire_tasks import HostMount  # noqa: TC002 - msgspec looks it up

from nomad_dsec.model import Handle, Mount, SandboxSpec


class HandleRow(msgspec.Struct, kw_only=True, frozen=True):
    """model.Handle as JSON."""

    version: int
    backend: str
    sandbox: str
    incarnation: int
    data: dict[str, Any]


class Row(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One sandbox. Secrets are not in it: they reach the backend at start and are never written.

    Times are seconds since the epoch; a TTL and a lease go on while the daemon is down.
    end_state: what `stopping` leads to, so that a daemon which dies in the middle still tells the true reason.
    mounts, outside: of the sandbox of a cluster's task, whose room the cluster has taken already (see capacity.py).
    """

    id: str
    namespace: str
    backend: str
    image: str
    digest: str
    cpus: float
    memory_mib: int
    disk_mib: int
    pids: int
    timeout_s: float
    created_at: float
    state: State = "creating"
    end_state: State = "exited"
    reason: str = ""
    message: str = ""
    incarnation: int = 1
    qos: str = "latency_sensitive"
    env: dict[str, str] = {}
    cwd: str = "/"
    user: str = "0"
    hostname: str = ""
    policy: dict[str, Any] = {}
    labels: dict[str, str] = {}
    lease_s: float | None = None
    ready_at: float | None = None
    ended_at: float | None = None
    expires_at: float | None = None
    lease_expires_at: float | None = None
    effective_policy: dict[str, Any] = {}
    timings_ms: dict[str, float] = {}
    handle: HandleRow | None = None
    mounts: list[HostMount] = []
    outside: bool = False


def replace(row: Row, **changes: Any) -> Row:
    """The row with some fields changed."""
    return msgspec.structs.replace(row, **changes)


def to_handle(row: HandleRow) -> Handle:
    """The backend's form."""
    return Handle(
        version=row.version, backend=row.backend, sandbox=row.sandbox, incarnation=row.incarnation, data=row.data
    )


def from_handle(handle: Handle) -> HandleRow:
    """The journal's form."""
    return HandleRow(
        version=handle.version,
        backend=handle.backend,
        sandbox=handle.sandbox,
        incarnation=handle.incarnation,
        data=dict(handle.data),
    )


def to_spec(row: Row, secrets: dict[str, str]) -> SandboxSpec:
    """What the backend is asked to start."""
    return SandboxSpec(
        id=row.id,
        incarnation=row.incarnation,
        namespace=row.namespace,
        digest=row.digest,
        backend=row.backend,
        cpus=row.cpus,
        memory_mib=row.memory_mib,
        disk_mib=row.disk_mib,
        pids=row.pids,
        env=row.env,
        cwd=row.cwd,
        user=row.user,
        hostname=row.hostname,
        qos=row.qos,
        policy=row.policy,
        secrets=secrets,
        mounts=tuple(
            Mount(source=item.host_path, target=item.task_path, read_only=item.readonly, owners=item.owners)
            for item in row.mounts
        ),
    )


def to_info(row: Row, node: str, *, brief: bool = False) -> SandboxInfo:
    """What the outside sees; brief leaves out the policy, which is long and much the same for all of a listing."""
    return SandboxInfo(
        id=row.id,
        node=node,
        namespace=row.namespace,
        backend=row.backend,
        image=row.image,
        digest=row.digest,
        state=row.state,
        reason=row.reason,
        message=row.message,
        incarnation=row.incarnation,
        cpus=row.cpus,
        memory_mib=row.memory_mib,
        disk_mib=row.disk_mib,
        qos=row.qos,
        labels=row.labels,
        created_at=row.created_at,
        ready_at=row.ready_at,
        ended_at=row.ended_at,
        expires_at=row.expires_at,
        lease_expires_at=row.lease_expires_at,
        policy={} if brief else row.effective_policy,
        timings_ms=row.timings_ms,
    )
