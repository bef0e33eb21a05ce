"""Read an image's files again and compare them with their digests, the data block by block."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import digest_hex
from dsec_imagefs.layer.index import Index
from dsec_imagefs.lazy import LazyBlobs
from dsec_imagefs.objects import hash_file

if TYPE_CHECKING:
    from dsec_imagefs.image import Image
    from dsec_imagefs.layer.manifest import Layer
    from dsec_imagefs.store import ImageStore
    from dsec_imagefs.tree import Progress

_AGAIN = "remove and import the image again"


def verify_image(store: ImageStore, image: Image, ref: str, progress: Progress | None = None) -> None:
    """Check all files of an image; of a blob that is here in part, the blocks that are here.

    Raises:
        ImageError: ``corrupt`` naming the file, and the block of a layer's data.
    """
    done = 0
    for layer in {layer.blob.digest: layer for layer in store.layers(image)}.values():
        if store.objects.has_whole_blob(layer.blob.digest, layer.blob.size):
            _check_blob(store, layer, ref, progress, done, image.size_bytes)
        elif layer.blob.size:
            LazyBlobs(store).check_present(layer.blob.digest)
        done += layer.blob.size
    metas = [layer.meta.digest for layer in store.layers(image)]
    for digest in (*metas, digest_hex(image.rootfs)):
        if hash_file(store.objects.path(digest)) != digest:
            raise ImageError("corrupt", f"{ref}: the metadata {digest} is not what was imported", _AGAIN)
    if progress is not None:
        progress("verify", image.size_bytes, image.size_bytes)


def _check_blob(
    store: ImageStore, layer: Layer, ref: str, progress: Progress | None, before: int, total: int
) -> None:  # fmt: skip
    index = Index.parse(store.objects.read(layer.index.digest))
    path = store.objects.blob(layer.blob.digest)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for number in range(index.count):
            at = number * index.block_bytes
            data = os.pread(fd, index.raw_length(number), at)
            if not index.verify(number, data):
                raise ImageError(
                    "corrupt",
                    f"{ref}: block {number} (from byte {at}) of the data {layer.blob.digest} is not what was imported",
                    _AGAIN,
                )
            if progress is not None:
                progress("verify", before + at + len(data), total)
    finally:
        os.close(fd)
