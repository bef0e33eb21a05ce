"""A store in memory, with faults on demand, for tests of what stands on stores."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsec_imagefs.stores.base import StoredObject, StoreError, escape_name, plain_hex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dsec_imagefs.stores.base import Progress


@dataclass
class MemoryStore:
    """`faults`: what becomes of the bytes of each next read; it may raise. `log`: calls that changed something."""

    objects: dict[str, bytes] = field(default_factory=dict)
    images: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    traces: dict[str, bytes] = field(default_factory=dict)
    faults: deque[Callable[[bytes], bytes]] = field(default_factory=deque)
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    label: str = "memory:"

    def add(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.objects[digest] = data
        return digest

    def read(self, digest: str, offset: int, length: int, *, deadline: float) -> bytes:
        with self.lock:
            self.reads.append((digest, offset, length))
            fault = self.faults.popleft() if self.faults else None
        data = self._get(self.objects, digest)[offset : offset + length]
        if len(data) < length:
            raise StoreError("short", f"{self.label} is short", retryable=True)
        return fault(data) if fault else data

    def size(self, digest: str, *, deadline: float) -> int:
        return len(self._get(self.objects, digest))

    def has(self, digest: str, *, deadline: float, size: int | None = None) -> bool:
        found = self.objects.get(plain_hex(digest))
        return found is not None and size in (None, len(found))

    def put(self, digest: str, path: Path, *, deadline: float, progress: Progress | None = None) -> bool:
        if self.has(digest, deadline=deadline):
            return False
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != plain_hex(digest):
            raise StoreError("corrupt", f"{path} is not {digest}")
        self.objects[plain_hex(digest)] = data
        self.log.append(f"put {plain_hex(digest)}")
        if progress is not None:
            progress(len(data), len(data))
        return True

    def delete(self, digest: str, *, deadline: float) -> None:
        self.objects.pop(plain_hex(digest), None)

    def put_image(self, image: str, manifest: bytes, objects: Sequence[StoredObject], *, deadline: float) -> None:
        for item in objects:
            self._get(self.objects, item.digest)
        self.images[plain_hex(image)] = manifest
        self.log.append("image")

    def get_image(self, image: str, *, deadline: float) -> bytes:
        return self._get(self.images, image)

    def delete_image(self, image: str, *, deadline: float) -> None:
        self.images.pop(plain_hex(image), None)

    def put_ref(self, name: str, image: str, *, deadline: float) -> None:
        escape_name(name)
        self._get(self.images, image)
        self.names[name] = plain_hex(image)
        self.log.append(f"ref {name}")

    def get_ref(self, name: str, *, deadline: float) -> str:
        escape_name(name)
        if name not in self.names:
            raise StoreError("not_found", f"no name {name}")
        return self.names[name]

    def delete_ref(self, name: str, *, deadline: float) -> None:
        self.names.pop(name, None)

    def refs(self, *, deadline: float) -> tuple[str, ...]:
        return tuple(sorted(self.names))

    def put_trace(self, image: str, trace: bytes, *, deadline: float) -> None:
        self.traces[plain_hex(image)] = trace

    def get_trace(self, image: str, *, deadline: float) -> bytes:
        return self._get(self.traces, image)

    def close(self) -> None:
        pass

    def _get(self, rows: dict[str, bytes], digest: str) -> bytes:
        if plain_hex(digest) not in rows:
            raise StoreError("not_found", f"{self.label} has no {digest}")
        return rows[plain_hex(digest)]
