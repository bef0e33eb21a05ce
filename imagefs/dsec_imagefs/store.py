"""The image store: one directory of layers, images and names, safe against crashes and against other processes.

    objects/<hex>, blobs/<hex>   layers and merged metadata (see objects.py)   diffs/<hex>   which layer a tar became
    images/<hex>.json            image manifests                               tmp/<random>/ imports under way
    refs/<quoted name>           names                                         cache/        .deb files, finished roots
    users/<hex>/<user>           who has a root mounted (see mounts.py)

A name is written last and removed first, so whatever it points at is whole. Nothing holds the store's lock while data
moves; only publishing, removing and collecting do.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_imagefs.durable import Scratch, locked, sync_directory, write_durably
from dsec_imagefs.erofs.reader import ErofsReader
from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import Image, digest_hex, hex_prefix, image_of, normal_name
from dsec_imagefs.importing import Importer
from dsec_imagefs.layer.manifest import ImageManifest, Layer
from dsec_imagefs.lazy import LazyBlobs
from dsec_imagefs.mountinfo import backing_file, read_mounts
from dsec_imagefs.names import Names
from dsec_imagefs.objects import Objects, Origin, files_of
from dsec_imagefs.sources.base import Limits
from dsec_imagefs.upgrade import check_format
from dsec_imagefs.users import Users
from dsec_imagefs.verify import verify_image

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dsec_imagefs.tree import Progress

_LAYERS_REMEMBERED = 4096


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
        """Open a store, making it if needed, and sweep what dead imports left; one of the first format is converted.

        Raises:
            ImageError: ``bad_store`` when the directory is another version's or can't be written.
        """
        try:
            for part in ("images", "refs", "users", "tmp", "cache"):
                (root / part).mkdir(mode=0o700, parents=True, exist_ok=True)
            self.root = root.resolve()
            self.objects = Objects(self.root)
            self.objects.make()
        except OSError as err:
            raise ImageError("bad_store", f"can't use {root} as an image store: {err.strerror}", field="store") from err
        self._lock = self.root / "lock"
        self.names = Names(self.root / "refs")
        self._layers: dict[str, Layer] = {}
        self.users = Users(self.root / "users")
        self.scratch = Scratch(self.root / "tmp", self.root / "tmp.lock")
        self.scratch.sweep()
        check_format(self)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the store's lock; between threads and processes."""
        with locked(self._lock):
            yield

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

    def publish(
        self,
        manifest: ImageManifest,
        layers: Sequence[Layer],
        folder: Path,
        name: str | None,
        *,
        origin: Origin | None = None,
    ) -> Image:
        """Take in an image whose (synced) files lie in `folder`, named by digest: files, manifest, then the name.

        Args:
            manifest: the image.
            layers: the manifests of its layers.
            folder: where the files are that are not in the store yet.
            name: a reference to write, or None.
            origin: where data that is not in `folder` can be fetched from.

        Raises:
            ImageError: ``not_found`` when a file is neither here nor in the folder, and has no origin.
        """
        digest = f"sha256:{manifest.digest}"
        with self.exclusive():
            needed = files_of(manifest, layers)
            if origin is not None:
                for layer in layers:
                    if layer.blob.size and not (folder / layer.blob.digest).exists():
                        self.objects.note_origin(layer, origin)
            self.objects.adopt(folder, needed)
            write_durably(self._manifest_path(digest), manifest.render())
            for layer in layers:
                if layer.diff_id:
                    self.objects.remember(layer.diff_id, layer.id)
            if name is not None:
                self.names.write(normal_name(name), digest)
        return self.resolve(digest)

    def tag(self, ref: str, name: str) -> Image:
        """Point another name at an image."""
        full = normal_name(name)
        with self.exclusive():
            image = self.resolve(ref)
            self.names.write(full, image.digest)
        return self.resolve(image.digest)

    def ls(self) -> list[Image]:
        """All images, by first name, nameless ones last."""
        names = self.names.by_digest()
        images = []
        for path in (self.root / "images").glob("[0-9a-f]*.json"):
            try:
                images.append(self._read(path, names))
            except FileNotFoundError:  # removed since the listing
                continue
        return sorted(images, key=lambda i: (not i.names, i.names, i.digest))

    def resolve(self, ref: str) -> Image:
        """Find an image by ``name``, ``name:tag``, ``sha256:<hex>`` or a unique digest prefix of six or more digits.

        Raises:
            ImageError: ``not_found`` (with the nearest names) or ``ambiguous``.
        """
        digest = self.names.read(ref)
        if digest is None and (prefix := hex_prefix(ref)) is not None:
            found = sorted(p.stem for p in (self.root / "images").glob(f"{prefix}*.json"))
            if len(found) > 1:
                raise ImageError(
                    "ambiguous", f"{ref} is the start of {len(found)} digests", "give more digits", field="ref"
                )
            digest = f"sha256:{found[0]}" if found else None
        if digest is not None:
            try:
                return self._read(self._manifest_path(digest), self.names.by_digest())
            except FileNotFoundError:
                pass
        known = sorted(name for names in self.names.by_digest().values() for name in names)
        hint = f"there are: {', '.join(known[:8])}" if known else "import one first: dsec image import"
        raise ImageError("not_found", f"no image {ref!r} in this store", hint, field="ref")

    def manifest(self, digest: str) -> ImageManifest:
        """The manifest of an image by its digest; raises ImageError ``not_found``."""
        path = self._manifest_path(digest)
        try:
            return ImageManifest.parse(path.read_bytes(), str(path))
        except FileNotFoundError:
            raise ImageError("not_found", f"no image {digest} in this store", field="ref") from None

    def layer(self, layer_id: str) -> Layer:
        """The manifest of a layer by its id, in hex; raises ImageError ``corrupt`` when it is missing or damaged."""
        known = self._layers.get(layer_id)
        if known is None:
            known = Layer.parse(self.objects.read(layer_id), f"layer {layer_id}")
            if len(self._layers) >= _LAYERS_REMEMBERED:
                self._layers.clear()
            self._layers[layer_id] = known
        return known

    def layers(self, image: Image) -> tuple[Layer, ...]:
        """The manifests of an image's layers, lowest first."""
        return tuple(self.layer(digest_hex(layer)) for layer in image.layers)

    def inspect(self, ref: str) -> Image:
        """All facts of one image; the same as `resolve`, checked that its files are there."""
        image = self.resolve(ref)
        for layer in self.layers(image):
            for part in (layer.meta, layer.index):
                self._need(self.objects.path(part.digest), ref)
            if layer.blob.size and self.objects.origin(layer.blob.digest) is None:
                self._need(self.objects.blob(layer.blob.digest), ref)
        self._need(self.objects.path(digest_hex(image.rootfs)), ref)
        return image

    @contextmanager
    def open_root(self, ref: str) -> Iterator[ErofsReader]:
        """Look into an image's root without mounting it; file bodies of data that is not here can't be read."""
        image = self.inspect(ref)
        with ExitStack() as stack:

            def opened(path: Path) -> int:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                return fd

            blobs = {
                blob.digest: partial(_read_at, opened(self.objects.blob(blob.digest)))
                for blob in {layer.blob.digest: layer.blob for layer in self.layers(image)}.values()
                if self.objects.has_whole_blob(blob.digest, blob.size)
            }
            yield ErofsReader(opened(self.objects.path(digest_hex(image.rootfs))), ref, blobs)

    def rm(self, ref: str, *, force: bool = False) -> tuple[str, ...]:
        """Remove a name, and with its last name (or by digest) the image and layers that nobody shares.

        Returns:
            Names and digests removed.

        Raises:
            ImageError: ``in_use`` when somebody uses it, unless forced; then running users keep their mount.
        """
        with self.exclusive():
            image = self.resolve(ref)
            by_name = self.names.read(ref) is not None
            names = (normal_name(ref),) if by_name else image.names
            last = not by_name or image.names == names
            if last and not force:
                self._refuse_when_used(image)
            self.names.remove(names)
            if not last:
                return names
            self._unlink_image(image.digest)
            self._drop_files()
            return (*names, image.digest)

    def gc(self, *, cache: bool = False) -> Collected:
        """Remove nameless images, files that no image needs, and leftovers; what is used or mounted stays.

        With `cache`, the download and build caches go too.
        """
        leftovers = self.scratch.sweep()
        with self.exclusive():
            used = self._used_roots()
            gone = [i for i in self.ls() if not i.names and digest_hex(i.rootfs) not in used]
            for image in gone:
                self._unlink_image(image.digest)
            blobs, freed = self._drop_files()
            self.users.prune()
            for trace in self.root.glob("traces/*"):
                if not self._manifest_path(f"sha256:{trace.name}").exists():
                    trace.unlink(missing_ok=True)
            for stray in self.root.glob("*/.*.tmp"):
                stray.unlink(missing_ok=True)
                leftovers += 1
        if cache:
            freed += self._drop_cache()
        return Collected(
            images=tuple(i.digest for i in gone), blobs=blobs, freed_bytes=freed, leftovers=leftovers
        )  # fmt: skip

    def verify(self, ref: str, progress: Progress | None = None) -> Image:
        """Read all of an image that is here and compare it, block by block; raises ImageError ``corrupt``."""
        image = self.inspect(ref)
        verify_image(self, image, ref, progress)
        return image

    def _manifest_path(self, digest: str) -> Path:
        return self.root / "images" / f"{digest_hex(digest)}.json"

    def _read(self, path: Path, names: dict[str, tuple[str, ...]]) -> Image:
        manifest = ImageManifest.parse(path.read_bytes(), str(path))
        if manifest.digest != path.stem:
            raise ImageError("corrupt", f"{path} holds the image {manifest.digest}", "remove the file, import again")
        try:
            layers = [self.layer(layer) for layer in manifest.layers]
        except ImageError:  # a listing shows damaged images too; `inspect` and `verify` name the damage
            layers = []
        return image_of(manifest, layers, names.get(f"sha256:{manifest.digest}", ()))

    def _need(self, path: Path, ref: str) -> None:
        if not path.is_file():
            raise ImageError("corrupt", f"{path} of {ref} is missing", "import the image again", field="ref")

    def _used_roots(self) -> set[str]:
        folder = str(self.root / "objects")
        mounted = {Path(backing_file(m)) for m in read_mounts() if m.fs_type == "erofs"}
        return {p.name for p in mounted if str(p.parent) == folder} | self.users.roots()

    def _refuse_when_used(self, image: Image) -> None:
        root = digest_hex(image.rootfs)
        others = [i for i in self.ls() if i.rootfs == image.rootfs and i.digest != image.digest]
        if not others and root in self._used_roots():
            users = ", ".join(sorted(self.users.of(root))[:5]) or "a mount"
            raise ImageError("in_use", f"the image is used by {users}", "stop them, or force", field="ref")

    def _unlink_image(self, digest: str) -> None:
        self._manifest_path(digest).unlink(missing_ok=True)
        sync_directory(self.root / "images")

    def _drop_files(self) -> tuple[tuple[str, ...], int]:
        kept: set[str] = set()
        for image in self.ls():
            kept.update(digest_hex(digest) for digest in (image.rootfs, *image.layers))
            for layer in image.layers:
                try:
                    found = self.layer(digest_hex(layer))
                except ImageError:  # damaged: what it named can't be known, and is of no use without it
                    continue
                kept.update((found.meta.digest, found.index.digest, found.wire.digest, found.blob.digest))
        return self.objects.sweep(kept, LazyBlobs(self).forget)

    def _drop_cache(self) -> int:
        freed = 0
        for path in sorted((self.root / "cache").rglob("*"), reverse=True):
            if path.suffix == ".lock" or (path.is_dir() and not path.is_symlink()):
                continue
            info = path.lstat()
            freed += info.st_blocks * 512 if info.st_nlink == 1 else 0
            path.unlink(missing_ok=True)
        return freed


def _read_at(fd: int, offset: int, length: int) -> bytes:
    return os.pread(fd, length, offset)
