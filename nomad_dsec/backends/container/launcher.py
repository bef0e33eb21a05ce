"""The one seam between the container backend and what starts a container: spec + slot in, a running dsec-init out.

Two launchers stand behind it: native (our own C list-runner) and oci (crun, runc, runsc). Killing, freezing, limits and
accounting go through the slot's cgroups and are the backend's, the same for both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nomad_dsec.backends.container.spec import ContainerSpec
    from nomad_dsec.linux.cgroup import Cgroup
    from nomad_dsec.linux.netns_pool import NetSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Ready-made kernel objects of the host that the container is put into; the backend owns them.

    cgroup: limits are set, and its cgroup2 directory belongs to `uid_base`, so that dsec-init makes a child cgroup for
    each exec (cgroup_fd, an open directory, or -1 without cgroup2). net.fd is a network namespace for setns(2).
    """

    cgroup: Cgroup
    cgroup_fd: int
    net: NetSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """PID 1 of the container as the host sees it. pidfd is owned by the receiver, which closes it.

    steps_ms: named steps inside the launch (same names as the plan's operations), for timings.
    """

    pid: int
    pidfd: int
    steps_ms: Mapping[str, float] = field(default_factory=dict)


class Launcher(Protocol):
    """Starts containers. All or nothing: when launch raises or is cancelled no process or mount of it is left."""

    name: str

    async def probe(self) -> str:
        """Empty when this launcher works here, else the reason; found by trying."""
        ...

    async def launch(self, spec: ContainerSpec, slot: Slot, listen_fd: int) -> Launched:
        """Start; returns once PID 1 has everything set up and serves on listen_fd.

        listen_fd: a listening unix stream socket bound to spec.socket_path; it stays open here and is the caller's.
        Raises PlatformError launch_failed with details {"step", "errno"} naming the operation that failed.
        """
        ...

    async def forget(self, sandbox: str, runtime_dir: Path) -> None:
        """Drop what the launcher itself keeps of a dead container (bundle, runtime state). Idempotent.

        runtime_dir: that of the container's spec.
        """
        ...

    def plan(self, spec: ContainerSpec) -> list[dict[str, Any]]:
        """What launch would do, JSON-able and in order (native: the operations; oci: one entry with config.json)."""
        ...

    async def close(self) -> None:
        """End helper processes; running containers stay."""
        ...
