"""What compilers made, by content: sealed memory files for programs in use, a bounded directory on disk for all.

The key covers everything that goes into a compilation, so an entry never goes stale. A broken entry is a missing one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from libdsec.wire_fncall import CompileResult  # noqa: TC002 - msgspec reads it

from nomad_dsec.backends.fncall.languages import BINARY
from nomad_dsec.linux.memfd import make_memfd

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_VERSION = b"dsec fncall artefacts 1\0"


class _Stored(msgspec.Struct, kw_only=True):
    result: CompileResult
    files: dict[str, bytes]


@dataclass(slots=True, eq=False, kw_only=True)
class Artefact:
    """One compilation. binary_fd: a sealed, executable memory file of the program, or -1; files: all that is not it."""

    result: CompileResult
    files: Mapping[str, bytes]
    binary_fd: int = -1
    size: int = 0
    users: int = 0
    is_dropped: bool = False
    _opened: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def make(cls, result: CompileResult, files: Mapping[str, bytes]) -> Artefact:
        """From a compiler's output."""
        made = cls(result=result, files={n: c for n, c in files.items() if n != BINARY})
        binary = files.get(BINARY)
        if binary:
            made.binary_fd = make_memfd(BINARY, binary, made._opened, sealed=True)
        made.size = sum(map(len, files.values()))
        return made

    def release(self) -> None:
        """Let go of what take() held."""
        self.users -= 1
        self._close_if_unused()

    def drop(self) -> None:
        """No longer in the cache: its memory goes with its last user."""
        self.is_dropped = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.is_dropped and self.users <= 0:
            self._opened.close()
            self.binary_fd = -1


def key_of(parts: Iterable[bytes]) -> str:
    """A digest of all that goes in: image, argv, limits, sources; each part by its length."""
    digest = hashlib.sha256(_VERSION)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


class ArtefactCache:
    """Least recently used first to go, in memory by memory_bytes, on disk by disk_bytes."""

    def __init__(self, directory: Path, *, memory_bytes: int, disk_bytes: int) -> None:
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._disk_bytes = disk_bytes
        self._kept: OrderedDict[str, Artefact] = OrderedDict()
        self._in_memory = 0
        self._written = disk_bytes  # so that the first write looks at what earlier daemons left

    def take_nowait(self, key: str) -> Artefact | None:
        """From memory; the caller releases it."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            found.users += 1
        return found

    async def take(self, key: str) -> Artefact | None:
        """From memory or disk; the caller releases it."""
        found = self.take_nowait(key)
        if found is not None:
            return found
        stored = await asyncio.to_thread(self._read, key)
        if stored is None:
            return None
        return self.take_nowait(key) or self._keep(key, Artefact.make(stored.result, stored.files))

    async def put(self, key: str, result: CompileResult, files: Mapping[str, bytes]) -> Artefact:
        """Remember a compilation; the caller releases it."""
        await asyncio.to_thread(self._write, key, _Stored(result=result, files=dict(files)))
        return self._keep(key, Artefact.make(result, files))

    def _keep(self, key: str, made: Artefact) -> Artefact:
        made.users += 1
        old = self._kept.pop(key, None)
        if old is not None:
            self._in_memory -= old.size
            old.drop()
        self._kept[key] = made
        self._in_memory += made.size
        while self._in_memory > self._memory_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._in_memory -= oldest.size
            oldest.drop()
        return made

    def _path(self, key: str) -> Path:
        return self._directory / key[:2] / key

    def _read(self, key: str) -> _Stored | None:
        path = self._path(key)
        try:
            raw = path.read_bytes()
            os.utime(path)
            digest, body = raw[:32], raw[32:]
            if hashlib.sha256(body).digest() != digest:
                raise ValueError("damaged")
            return msgspec.msgpack.decode(body, type=_Stored)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.MsgspecError):
            path.unlink(missing_ok=True)
            return None

    def _write(self, key: str, stored: _Stored) -> None:
        body = msgspec.msgpack.encode(stored)
        path = self._path(key)
        fresh = path.with_suffix(f".{os.getpid()}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_bytes(hashlib.sha256(body).digest() + body)
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)  # a full disk costs a compilation, not a result
            return
        self._written += len(body)
        if self._written >= self._disk_bytes // 8:
            self._written = 0
            self._prune()

    def _prune(self) -> None:
        found = []
        for path in self._directory.glob("*/*"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._disk_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size

    def close(self) -> None:
        """Let go of the memory; the disk's part stays for the next daemon."""
        for made in self._kept.values():
            made.drop()
        self._kept.clear()
