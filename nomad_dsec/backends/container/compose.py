"""From what was asked (SandboxSpec) to what is made (ContainerSpec): sizes and names of one container. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from nomad_dsec.backends.container.spec import MIB, ContainerSpec, DirUpper, HostMount, Limits, TmpfsUpper
from nomad_dsec.guest.spec import kept_output_bytes
from nomad_dsec.linux.upper import default_inodes

if TYPE_CHECKING:
    from dsec_policies.compiled import CompiledPolicy

    from nomad_dsec.backends.container.spec import Upper
    from nomad_dsec.linux.upper_layer import UpperLayer
    from nomad_dsec.model import SandboxSpec

SHM_MAX_BYTES: Final = 64 * MIB
HOSTNAME_BYTES: Final = 63


def layer_name(spec: SandboxSpec) -> str:
    """The writable layer's name in its store: one an incarnation."""
    return f"{spec.id}.{spec.incarnation}"


def limits_of(spec: SandboxSpec) -> Limits:
    """The sandbox's limits in bytes and cores."""
    return Limits(
        cpus=spec.cpus,
        memory_bytes=spec.memory_mib * MIB,
        pids=spec.pids,
        best_effort=spec.qos == "best_effort",
    )


def shm_bytes(spec: SandboxSpec) -> int:
    """Size of /dev/shm: an eighth of the memory, as it is charged to it, and at most 64 MiB."""
    return min(SHM_MAX_BYTES, spec.memory_mib * MIB // 8)


def log_bytes(spec: SandboxSpec) -> int:
    """What dsec-init may keep of output."""
    return kept_output_bytes(spec.memory_mib)


def tmpfs_bytes(spec: SandboxSpec) -> int:
    """Size of a layer in memory. It is charged to the sandbox, so files as large as the memory would end in the OOM
    killer instead of ENOSPC: with layer and /dev/shm full, a quarter of the memory, or 16 MiB, is left to programs.
    """
    memory = spec.memory_mib * MIB
    files = max(memory - max(memory // 4, 16 * MIB), memory // 2)
    return min(spec.disk_mib * MIB, files - shm_bytes(spec))


def upper_of(spec: SandboxSpec, layer: UpperLayer) -> Upper:
    """The writable layer as launchers take it."""
    if layer.path:
        return DirUpper(path=Path(layer.path))
    size = tmpfs_bytes(spec)
    return TmpfsUpper(size_bytes=size, inodes=default_inodes(size // MIB))


def compose(
    spec: SandboxSpec,
    *,
    compiled: CompiledPolicy,
    rootfs: Path,
    layer: UpperLayer,
    uid_base: int,
    runtime_dir: Path,
    resolvers: tuple[str, ...],
    secrets_uid: int = 0,
) -> ContainerSpec:
    """Everything a launcher needs."""
    return ContainerSpec(
        id=spec.id,
        incarnation=spec.incarnation,
        rootfs=rootfs,
        upper=upper_of(spec, layer),
        limits=limits_of(spec),
        policy=compiled,
        uid_base=uid_base,
        runtime_dir=runtime_dir,
        hostname=(spec.hostname or spec.id)[-HOSTNAME_BYTES:].strip("-."),
        env=spec.env,
        cwd=spec.cwd or "/",
        user=spec.user or "0",
        shm_bytes=shm_bytes(spec),
        log_bytes=log_bytes(spec),
        nameservers=resolvers if compiled.network == "open" else (),
        secrets=spec.secrets,
        secrets_uid=secrets_uid,
        mounts=tuple(
            HostMount(source=Path(item.source), target=item.target, read_only=item.read_only, owners=item.owners)
            for item in spec.mounts
        ),
    )
