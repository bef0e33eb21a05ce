"""The writable layer of a sandbox, bounded in bytes and inodes: which kinds this host can offer, and how each is made.

Whatever the sandbox writes, it meets ENOSPC or EDQUOT inside and the host's disk never fills. Kinds, as probed:
- `btrfs`: a subvolume under a quota group. Inodes are metadata of the subvolume and count against the same bytes.
- `prjquota`: a directory under an ext4 or XFS project quota, with a limit of inodes of its own.
- `tmpfs`: everywhere, and the default. Its pages are charged to the sandbox's memory cgroup, so a sandbox that fills
  its disk needs that memory too; the launcher mounts it in the sandbox's own mount namespace, where it dies unswept.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from libdsec.errors import PlatformError, UsageError

from nomad_dsec.linux.btrfs import BtrfsUpperStore
from nomad_dsec.linux.prjquota import ProjectQuotaUpperStore
from nomad_dsec.linux.upper_layer import UpperLayer, UpperUsage

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

__all__ = ["TmpfsUpperStore", "UpperChoice", "UpperLayer", "UpperStore", "UpperUsage", "adopt_layer", "probe"]

UpperKind = Literal["auto", "tmpfs", "btrfs", "prjquota"]
DEFAULT_INODES_PER_MIB: Final = 64


class UpperStore(Protocol):
    """Makes, measures and removes writable layers of one kind."""

    kind: str

    async def create(self, name: str, *, disk_mib: int, inodes: int, owner: int) -> UpperLayer:
        """An empty layer whose directories belong to host uid and gid `owner`; nothing stays on failure."""
        ...

    async def usage(self, layer: UpperLayer, *, pid: int) -> UpperUsage:
        """What it holds now; `pid`: any live process that has the layer as its root."""
        ...

    async def remove(self, layer: UpperLayer) -> None:
        """Take it away once nobody has it mounted. Idempotent."""
        ...

    async def sweep(self, keep: Collection[str]) -> list[str]:
        """Remove the layers whose names are not in `keep`; returns those names."""
        ...


class TmpfsUpperStore:
    """One tmpfs a sandbox, described here and mounted by its launcher (tmpfs(5))."""

    kind = "tmpfs"

    async def create(self, name: str, *, disk_mib: int, inodes: int, owner: int) -> UpperLayer:
        """The mount's data; nothing exists on the host."""
        data = f"size={disk_mib}m,nr_inodes={inodes},mode=0755,uid={owner},gid={owner}"
        return UpperLayer(kind="tmpfs", name=name, tmpfs_data=data)

    async def usage(self, layer: UpperLayer, *, pid: int) -> UpperUsage:
        """statfs(2) of an overlay answers for its upper layer."""
        del layer
        return statfs_usage(f"/proc/{pid}/root")

    async def remove(self, layer: UpperLayer) -> None:
        """Nothing to do: it went with the last process of its mount namespace."""

    async def sweep(self, keep: Collection[str]) -> list[str]:
        """Nothing to find, for the same reason."""
        del keep
        return []


def statfs_usage(path: str) -> UpperUsage:
    """Bytes and inodes in use on the file system at `path`."""
    state = os.statvfs(path)
    return UpperUsage(
        used_bytes=(state.f_blocks - state.f_bfree) * state.f_frsize, used_inodes=state.f_files - state.f_ffree
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpperChoice:
    """The store that was chosen, and for each kind "" or the reason why it can't be had here."""

    store: UpperStore
    reasons: Mapping[str, str]


def probe(directory: Path, *, node: str, kind: UpperKind = "auto") -> UpperChoice:
    """Find by trying what `directory` (the node's `upper/`) can offer; blocks for some file-system calls.

    auto: btrfs or prjquota when the directory is on one that works, else tmpfs. PlatformError upper_unavailable when a
    kind that was asked for by name does not work, with the reason; UsageError for an unknown kind.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    probes = {"btrfs": BtrfsUpperStore.probe, "prjquota": ProjectQuotaUpperStore.probe}
    if kind not in ("auto", "tmpfs", *probes):
        raise UsageError("bad_upper", f"no upper kind {kind!r}", field="upper", hint="auto, tmpfs, btrfs or prjquota")
    reasons = {"tmpfs": ""}
    chosen: UpperStore = TmpfsUpperStore()
    for name, attempt in probes.items():
        found = attempt(directory, node=node)
        reasons[name] = found if isinstance(found, str) else ""
        if not isinstance(found, str) and chosen.kind == "tmpfs" and kind in ("auto", name):
            chosen = found
    if kind not in ("auto", chosen.kind):
        raise PlatformError(
            "upper_unavailable",
            f"upper layers of kind {kind} don't work in {directory}: {reasons[kind]}",
            hint="use upper = auto, or put the data directory on a file system that has them",
        )
    return UpperChoice(store=chosen, reasons=reasons)


def default_inodes(disk_mib: int) -> int:
    """How many files a disk of that size may hold: one per 16 KiB, as mkfs.ext4 would give."""
    return max(1024, disk_mib * DEFAULT_INODES_PER_MIB)


def adopt_layer(record: Mapping[str, Any]) -> UpperLayer:
    """The layer of a handle's record (UpperLayer.to_record)."""
    return UpperLayer(
        kind=str(record["kind"]),
        name=str(record["name"]),
        path=str(record.get("path", "")),
        tmpfs_data=str(record.get("tmpfs_data", "")),
        quota_id=int(record.get("quota_id", 0)),
    )
