"""A stack of layers becomes one tree, and one metadata image over their blobs."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.erofs.layout import plan_layout
from dsec_imagefs.erofs.ondisk import BLOCK_BITS
from dsec_imagefs.errors import ImageError
from dsec_imagefs.layer.apply import apply_entries
from dsec_imagefs.layer.tree_of import read_metadata
from dsec_imagefs.tree import StoredContent, Tree

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dsec_imagefs.layer.entries import Entries
    from dsec_imagefs.layer.manifest import Layer
    from dsec_imagefs.tree import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A merged metadata image.

    Attributes:
        metadata: the whole image: mount it with one ``device=`` a blob, in this order.
        digest: its sha256 in hex.
        devices: digests of the blobs it refers to, in the order of the device table.
        inodes: how many it has.
        hidden: paths of real devices 0:0, which overlayfs takes for whiteouts and so hides (overlayfs.rst).
    """

    metadata: bytes
    digest: str
    devices: tuple[str, ...]
    inodes: int
    hidden: tuple[bytes, ...] = ()


def merge_layers(layers: Sequence[tuple[Layer, Path]]) -> Merged:
    """Merge layers, lowest first, as the OCI image specification says; each comes with its metadata file's path.

    Deterministic. Reads metadata only, no blob. A blob that nothing of the result lies in is not among its devices.

    Raises:
        ImageError: ``bad_image`` naming layer and entry (a hard link to nothing, a file as a parent), ``corrupt`` for
            metadata that is damaged or not the layer's.
    """
    tree = Tree()
    blobs: dict[str, int] = {}
    for number, (layer, path) in enumerate(layers, start=1):
        apply_entries(tree, read_layer(layer, path, f"layer {number} ({layer.id[:12]})"))
        blocks = layer.blob.size >> BLOCK_BITS
        if blobs.setdefault(layer.blob.digest, blocks) != blocks:
            raise ImageError("corrupt", f"two layers say different sizes of the blob {layer.blob.digest}")
    used, hidden = _survey(tree.root)
    devices = [(blob, blocks) for blob, blocks in blobs.items() if blob in used]
    layout = plan_layout(tree.root, blobs=devices)
    return Merged(
        metadata=layout.metadata, digest=hashlib.sha256(layout.metadata).hexdigest(),
        devices=tuple(blob for blob, _ in devices), inodes=layout.inodes,
        hidden=hidden,
    )  # fmt: skip


def read_layer(layer: Layer, path: Path, name: str) -> Entries:
    """Read a layer's metadata file and check that it is the manifest's: digest, and that it lies in no other blob."""
    data = path.read_bytes()
    if len(data) != layer.meta.size or hashlib.sha256(data).hexdigest() != layer.meta.digest:
        raise ImageError("corrupt", f"metadata of {name} does not match its digest", "fetch it again")
    return read_metadata(data, layer.blob, name)


def _survey(root: Node) -> tuple[set[str], tuple[bytes, ...]]:
    """Digests of the blobs that have data of the tree's files, and paths of devices 0:0."""
    blobs: set[str] = set()
    hidden: list[bytes] = []
    todo = [(b"", root)]
    while todo:
        path, directory = todo.pop()
        for name, node in directory.children.items():
            if node.is_dir:
                todo.append((path + name + b"/", node))
            elif node.fmt == stat.S_IFCHR:
                if node.device == (0, 0):
                    hidden.append(path + name)
            elif isinstance(node.content, StoredContent) and node.content.blob:
                blobs.add(node.content.blob)
    return blobs, tuple(sorted(hidden))
