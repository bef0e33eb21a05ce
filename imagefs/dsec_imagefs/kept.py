"""Slow builds that are kept: a second name for each file of the finished image, so that removing the image spares it.

cache/roots/<key>/       the files, named by digest          cache/roots/<key>.json   the image manifest, written last
"""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dsec_imagefs.durable import sync_directory, write_durably
from dsec_imagefs.errors import ImageError
from dsec_imagefs.layer.manifest import ImageManifest, Layer
from dsec_imagefs.objects import files_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_AGE_S = 30 * 86400.0  # older builds are made anew: distributions ship security fixes


def keep_build(builds: Path, key: str, manifest: ImageManifest, layers: Sequence[Layer], files: Path) -> None:
    """Keep a finished build; no byte is copied. The caller holds the build's lock."""
    folder, record = builds / key, builds / f"{key}.json"
    record.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    for name in _names(manifest, layers):
        (folder / name).hardlink_to(files / name)
    sync_directory(folder)
    write_durably(record, manifest.render())


def kept_build(builds: Path, key: str, files: Path) -> tuple[ImageManifest, list[Layer]] | None:
    """A build that was kept, its files linked into `files`; None when there is none, an old one, or a damaged one."""
    folder, record = builds / key, builds / f"{key}.json"
    try:
        if datetime.now(UTC).timestamp() - record.stat().st_mtime > MAX_AGE_S:
            return None
        manifest = ImageManifest.parse(record.read_bytes(), str(record))
        layers = [Layer.parse((folder / layer).read_bytes()) for layer in manifest.layers]
        if [layer.id for layer in layers] != list(manifest.layers):
            return None
        if any((folder / layer.blob.digest).stat().st_size != layer.blob.size for layer in layers if layer.blob.size):
            return None
        for name in _names(manifest, layers):
            (files / name).hardlink_to(folder / name)
    except (FileNotFoundError, ImageError):
        return None
    return manifest, layers


def _names(manifest: ImageManifest, layers: Sequence[Layer]) -> tuple[str, ...]:
    files = files_of(manifest, layers)
    return files.objects + files.blobs + files.wires
