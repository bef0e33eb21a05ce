"""A store in a directory: on a local disk, or on NFS or 3FS where many nodes publish and read at once.

No locks are used, since NFS may lack them: everything is written beside its place and renamed, and equal digests are
equal bytes, so it does not matter who comes first. A read blocked inside the kernel by a dead server ends when the
mount says so (``soft``, ``timeo``), not at the deadline.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import socket
import stat
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsec_imagefs.stores.base import (
    MAX_DOCUMENT_BYTES,
    StoreError,
    escape_name,
    plain_hex,
    remaining,
    unescape_name,
)
from dsec_imagefs.stores.digests import wrong_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dsec_imagefs.stores.base import Progress, StoredObject

MARKER = "dsec-store"  # its absence tells an empty mount point from a store without the object
MARKER_TEXT = b"dsec-store 1\n"
ABANDONED_S = 7 * 86400.0
_CHUNK_BYTES = 1 << 20
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # directories of FUSE and 3FS mounts can't be synced


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryStore:
    """Objects under ``objects/<2 hex>/<64 hex>``, and one small file for each image, name and trace."""

    root: Path
    _swept: list[bool] = field(default_factory=lambda: [False])

    @property
    def label(self) -> str:
        """``dir:PATH``."""
        return f"dir:{self.root}"

    def read(self, digest: str, offset: int, length: int, *, deadline: float) -> bytes:
        """Exactly `length` bytes from `offset` on."""
        path = self._object(digest)
        remaining(deadline, self.label)
        with self._faults(path, "object"):
            fd = _open_file(path)
            try:
                data = os.pread(fd, length, offset)
                while len(data) < length:
                    more = os.pread(fd, length - len(data), offset + len(data))
                    if not more:
                        raise self._short(path, offset, length, len(data))
                    data += more
            finally:
                os.close(fd)
        return data

    def size(self, digest: str, *, deadline: float) -> int:
        """Length of an object."""
        path = self._object(digest)
        remaining(deadline, self.label)
        with self._faults(path, "object"):
            return path.stat(follow_symlinks=False).st_size

    def has(self, digest: str, *, deadline: float, size: int | None = None) -> bool:
        """Whether the object is there; one of another length is what a server's crash left."""
        path = self._object(digest)
        remaining(deadline, self.label)
        try:
            with self._faults(path, "object"):
                found = path.stat(follow_symlinks=False).st_size
        except StoreError as error:
            if isinstance(error.__cause__ or error.__context__, FileNotFoundError):
                return False  # also where no store is yet: whoever asks is about to push
            raise
        return size in (None, found)

    def put(self, digest: str, path: Path, *, deadline: float, progress: Progress | None = None) -> bool:
        """Copy a file in under its digest, checked on the way."""
        target, total = self._object(digest), path.stat().st_size
        if self.has(digest, deadline=deadline, size=total):
            return False
        self._prepare()

        def copy(fd: int) -> None:
            summed, done = hashlib.sha256(), 0
            with path.open("rb", buffering=0) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    remaining(deadline, f"{self.label}: copying {path.name}")
                    summed.update(chunk)
                    _write_all(fd, chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(done, total)
            if summed.hexdigest() != plain_hex(digest):
                raise wrong_file(path, digest, summed.hexdigest())

        self._publish(target, copy)
        return True

    def delete(self, digest: str, *, deadline: float) -> None:
        """Remove an object."""
        self._unlink(self._object(digest), deadline)

    def put_image(self, image: str, manifest: bytes, objects: Sequence[StoredObject], *, deadline: float) -> None:
        """Publish an image manifest; raises StoreError ``not_found`` while an object of it is missing."""
        for item in objects:
            if not self.has(item.digest, deadline=deadline):
                raise missing_object(self.label, item)
        self._put_document(self._image(image), manifest, deadline)

    def get_image(self, image: str, *, deadline: float) -> bytes:
        """The manifest of an image."""
        return self._get_document(self._image(image), "image", deadline)

    def delete_image(self, image: str, *, deadline: float) -> None:
        """Remove an image's manifest."""
        self._unlink(self._image(image), deadline)

    def put_ref(self, name: str, image: str, *, deadline: float) -> None:
        """Let a name point to a published image."""
        path, target = self._ref(name), plain_hex(image)
        with self._faults(self._image(target), "image"):
            self._image(target).stat()
        self._put_document(path, target.encode() + b"\n", deadline)

    def get_ref(self, name: str, *, deadline: float) -> str:
        """Digest of the image a name points to."""
        text = self._get_document(self._ref(name), "name", deadline).decode("ascii", "replace").strip()
        try:
            return plain_hex(text)
        except StoreError as error:
            raise StoreError("corrupt", f"{self.label}: the name {name} holds no digest", "push it again") from error

    def delete_ref(self, name: str, *, deadline: float) -> None:
        """Remove a name."""
        self._unlink(self._ref(name), deadline)

    def refs(self, *, deadline: float) -> tuple[str, ...]:
        """All names, sorted."""
        remaining(deadline, self.label)
        directory = self.root / "refs"
        with self._faults(directory, "directory"):
            try:
                words = os.listdir(directory)  # noqa: PTH208  (names alone are wanted)
            except FileNotFoundError:
                self._check_marker()
                return ()
        return tuple(sorted(name for word in words if (name := unescape_name(word)) is not None))

    def put_trace(self, image: str, trace: bytes, *, deadline: float) -> None:
        """Keep a trace."""
        self._put_document(self._trace(image), trace, deadline)

    def get_trace(self, image: str, *, deadline: float) -> bytes:
        """The trace of an image."""
        return self._get_document(self._trace(image), "trace", deadline)

    def close(self) -> None:
        """Nothing is held open."""

    def _object(self, digest: str) -> Path:
        name = plain_hex(digest)
        return self.root / "objects" / name[:2] / name

    def _image(self, image: str) -> Path:
        return self.root / "images" / plain_hex(image)

    def _trace(self, image: str) -> Path:
        return self.root / "traces" / plain_hex(image)

    def _ref(self, name: str) -> Path:
        return self.root / "refs" / escape_name(name)

    def _get_document(self, path: Path, what: str, deadline: float) -> bytes:
        remaining(deadline, self.label)
        with self._faults(path, what):
            fd = _open_file(path)
            with open(fd, "rb", buffering=0) as file:
                data = bytearray()
                while chunk := file.read(min(_CHUNK_BYTES, MAX_DOCUMENT_BYTES + 1 - len(data))):
                    data += chunk
        if len(data) > MAX_DOCUMENT_BYTES:
            raise StoreError("too_large", f"{self.label}: {what} {path.name} is over {MAX_DOCUMENT_BYTES} bytes")
        return bytes(data)

    def _put_document(self, path: Path, data: bytes, deadline: float) -> None:
        remaining(deadline, self.label)
        if len(data) > MAX_DOCUMENT_BYTES:
            raise StoreError("too_large", f"{path.name} has {len(data)} bytes; a store takes {MAX_DOCUMENT_BYTES}")
        self._prepare()
        self._publish(path, lambda fd: _write_all(fd, data))

    def _prepare(self) -> None:
        marker = self.root / MARKER
        with self._faults(self.root, "directory"):
            (self.root / "tmp").mkdir(parents=True, exist_ok=True)
        if not marker.exists():
            self._publish(marker, lambda fd: _write_all(fd, MARKER_TEXT))
        if not self._swept[0]:
            self._swept[0] = True
            self.sweep()

    def sweep(self, *, abandoned_s: float = ABANDONED_S) -> int:
        """Remove what dead pushers left half-written; returns how many files.

        Age is told by the file server's own clock, from a file made now: clocks of nodes differ.
        """
        directory, removed = self.root / "tmp", 0
        with self._faults(directory, "directory"):
            probe = directory / f"{socket.gethostname()}-{secrets.token_hex(8)}"
            probe.touch()
            try:
                now = probe.stat().st_mtime
            finally:
                probe.unlink(missing_ok=True)
            for path in list(directory.iterdir()):
                try:
                    if now - path.stat(follow_symlinks=False).st_mtime > abandoned_s:
                        path.unlink(missing_ok=True)
                        removed += 1
                except FileNotFoundError:
                    continue  # its owner has just finished
        return removed

    def _publish(self, target: Path, write: Callable[[int], None]) -> None:
        temp = self.root / "tmp" / f"{socket.gethostname()}-{secrets.token_hex(8)}"
        with self._faults(target, "file"):
            target.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                try:
                    write(fd)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                _rename(temp, target)
            except BaseException:
                temp.unlink(missing_ok=True)
                raise
            _sync(target.parent)

    def _unlink(self, path: Path, deadline: float) -> None:
        remaining(deadline, self.label)
        with self._faults(path, "file"):
            path.unlink(missing_ok=True)

    def _check_marker(self) -> None:
        if not (self.root / MARKER).exists():
            raise StoreError(
                "unavailable", f"{self.label} holds no store", f"is it mounted? ({MARKER} is missing)", retryable=True
            )

    def _short(self, path: Path, offset: int, length: int, got: int) -> StoreError:
        text = f"{self.label}: object {path.name} gave {got} of {length} bytes at {offset}"
        return StoreError("short", text, "push the layer again", retryable=True)

    @contextmanager
    def _faults(self, path: Path, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            self._check_marker()
            raise StoreError("not_found", f"{self.label} has no {what} {path.name}") from error
        except (PermissionError, IsADirectoryError) as error:
            raise StoreError("denied", f"{self.label}: {what} {path.name}: {error.strerror}") from error
        except OSError as error:
            text = f"{self.label}: {what} {path.name}: {error.strerror} (errno {error.errno})"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreError("no_space", text, "make room in the store") from error
            if error.errno in (errno.ELOOP, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR):
                raise StoreError("denied", text) from error
            raise StoreError("unavailable", text, retryable=True) from error  # ESTALE, EIO, ETIMEDOUT of a server


def missing_object(label: str, item: StoredObject) -> StoreError:
    """The error for an image whose objects were not pushed first."""
    return StoreError("not_found", f"{label} has no {item.kind} {item.digest}, which the image needs", "push it first")


def _open_file(path: Path) -> int:
    """Open a regular file; a link or a pipe that somebody planted in a shared directory is refused, not waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise StoreError("denied", f"{path} is no regular file")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _rename(temp: Path, target: Path) -> None:
    try:
        temp.rename(target)
    except FileNotFoundError:
        # NFS repeats a RENAME whose answer got lost, and then says that the old name is gone.
        if not target.exists():
            raise


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)
