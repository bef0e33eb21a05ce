"""Stack published layers into an image: their metadata is merged, no data is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec_imagefs.durable import sync_directory
from dsec_imagefs.errors import show_name
from dsec_imagefs.image import ImageConfig
from dsec_imagefs.layer.manifest import ImageManifest
from dsec_imagefs.layer.merge import merge_layers
from dsec_imagefs.layer.pack import write_named

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dsec_imagefs.layer.manifest import Layer

MAX_NOTES = 100  # beyond it only their number would grow


def compose_image(
    layers: Sequence[tuple[Layer, Path]],
    out_dir: Path,
    *,
    config: ImageConfig | None = None,
    created: str = "",
    source: str = "",
    imported: str = "",
    notes: Sequence[str] = (),
) -> ImageManifest:
    """Merge layers, lowest first, and keep the merged metadata in `out_dir` under its digest, synced.

    The manifest is returned and not written: its holder names it. Its notes are those given and the names of devices
    that overlayfs will hide. Two nodes that compose the same layers and configuration get the same digest, and the
    same metadata byte for byte.

    Raises:
        ImageError: as `merge_layers`; ``no_space``.
    """
    merged = merge_layers(layers)
    part = write_named(out_dir, merged.metadata)
    sync_directory(out_dir)
    hidden = [
        f"{show_name(path)}: a device 0:0 is kept, but overlayfs hides it from containers" for path in merged.hidden
    ]
    return ImageManifest(
        layers=tuple(layer.id for layer, _ in layers), merged=part, config=config or ImageConfig(), created=created,
        source=source, imported=imported, entries=merged.inodes, notes=(*notes, *hidden)[:MAX_NOTES],
    )  # fmt: skip
