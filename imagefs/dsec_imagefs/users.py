"""Who uses which image root, as files ``users/<root hex>/<user>@<image>@<table>``; they outlive every process."""

from __future__ import annotations

import hashlib
import os
import urllib.parse
from typing import TYPE_CHECKING

from dsec_imagefs.durable import sync_directory
from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import digest_hex

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path


class Users:
    """The notes below one directory. Adding is durable before it returns; everything is idempotent.

    With `table` (an id), only that mount table's notes are seen and touched: several nodes may share a store, and none
    may forget another's users or keep its own mounts for them. Without, the notes of all tables are seen.
    """

    def __init__(self, path: Path, table: str = "") -> None:
        self._path = path
        self._table = table

    def of_table(self, mount_dir: Path) -> Users:
        """The notes of the mount table at this directory."""
        return Users(self._path, hashlib.sha256(os.fsencode(mount_dir)).hexdigest()[:12])

    def add(self, root: str, user: str, digest: str) -> bool:
        """Note a user of an image whose root has this hex; False when it is noted already."""
        folder = self._path / root
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / self._key(user, digest)
        if path.exists():
            return False
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        sync_directory(folder)
        return True

    def remove(self, user: str, digest: str) -> None:
        """Forget a user of an image, whatever became of the image."""
        key = self._key(user, digest)
        for folder in self._path.iterdir():
            (folder / key).unlink(missing_ok=True)

    def retain_only(self, users: set[str]) -> int:
        """Forget everybody else; returns how many notes went."""
        return self._forget(lambda key: _user(key) not in users)

    def retain(self, user: str, digests: Collection[str]) -> int:
        """Forget one user's notes about all images but these; returns how many notes went."""
        kept = {self._key(user, digest) for digest in digests}
        return self._forget(lambda key: _user(key) == user and key not in kept)

    def _forget(self, is_gone: Callable[[str], bool]) -> int:
        gone = [path for folder in self._path.iterdir() for path in self._notes(folder) if is_gone(path.name)]
        for path in gone:
            path.unlink(missing_ok=True)
        return len(gone)

    def prune(self) -> None:
        """Drop the folders of roots that nobody uses. The caller holds the store's lock."""
        for folder in self._path.iterdir():
            if not _listing(folder):
                folder.rmdir()

    def of(self, root: str) -> frozenset[str]:
        """Users of a root."""
        return frozenset(_user(path.name) for path in self._notes(self._path / root))

    def roots(self) -> set[str]:
        """Hex of every root that has a user."""
        return {folder.name for folder in self._path.iterdir() if self._notes(folder)}

    def _notes(self, folder: Path) -> list[Path]:
        return [path for path in _listing(folder) if not self._table or path.name.endswith(f"@{self._table}")]

    def _key(self, user: str, digest: str) -> str:
        """A note's name holds the image as well: one user may use two images that share a root."""
        name = urllib.parse.quote(user, safe="")
        if not name or len(name) > 200 or name.startswith("."):
            hint = "1-200 characters, no dot first"
            raise ImageError("bad_name", f"{user!r} can't be a user of an image", hint, "user")
        return f"{name}@{digest_hex(digest)[:16]}@{self._table}"


def _listing(folder: Path) -> list[Path]:
    """The files about one root; none when the folder is not, or no longer, there."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _user(key: str) -> str:
    return urllib.parse.unquote(key.partition("@")[0])
