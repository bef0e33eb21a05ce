"""The content-addressed files of a store: documents and metadata in ``objects/``, the data of layers in ``blobs/``,
and in ``origins/`` where data that is not here yet can be fetched.

A file is named by the sha256 of its bytes and never changes. It comes in by rename from a directory of the same file
system, synced, so what has its name is whole. A blob that is still being fetched has a ``.map`` beside it, which is the
blob server's; without one and of full size it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.durable import sync_directory, write_durably
from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from dsec_imagefs.layer.manifest import ImageManifest, Layer

MAX_DOCUMENT_BYTES = 256 << 20  # the merged metadata of ten million files is larger, but is never read whole
_HASH_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where data can be fetched.

    Attributes:
        store: the URL of the store.
        wire: digest of what lies there, the data itself or its compressed form.
        authfile: credentials of a registry, see `stores.parse.parse_store`; the file is read, never copied.
    """

    store: str
    wire: str = ""
    authfile: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of an image by digest. Wires are only there for pushing: a pulled layer has none."""

    objects: tuple[str, ...]
    blobs: tuple[str, ...]
    wires: tuple[str, ...]


def files_of(manifest: ImageManifest, layers: Sequence[Layer]) -> Files:
    """What an image consists of, each once; the documents that name others last."""
    objects, blobs, wires = [], [], []
    for layer in layers:
        if layer.blob.size:
            blobs.append(layer.blob.digest)
            if layer.wire.digest != layer.blob.digest:
                wires.append(layer.wire.digest)
        objects += [layer.index.digest, layer.meta.digest, layer.id]
    objects.append(manifest.merged.digest)
    each = (tuple(dict.fromkeys(names)) for names in (objects, blobs, wires))
    return Files(**dict(zip(("objects", "blobs", "wires"), each, strict=True)))


@dataclass(frozen=True, slots=True)
class Objects:
    """The files below one store's root. Whoever adds or drops files holds the store's lock."""

    root: Path

    def make(self) -> None:
        """Make the directories."""
        for part in ("objects", "blobs", "diffs", "origins"):
            (self.root / part).mkdir(mode=0o700, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Where an object is, there or not; `digest` in hex."""
        return self.root / "objects" / digest

    def blob(self, digest: str) -> Path:
        """Where a layer's data is, there or not, whole or in part."""
        return self.root / "blobs" / digest

    def has_whole_blob(self, digest: str, size: int) -> bool:
        """Whether all data is here, so that the kernel may read the file with no server."""
        try:
            return self.blob(digest).stat().st_size == size and not self.map(digest).exists()
        except FileNotFoundError:
            return False

    def map(self, digest: str) -> Path:
        """The blob server's account of which parts of a blob are here."""
        return self.root / "blobs" / f"{digest}.map"

    def read(self, digest: str) -> bytes:
        """A small object, verified.

        Raises:
            ImageError: ``corrupt`` when it is missing or has another digest.
        """
        path = self.path(digest)
        try:
            if path.stat().st_size > MAX_DOCUMENT_BYTES:
                raise ImageError("corrupt", f"{path} is too large for a document", "import the image again")
            raw = path.read_bytes()
        except FileNotFoundError:
            raise ImageError("corrupt", f"{path} is missing", "import the image again") from None
        if hashlib.sha256(raw).hexdigest() != digest:
            raise ImageError("corrupt", f"{path} is not what its name says", "remove and import the image again")
        return raw

    def adopt(self, folder: Path, needed: Files) -> None:
        """Move finished and synced files in, from a directory in which they are named by their digests.

        What is there already stays as it is; a blob that the server has in part is its own business.

        Raises:
            ImageError: ``not_found`` when a file is in neither place, and is no data with an origin.
        """
        for names, target in ((needed.blobs, self.blob), (needed.wires, self.path), (needed.objects, self.path)):
            moved = False
            for name in names:
                if target(name).exists():
                    continue
                try:
                    (folder / name).rename(target(name))
                except FileNotFoundError:
                    if names is needed.wires or (names is needed.blobs and self.origin(name) is not None):
                        continue
                    raise ImageError("not_found", f"{name} is not in {self.root}", "import the layer again") from None
                moved = True
            if moved:
                sync_directory(target("x").parent)

    def present_bytes(self, digest: str, size: int) -> int:
        """How much of a blob's data takes room on this disk."""
        try:
            return min(size, self.blob(digest).stat().st_blocks * 512)
        except FileNotFoundError:
            return 0

    def link(self, digest: str, folder: Path, *, blob: bool = False) -> bool:
        """Give a file a second name in a directory, so that no collection can take it; False when it is not here."""
        source = self.blob(digest) if blob else self.path(digest)
        try:
            (folder / digest).hardlink_to(source)
        except FileExistsError:
            return True
        except FileNotFoundError:
            return False
        return True

    def layer_of(self, diff_id: str) -> str | None:
        """The id (hex) of the layer that was made of a tar before, by the digest of the tar."""
        try:
            return (self.root / "diffs" / diff_id.replace(":", "-")).read_text()
        except FileNotFoundError:
            return None

    def remember(self, diff_id: str, layer: str) -> None:
        """Keep which layer a tar became; a hint, so it is not synced."""
        name = diff_id.replace(":", "-")
        temp = self.root / "diffs" / f".{name}.tmp"
        temp.write_text(layer)
        temp.rename(temp.with_name(name))

    def note_origin(self, layer: Layer, origin: Origin) -> None:
        """Keep where a blob's data can be fetched; the newest note counts."""
        record = asdict(origin) | {"wire": layer.wire.digest}
        write_durably(self.root / "origins" / layer.blob.digest, json.dumps(record).encode())

    def origin(self, digest: str) -> Origin | None:
        """Where a blob's data can be fetched, if anywhere; raises ImageError ``corrupt``."""
        path = self.root / "origins" / digest
        try:
            return Origin(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as err:
            raise ImageError("corrupt", f"{path} can't be read: {err}", "pull the image again") from err

    def sweep(
        self, kept: Collection[str], forget: Callable[[str], bool] = lambda _: True
    ) -> tuple[tuple[str, ...], int]:
        """Drop all files but these; returns the digests of dropped blobs and the bytes that became free.

        `forget` makes the blob server give a blob up, and says whether it did; else its files stay for the next time.
        """
        gone, freed = [], 0
        names = {path.name.partition(".")[0] for path in self.root.glob("blobs/*")} - {""}
        for name in sorted(names):
            if name in kept or not forget(name):
                continue
            gone.append(f"sha256:{name}")
            freed += sum(_drop(path) for path in self.root.glob(f"blobs/{name}*"))
        for path in [*self.root.glob("objects/*"), *self.root.glob("origins/*")]:
            if not path.name.startswith(".") and path.name not in kept:
                freed += _drop(path)
        for path in self.root.glob("diffs/*"):
            if path.read_text() not in kept:
                path.unlink(missing_ok=True)
        return tuple(gone), freed


def _drop(path: Path) -> int:
    info = path.lstat()
    path.unlink(missing_ok=True)
    return info.st_blocks * 512 if info.st_nlink == 1 else 0


def hash_file(path: Path) -> str:
    """Sha256 of a file in hex."""
    hasher = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while chunk := os.read(fd, _HASH_BYTES):
            hasher.update(chunk)
    finally:
        os.close(fd)
    return hasher.hexdigest()
