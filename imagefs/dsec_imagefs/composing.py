"""Stack published layers into a new image: a matter of metadata, no data is read or copied."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import ImageConfig, digest_hex, normal_name
from dsec_imagefs.importing import stack_layers
from dsec_imagefs.sources.base import Limits, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsec_imagefs.image import Image
    from dsec_imagefs.store import ImageStore
    from dsec_imagefs.tree import Progress

MAX_LAYERS = 4096


def compose(
    store: ImageStore,
    parts: Sequence[str],
    name: str | None,
    *,
    config_of: str = "",
    progress: Progress | None = None,
) -> Image:
    """Make an image of the layers of others.

    Args:
        store: where all of them are, with their data or with a store to fetch it from.
        parts: images, the lowest first; of each all layers are taken. A layer made alone is an image of one layer.
        name: what to call it.
        config_of: the part whose configuration it gets; by default the last one that has any.
        progress: ``(stage, done, total)``.

    Raises:
        ImageError: ``not_found``, ``bad_source`` for no or too many layers, ``bad_image`` where layers don't fit.
    """
    if name is not None:
        normal_name(name)
    images = [store.resolve(part) for part in parts]
    ids = [digest_hex(layer) for image in images for layer in image.layers]
    if not 0 < len(ids) <= MAX_LAYERS:
        raise ImageError("bad_source", f"an image of {len(ids)} layers", f"1 to {MAX_LAYERS} layers", "parts")
    config = _config(store, images, config_of)
    with store.scratch.directory() as tmp:
        files = tmp / "files"
        files.mkdir(mode=0o700)
        layers = [store.layer(layer) for layer in ids]
        with store.exclusive():
            for layer in layers:
                if not all(store.objects.link(digest, files) for digest in (layer.id, layer.meta.digest)):
                    raise ImageError("not_found", f"the layer {layer.id} is not in this store any more", field="parts")
        work = Work(tmp=tmp, cache=store.root / "cache", limits=Limits(), report=progress)
        manifest = stack_layers(
            layers, files, config=config, created="", source=f"compose:{','.join(parts)}"[:2000], work=work
        )  # fmt: skip
        manifest = replace(manifest, imported=datetime.now(UTC).isoformat(timespec="seconds"))
        return store.publish(manifest, layers, files, name)


def _config(store: ImageStore, images: Sequence[Image], config_of: str) -> ImageConfig:
    if config_of:
        return store.resolve(config_of).config
    return next((image.config for image in reversed(images) if image.config != ImageConfig()), ImageConfig())
