"""Independently versioned layers: EROFS metadata, a blob of 4 KiB-aligned data, a block index, a manifest each.

- `build_layer(source, out_dir) -> Layer` writes a layer's files named by their digests.
- `merge_layers([(layer, meta_path), ...]) -> Merged` resolves a stack into one metadata image over its blobs.
- `compose_image(layers, out_dir) -> ImageManifest`: the same, kept under its digest.
- `Layer`, `ImageManifest`: the manifests; `Index`: block -> digest and wire range; `decode_block`: wire -> raw bytes.

Everything is content-addressed by sha256 in hex without a prefix. Nothing here fetches or mounts.
"""

from dsec_imagefs.layer.build import build_layer
from dsec_imagefs.layer.compose import compose_image
from dsec_imagefs.layer.index import Index
from dsec_imagefs.layer.manifest import ImageManifest, Layer, Part, Wire
from dsec_imagefs.layer.merge import Merged, merge_layers
from dsec_imagefs.layer.wire import decode_block

__all__ = [
    "ImageManifest",
    "Index",
    "Layer",
    "Merged",
    "Part",
    "Wire",
    "build_layer",
    "compose_image",
    "decode_block",
    "merge_layers",
]
