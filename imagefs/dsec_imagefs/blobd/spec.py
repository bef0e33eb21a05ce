"""What an attached blob is; durable as one small JSON file, so that a restart needs no caller and no store."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any

from dsec_imagefs.errors import ImageError

_HEX = re.compile(r"[0-9a-f]{64}")
MAX_BLOB_BYTES = 1 << 44  # EROFS addresses 2^32 blocks of 4 KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobSpec:
    """One blob.

    Attributes:
        digest: sha256 of the raw bytes, hex.
        size: raw bytes.
        index: path of the index object (layer/index.py) on the local disk, complete.
        wire: sha256, hex, of what lies in the store; the digest itself when it is stored raw.
        store: store URL (stores/parse.py), or "" when all blocks are local.
        options: further words for the store (an auth file's path); never secrets themselves.
    """

    digest: str
    size: int
    index: str
    wire: str = ""
    store: str = ""
    options: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_hex(self.digest, "digest")
        if self.wire:
            _check_hex(self.wire, "wire")
        if not isinstance(self.size, int) or isinstance(self.size, bool) or not 0 < self.size <= MAX_BLOB_BYTES:
            raise ImageError("bad_source", f"size must be 1 to {MAX_BLOB_BYTES}, not {self.size!r}", "", "size")
        for name in ("index", "store"):
            if not isinstance(getattr(self, name), str) or "\0" in getattr(self, name):
                raise ImageError("bad_source", f"{name} must be a string", f"change {name}", name)
        if not self.index.startswith("/"):
            raise ImageError("bad_source", f"index must be an absolute path, not {self.index!r}", "", "index")
        if not isinstance(self.options, dict) or not all(isinstance(v, str) for kv in self.options.items() for v in kv):
            raise ImageError("bad_source", "options must map strings to strings", "", "options")

    def to_json(self) -> dict[str, Any]:
        """For the wire and the record."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> BlobSpec:
        """Checked; unknown and missing names are errors."""
        if not isinstance(values, dict):
            raise ImageError("bad_source", "a blob must be an object", "", "blob")
        known = {one.name for one in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise ImageError("bad_source", f"a blob has no {name!r}", f"one of {', '.join(sorted(known))}", name)
        for name in ("digest", "size", "index"):
            if name not in values:
                raise ImageError("bad_source", f"a blob needs {name}", f"give {name}", name)
        return cls(**values)


def _check_hex(value: Any, name: str) -> None:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ImageError("bad_source", f"{name} must be 64 hex digits, not {value!r}", "", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A blob's file in `attached/`.

    Attributes:
        spec: the blob.
        ours: the data file was made by us (it counts in the cache's bytes), not found complete.
        holds: user -> mount id of the server it was mounted over; a hold keeps the blob from eviction and detaching.
    """

    spec: BlobSpec
    ours: bool
    holds: dict[str, str] = field(default_factory=dict)

    def render(self) -> bytes:
        """As stored."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def parse(cls, raw: bytes) -> Record:
        """Raises ImageError ``corrupt``."""
        try:
            values = json.loads(raw)
            return cls(spec=BlobSpec.from_json(values["spec"]), ours=bool(values["ours"]), holds=dict(values["holds"]))
        except (ValueError, KeyError, TypeError) as err:
            raise ImageError(
                "corrupt", f"a record of an attached blob can't be read: {err}", "attach it again"
            ) from err
