"""A store around a store: everything goes through; who inherits changes what it is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dsec_imagefs.stores.base import Progress, Store, StoredObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """The store inside, call for call."""

    store: Store

    @property
    def label(self) -> str:
        """The inner store's."""
        return self.store.label

    def read(self, digest: str, offset: int, length: int, *, deadline: float) -> bytes:
        """See `Store`."""
        return self.store.read(digest, offset, length, deadline=deadline)

    def size(self, digest: str, *, deadline: float) -> int:
        """See `Store`."""
        return self.store.size(digest, deadline=deadline)

    def has(self, digest: str, *, deadline: float, size: int | None = None) -> bool:
        """See `Store`."""
        return self.store.has(digest, deadline=deadline, size=size)

    def put(self, digest: str, path: Path, *, deadline: float, progress: Progress | None = None) -> bool:
        """See `Store`."""
        return self.store.put(digest, path, deadline=deadline, progress=progress)

    def delete(self, digest: str, *, deadline: float) -> None:
        """See `Store`."""
        self.store.delete(digest, deadline=deadline)

    def put_image(self, image: str, manifest: bytes, objects: Sequence[StoredObject], *, deadline: float) -> None:
        """See `Store`."""
        self.store.put_image(image, manifest, objects, deadline=deadline)

    def get_image(self, image: str, *, deadline: float) -> bytes:
        """See `Store`."""
        return self.store.get_image(image, deadline=deadline)

    def delete_image(self, image: str, *, deadline: float) -> None:
        """See `Store`."""
        self.store.delete_image(image, deadline=deadline)

    def put_ref(self, name: str, image: str, *, deadline: float) -> None:
        """See `Store`."""
        self.store.put_ref(name, image, deadline=deadline)

    def get_ref(self, name: str, *, deadline: float) -> str:
        """See `Store`."""
        return self.store.get_ref(name, deadline=deadline)

    def delete_ref(self, name: str, *, deadline: float) -> None:
        """See `Store`."""
        self.store.delete_ref(name, deadline=deadline)

    def refs(self, *, deadline: float) -> tuple[str, ...]:
        """See `Store`."""
        return self.store.refs(deadline=deadline)

    def put_trace(self, image: str, trace: bytes, *, deadline: float) -> None:
        """See `Store`."""
        self.store.put_trace(image, trace, deadline=deadline)

    def get_trace(self, image: str, *, deadline: float) -> bytes:
        """See `Store`."""
        return self.store.get_trace(image, deadline=deadline)

    def close(self) -> None:
        """See `Store`."""
        self.store.close()
