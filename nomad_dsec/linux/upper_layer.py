"""The record of one writable layer, shared by its kinds. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class UpperLayer:
    """Where a sandbox's overlay writes.

    Kinds with a directory have `path`, holding `upper` and `work`. For tmpfs the path is "" and `tmpfs_data` is the
    data argument of mount(2): the launcher mounts it in the sandbox's mount namespace, and makes upper and work in it.
    quota_id: number of the quota group or project, 0 when there is none.
    """

    kind: str
    name: str
    path: str = ""
    tmpfs_data: str = ""
    quota_id: int = 0

    @property
    def upper(self) -> str:
        """Overlay's upperdir; "" for tmpfs."""
        return f"{self.path}/upper" if self.path else ""

    @property
    def work(self) -> str:
        """Overlay's workdir; "" for tmpfs."""
        return f"{self.path}/work" if self.path else ""

    def to_record(self) -> dict[str, Any]:
        """What a handle keeps; upper.adopt_layer takes it."""
        return {
            "kind": self.kind,
            "name": self.name,
            "path": self.path,
            "tmpfs_data": self.tmpfs_data,
            "quota_id": self.quota_id,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UpperUsage:
    """What a layer holds now; used_inodes is 0 for btrfs, which does not count them."""

    used_bytes: int
    used_inodes: int
