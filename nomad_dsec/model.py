"""Leaf types shared by node, backends and launchers: what a sandbox is to be, and the handle that finds it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

HANDLE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A directory or file of the host shown inside. Only the daemon asks for it, after it checked the source.

    owners: "", or "task" or "host" where inside they are to be others than on the host (wire_tasks.HostMount).
    """

    source: str
    target: str
    read_only: bool = True
    owners: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """All that a backend needs to start one sandbox; validated already.

    cpus: cores (fractions allowed); memory_mib, disk_mib: MiB; policy: a mapping for dsec_policies.parse_policy.
    secrets: file name -> text, shown at /run/secrets/<name> to this sandbox only, never journaled.
    """

    id: str
    incarnation: int
    namespace: str
    digest: str
    backend: str
    cpus: float
    memory_mib: int
    disk_mib: int
    pids: int
    env: Mapping[str, str]
    cwd: str
    user: str
    hostname: str
    qos: str
    policy: Mapping[str, Any]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """The small versioned record that suffices to find, recover and stop a sandbox.

    Written (fsynced) before the resources it names are made and removed after they are gone. `data` belongs to the
    backend and is JSON-able; no secrets in it.
    """

    version: int
    backend: str
    sandbox: str
    incarnation: int
    data: Mapping[str, Any]
