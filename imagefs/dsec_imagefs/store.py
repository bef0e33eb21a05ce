"""The image store: one directory of roots, records and names, safe against crashes and against other processes.

    blobs/sha256/<hex>.erofs   image roots            users/<hex>/<user>   who has a root mounted (see mounts.py)
    images/<hex>.json          records                tmp/<random>/        imports under way
    refs/<quoted name>         names                  cache/               .deb files, finished debootstrap roots

A name is written last and removed first, so whatever it points at is whole. Nothing holds the store's lock while data
moves; only publishing, removing and collecting do.
"""

from __future__ import annotations

import hashlib
import json
import os
import urllib.parse
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_imagefs.durable import Scratch, locked, sync_directory, write_durably
from dsec_imagefs.erofs.reader import ErofsReader
from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import Image, digest_hex, hex_prefix, normal_name, parse_record, render_record
from dsec_imagefs.importing import Importer
from dsec_imagefs.mountinfo import backing_file, read_mounts
from dsec_imagefs.sources.base import Limits
from dsec_imagefs.users import Users

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsec_imagefs.tree import Progress

_READ_BYTES = 4 << 20
_FORMAT = "1\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection removed."""

    images: tuple[str, ...]
    blobs: tuple[str, ...]
    freed_bytes: int
    leftovers: int


class ImageStore:
    """Images by digest and by name. Synchronous: call it in a thread from asyncio code."""

    def __init__(self, root: Path) -> None:
        """Open a store, making it if needed, and sweep what dead imports left.

        Raises:
            ImageError: ``bad_store`` when the directory is another version's or can't be written.
        """
        try:
            for part in ("blobs/sha256", "images", "refs", "users", "tmp", "cache"):
                (root / part).mkdir(mode=0o700, parents=True, exist_ok=True)
            self.root = root.resolve()
            self._check_format()
        except OSError as err:
            raise ImageError("bad_store", f"can't use {root} as an image store: {err.strerror}", field="store") from err
        self._lock = self.root / "lock"
        self.users = Users(self.root / "users")
        self.scratch = Scratch(self.root / "tmp", self.root / "tmp.lock")
        self.scratch.sweep()

    def _check_format(self) -> None:
        path = self.root / "format"
        if not path.exists():
            write_durably(path, _FORMAT.encode())
        if path.read_text() != _FORMAT:
            raise ImageError("bad_store", f"{self.root} is of another version of the store", field="store")

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the store's lock; between threads and processes."""
        with locked(self._lock):
            yield

    def blob_path(self, rootfs: str) -> Path:
        """Where the EROFS file of a root digest is, there or not."""
        return self.root / "blobs" / "sha256" / f"{digest_hex(rootfs)}.erofs"

    def import_image(
        self,
        source: str,
        name: str | None = None,
        *,
        progress: Progress | None = None,
        refresh: bool = False,
        limits: Limits | None = None,
        authfile: str = "",
    ) -> Image:
        """Import an image and point a name at it.

        Args:
            source: ``dir:PATH``, ``oci:PATH[:TAG]``, ``docker-archive:PATH[:REF]``, ``docker://REF``,
                ``docker-daemon:REF``, ``debootstrap:SUITE[?include=a,b&mirror=URL]``, or a path of one of these kinds.
            name: ``name[:tag]``; without one the image is found by its digest only (and `gc` may take it).
            progress: called as ``(stage, done, total)``.
            refresh: build anew what the cache could give.
            limits: bounds on what a source may unpack to.
            authfile: a registry's credentials, containers-auth.json(5); by default skopeo's own places.

        Raises:
            ImageError: with the field at fault; nothing half-made stays.
        """
        run = Importer(self, limits or Limits()).run
        return run(source, name, progress=progress, refresh=refresh, authfile=authfile)

    def publish(self, image: Image, blob: Path, name: str | None) -> Image:
        """Move a finished (and synced) EROFS file in, then write the record, then the name."""
        target = self.blob_path(image.rootfs)
        record = self.root / "images" / f"{digest_hex(image.digest)}.json"
        with self.exclusive():
            if target.exists() and target.stat().st_size == image.size_bytes:
                blob.unlink()
            else:
                blob.rename(target)
                sync_directory(target.parent)
            write_durably(record, render_record(image))
            if name is not None:
                self._write_ref(normal_name(name), image.digest)
        return self.resolve(image.digest)

    def tag(self, ref: str, name: str) -> Image:
        """Point another name at an image."""
        full = normal_name(name)
        with self.exclusive():
            image = self.resolve(ref)
            self._write_ref(full, image.digest)
        return self.resolve(image.digest)

    def ls(self) -> list[Image]:
        """All images, by first name, nameless ones last."""
        names = self._names()
        images = []
        for path in (self.root / "images").glob("[0-9a-f]*.json"):
            try:
                image = parse_record(path.read_bytes(), str(path))
            except FileNotFoundError:  # removed since the listing
                continue
            images.append(replace(image, names=names.get(image.digest, ())))
        return sorted(images, key=lambda i: (not i.names, i.names, i.digest))

    def resolve(self, ref: str) -> Image:
        """Find an image by ``name``, ``name:tag``, ``sha256:<hex>`` or a unique digest prefix of six or more digits.

        Raises:
            ImageError: ``not_found`` (with the nearest names) or ``ambiguous``.
        """
        digest = self._read_ref(ref)
        if digest is None and (prefix := hex_prefix(ref)) is not None:
            found = sorted(p.stem for p in (self.root / "images").glob(f"{prefix}*.json"))
            if len(found) > 1:
                raise ImageError(
                    "ambiguous", f"{ref} is the start of {len(found)} digests", "give more digits", field="ref"
                )
            digest = f"sha256:{found[0]}" if found else None
        if digest is not None:
            path = self.root / "images" / f"{digest_hex(digest)}.json"
            try:
                image = parse_record(path.read_bytes(), str(path))
            except FileNotFoundError:
                digest = None
            else:
                return replace(image, names=self._names().get(digest, ()))
        known = sorted(name for names in self._names().values() for name in names)
        hint = f"there are: {', '.join(known[:8])}" if known else "import one first: dsec image import"
        raise ImageError("not_found", f"no image {ref!r} in this store", hint, field="ref")

    def inspect(self, ref: str) -> Image:
        """All facts of one image; the same as `resolve`, checked that its root is there."""
        image = self.resolve(ref)
        if not self.blob_path(image.rootfs).is_file():
            raise ImageError("corrupt", f"the root of {ref} is missing", "import the image again", field="ref")
        return image

    @contextmanager
    def open_root(self, ref: str) -> Iterator[ErofsReader]:
        """Look into an image's root without mounting it."""
        image = self.inspect(ref)
        fd = os.open(self.blob_path(image.rootfs), os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield ErofsReader(fd, ref)
        finally:
            os.close(fd)

    def rm(self, ref: str, *, force: bool = False) -> tuple[str, ...]:
        """Remove a name, and with its last name (or by digest) the image and a root nobody shares.

        Returns:
            Names and digests removed.

        Raises:
            ImageError: ``in_use`` when somebody uses it, unless forced; then running users keep their mount.
        """
        with self.exclusive():
            image = self.resolve(ref)
            by_name = self._read_ref(ref) is not None
            names = (normal_name(ref),) if by_name else image.names
            last = not by_name or image.names == names
            if last and not force:
                self._refuse_when_used(image)
            for name in names:
                self._ref_path(name).unlink(missing_ok=True)
            sync_directory(self.root / "refs")
            if not last:
                return names
            self._unlink_image(image.digest)
            self._drop_blobs(keep=self._used_roots() - ({digest_hex(image.rootfs)} if force else set()))
            return (*names, image.digest)

    def gc(self, *, cache: bool = False) -> Collected:
        """Remove nameless images, roots without image, and leftovers; what is used or mounted stays.

        With `cache`, the download and build caches go too.
        """
        leftovers = self.scratch.sweep()
        with self.exclusive():
            used = self._used_roots()
            gone = [i for i in self.ls() if not i.names and digest_hex(i.rootfs) not in used]
            for image in gone:
                self._unlink_image(image.digest)
            blobs, freed = self._drop_blobs(keep=used)
            self.users.prune()
            for stray in self.root.glob("*/.*.tmp"):
                stray.unlink(missing_ok=True)
                leftovers += 1
        if cache:
            freed += self._drop_cache()
        return Collected(
            images=tuple(i.digest for i in gone), blobs=blobs, freed_bytes=freed, leftovers=leftovers
        )  # fmt: skip

    def verify(self, ref: str, progress: Progress | None = None) -> Image:
        """Read an image's root again and compare its digest; raises ImageError ``corrupt``."""
        image = self.inspect(ref)
        hasher = hashlib.sha256()
        done = 0
        with self.blob_path(image.rootfs).open("rb", buffering=0) as blob:
            while chunk := blob.read(_READ_BYTES):
                hasher.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress("verify", done, image.size_bytes)
        if f"sha256:{hasher.hexdigest()}" != image.rootfs:
            raise ImageError("corrupt", f"the root of {ref} is not what was imported", "remove and import it again")
        return image

    def _ref_path(self, name: str) -> Path:
        return self.root / "refs" / urllib.parse.quote(name, safe="")

    def _write_ref(self, name: str, digest: str) -> None:
        write_durably(self._ref_path(name), json.dumps({"name": name, "digest": digest}).encode())

    def _read_ref(self, ref: str) -> str | None:
        try:
            path = self._ref_path(normal_name(ref, "ref"))
        except ImageError:
            return None
        return _parse_ref(path)[1] if path.exists() else None

    def _names(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for path in sorted((self.root / "refs").iterdir()):
            if path.name.startswith("."):
                continue
            try:
                name, digest = _parse_ref(path)
            except FileNotFoundError:  # removed since the listing
                continue
            found.setdefault(digest, []).append(name)
        return {digest: tuple(names) for digest, names in found.items()}

    def _used_roots(self) -> set[str]:
        folder = str(self.root / "blobs" / "sha256")
        mounted = {Path(backing_file(m)) for m in read_mounts() if m.fs_type == "erofs"}
        return {p.stem for p in mounted if str(p.parent) == folder} | self.users.roots()

    def _refuse_when_used(self, image: Image) -> None:
        root = digest_hex(image.rootfs)
        others = [i for i in self.ls() if i.rootfs == image.rootfs and i.digest != image.digest]
        if not others and root in self._used_roots():
            users = ", ".join(sorted(self.users.of(root))[:5]) or "a mount"
            raise ImageError("in_use", f"the image is used by {users}", "stop them, or force", field="ref")

    def _unlink_image(self, digest: str) -> None:
        (self.root / "images" / f"{digest_hex(digest)}.json").unlink(missing_ok=True)
        sync_directory(self.root / "images")

    def _drop_blobs(self, *, keep: set[str]) -> tuple[tuple[str, ...], int]:
        wanted = {digest_hex(image.rootfs) for image in self.ls()} | keep
        gone, freed = [], 0
        for path in (self.root / "blobs" / "sha256").glob("*.erofs"):
            if path.stem not in wanted:
                info = path.stat()
                freed += info.st_blocks * 512 if info.st_nlink == 1 else 0
                path.unlink()
                gone.append(f"sha256:{path.stem}")
        return tuple(gone), freed

    def _drop_cache(self) -> int:
        freed = 0
        for path in sorted((self.root / "cache").rglob("*"), reverse=True):
            if path.suffix == ".lock" or (path.is_dir() and not path.is_symlink()):
                continue
            info = path.lstat()
            freed += info.st_blocks * 512 if info.st_nlink == 1 else 0
            path.unlink(missing_ok=True)
        return freed


def _parse_ref(path: Path) -> tuple[str, str]:
    """Name and digest of a file in ``refs``."""
    try:
        entry = json.loads(path.read_bytes())
        name, digest = str(entry["name"]), str(entry["digest"])
        digest_hex(digest)
    except (ValueError, KeyError, TypeError, ImageError) as err:
        raise ImageError("corrupt", f"{path} can't be read: {err}", "remove the file and tag the image again") from err
    return name, digest
