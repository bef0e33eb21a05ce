"""Stores of the first format, in which each image was one whole EROFS file, become stores of layers when opened.

Each whole file is read as a tree and written as one layer; names stay, digests of images change. The new files come
first, then the names move, then the old files go: a conversion that dies is done again from the start.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsec_imagefs.durable import locked, write_durably
from dsec_imagefs.erofs.reader import ErofsReader
from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import ImageConfig, digest_hex
from dsec_imagefs.importing import stack_layers
from dsec_imagefs.kept import keep_build
from dsec_imagefs.layer.build import build_layer
from dsec_imagefs.sources.base import Limits, Work
from dsec_imagefs.whole import tree_of_image

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dsec_imagefs.layer.manifest import ImageManifest, Layer
    from dsec_imagefs.store import ImageStore

FORMAT = "2\n"
_WHOLE_IMAGES = "1\n"
_WAIT_S = 900.0


def check_format(store: ImageStore) -> None:
    """Write the format of a new store, convert an old one.

    Raises:
        ImageError: ``bad_store`` for a format that this version doesn't know.
    """
    path = store.root / "format"
    if _format_of(path) == FORMAT:
        return
    with locked(store.root / "upgrade.lock", timeout_s=_WAIT_S):
        found = _format_of(path)
        if found == _WHOLE_IMAGES:
            _Conversion(store).run()
        elif found not in ("", FORMAT):
            raise ImageError(
                "bad_store", f"{store.root} is of another version of the store ({found.strip()[:20]!r})",
                "use the version of nomad-dsec that made it, or another directory", field="store",
            )  # fmt: skip
        write_durably(path, FORMAT.encode())


def _format_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@dataclass(frozen=True, slots=True)
class _Old:
    """An image record of the first format."""

    digest: str
    rootfs: str
    config: ImageConfig
    facts: dict[str, Any]


class _Conversion:
    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._whole = store.root / "blobs" / "sha256"

    def run(self) -> None:
        store = self._store
        records = {path: old for path in (store.root / "images").glob("*.json") if (old := _parse(path))}
        for path, old in records.items():
            root = self._whole / f"{digest_hex(old.rootfs)}.erofs"
            if not root.is_file():  # a damaged image stays behind
                continue
            with self._layered(root, old) as (manifest, layers, files):
                self._keep(old, manifest, layers, files)
                image = store.publish(manifest, layers, files, None)
            for name in store.names.by_digest().get(old.digest, ()):
                with store.exclusive():
                    store.names.write(name, image.digest)
            path.unlink()
        builds = store.root / "cache" / "roots"
        for path in builds.glob("*.json"):
            kept, root = _parse(path), path.with_suffix(".erofs")
            if kept is not None and root.is_file():  # its image was removed
                with self._layered(root, kept) as converted:
                    self._keep(kept, *converted)
        for path in [*builds.glob("*.erofs"), *self._whole.glob("*.erofs")]:
            path.unlink()
        if self._whole.is_dir():
            self._whole.rmdir()

    @contextmanager
    def _layered(self, root: Path, old: _Old) -> Iterator[tuple[ImageManifest, list[Layer], Path]]:
        store = self._store
        with store.scratch.directory() as tmp:
            files = tmp / "files"
            files.mkdir(mode=0o700)
            work = Work(tmp=tmp, cache=store.root / "cache", limits=Limits(max_unpacked_bytes=1 << 62))
            work.notes.extend(old.facts["notes"])
            fd = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
            try:
                tree = tree_of_image(ErofsReader(fd, str(root)))
                layers = [build_layer(tree, files, limits=work.limits)]
            finally:
                os.close(fd)
            manifest = stack_layers(
                layers, files, config=old.config, created=old.facts["created"], source=old.facts["source"],
                imported=old.facts["imported"], work=work,
            )  # fmt: skip
            yield manifest, layers, files

    def _keep(self, old: _Old, manifest: ImageManifest, layers: list[Layer], files: Path) -> None:
        """Convert the kept builds that are this image."""
        builds = self._store.root / "cache" / "roots"
        for path in builds.glob("*.json"):
            kept = _parse(path)
            if kept is not None and kept.rootfs == old.rootfs:
                age = path.stat()
                keep_build(builds, path.stem, manifest, layers, files)
                os.utime(path, ns=(age.st_atime_ns, age.st_mtime_ns))


def _parse(path: Path) -> _Old | None:
    """A record of the first format; None for another one's."""
    try:
        record = json.loads(path.read_bytes())
        if record["version"] != 1 or "rootfs" not in record:
            return None
        config = record["config"]
        for key in ("env", "entrypoint", "cmd"):
            config[key] = tuple(config[key])
        facts = {key: record[key] for key in ("created", "imported", "source", "notes")}
        return _Old(record["digest"], record["rootfs"], ImageConfig(**config), facts)
    except (ValueError, TypeError, KeyError):
        return None
