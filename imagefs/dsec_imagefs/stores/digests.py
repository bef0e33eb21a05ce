"""Checking that bytes are what their digest says: a document in memory, a file before it is sent."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from dsec_imagefs.stores.base import StoreError, plain_hex, remaining

if TYPE_CHECKING:
    from pathlib import Path

_CHUNK_BYTES = 1 << 20


def checked(data: bytes, digest: str, what: str) -> bytes:
    """The same bytes; raises StoreError ``corrupt`` (retryable: another server of the store may have it right)."""
    found = hashlib.sha256(data).hexdigest()
    if found != plain_hex(digest):
        raise StoreError("corrupt", f"{what} is {found}, not {plain_hex(digest)}", retryable=True)
    return data


def check_file(path: Path, digest: str, deadline: float) -> None:
    """Raise StoreError ``corrupt`` unless the file has the digest."""
    summed = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            remaining(deadline, f"hashing {path.name}")
            summed.update(chunk)
    if summed.hexdigest() != plain_hex(digest):
        raise wrong_file(path, digest, summed.hexdigest())


def wrong_file(path: Path, digest: str, found: str) -> StoreError:
    """The error for a file that is not what its digest says."""
    return StoreError("corrupt", f"{path} is {found}, not {plain_hex(digest)}: not pushed", "build the layer again")
