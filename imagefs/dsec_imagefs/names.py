"""The names of a store: one file ``refs/<quoted name>`` each. Whoever writes one holds the store's lock."""

from __future__ import annotations

import json
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.durable import sync_directory, write_durably
from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import digest_hex, normal_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Names:
    """The files below ``refs``."""

    folder: Path

    def write(self, name: str, digest: str) -> None:
        """Let a full name point to an image."""
        write_durably(self._path(name), json.dumps({"name": name, "digest": digest}).encode())

    def read(self, ref: str) -> str | None:
        """The digest of a name, its tag left out or not; None when it is no name here."""
        try:
            path = self._path(normal_name(ref, "ref"))
        except ImageError:
            return None
        return _parse(path)[1] if path.exists() else None

    def remove(self, names: Iterable[str]) -> None:
        """Forget names."""
        for name in names:
            self._path(name).unlink(missing_ok=True)
        sync_directory(self.folder)

    def by_digest(self) -> dict[str, tuple[str, ...]]:
        """All names, sorted, by the digest they point to."""
        found: dict[str, list[str]] = {}
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith("."):
                continue
            try:
                name, digest = _parse(path)
            except FileNotFoundError:  # removed since the listing
                continue
            found.setdefault(digest, []).append(name)
        return {digest: tuple(names) for digest, names in found.items()}

    def _path(self, name: str) -> Path:
        return self.folder / urllib.parse.quote(name, safe="")


def _parse(path: Path) -> tuple[str, str]:
    """Name and digest of a file in ``refs``."""
    try:
        entry = json.loads(path.read_bytes())
        name, digest = str(entry["name"]), str(entry["digest"])
        digest_hex(digest)
    except (ValueError, KeyError, TypeError, ImageError) as err:
        raise ImageError("corrupt", f"{path} can't be read: {err}", "remove the file and tag the image again") from err
    return name, digest
