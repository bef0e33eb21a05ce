"""Bounds and deadlines of one blob server, and where its files lie below a store root."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All of it has defaults; `from_json` checks what came from outside.

    Attributes:
        cache_bytes: what cached blocks may take on disk, all blobs together.
        pinned_share: the part of `cache_bytes` that complete blobs may take; only they are served without requests,
            and they are evicted only when told so.
        read_deadline_s: after it a read that still lacks a block gets EIO.
        readers: threads that take requests from the kernel.
        fetchers: threads that fetch blocks; half of them at most prefetch.
        pending_reads: reads that wait for blocks at one time; over it the kernel keeps the rest.
        prefetch_blocks: blocks that may be queued for prefetch; over it a prefetch is refused.
        readahead_blocks: how far a sequential run of misses is fetched ahead; 0 is never.
        sync_s: how long a fetched block may wait for being noted as present (until then an unclean end costs a hash).
        passthrough: give complete blobs to the kernel where it can take them (Linux 6.9).
        resend: use FUSE_NOTIFY_RESEND where the kernel has it (6.9); False tests the way of older ones.
        heartbeat_s: a worker that shows no life for so long is killed and replaced.
        quick_deaths: so many workers in a row that live less than 5 s, and the mount is given up: readers get EIO.
    """

    cache_bytes: int = 64 << 30
    pinned_share: float = 0.5
    read_deadline_s: float = 45.0
    readers: int = 4
    fetchers: int = 16
    pending_reads: int = 4096
    prefetch_blocks: int = 1 << 18
    readahead_blocks: int = 4
    sync_s: float = 2.0
    passthrough: bool = True
    resend: bool = True
    heartbeat_s: float = 30.0
    quick_deaths: int = 6

    def __post_init__(self) -> None:
        for name in ("readers", "fetchers", "pending_reads", "prefetch_blocks", "quick_deaths"):
            if not 1 <= getattr(self, name) <= 1 << 20:
                raise ImageError("bad_source", f"{name} must be 1 to {1 << 20}", f"change {name}", name)
        if self.cache_bytes < 0 or self.readahead_blocks < 0:
            raise ImageError("bad_source", "cache_bytes and readahead_blocks can't be negative", "", "cache_bytes")
        if not 0 <= self.pinned_share <= 1:
            raise ImageError("bad_source", "pinned_share must be 0 to 1", "", "pinned_share")
        for name in ("read_deadline_s", "sync_s", "heartbeat_s"):
            if not 0.01 <= getattr(self, name) <= 3600:
                raise ImageError("bad_source", f"{name} must be 0.01 to 3600 seconds", f"change {name}", name)

    def to_json(self) -> str:
        """One line, for a command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The other way; unknown names are errors."""
        values: dict[str, Any] = json.loads(text)
        known = {field.name: field.type for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ImageError("bad_source", f"there is no setting {name!r}", f"one of {', '.join(known)}", name)
            if isinstance(value, bool) != (known[name] == "bool") or not isinstance(value, int | float):
                raise ImageError("bad_source", f"{name} must be a {known[name]}, not {value!r}", "", name)
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The files of one store root that the server uses."""

    root: Path

    @property
    def blobs(self) -> Path:
        """Data files `<hex>` (complete, or sparse when `<hex>.map` lies beside)."""
        return self.root / "blobs"

    @property
    def mount(self) -> Path:
        """The FUSE mount."""
        return self.root / "blobs.mnt"

    @property
    def own(self) -> Path:
        """Lock, socket, log and records."""
        return self.root / "blobd"

    @property
    def records(self) -> Path:
        """One `<hex>.json` an attached blob."""
        return self.own / "attached"

    @property
    def socket(self) -> Path:
        """The control socket."""
        return self.own / "control.sock"

    def make(self) -> None:
        """Create the directories, for the owner only. Not the mount's: to look at it is a request to the server."""
        for path in (self.blobs, self.own, self.records):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
