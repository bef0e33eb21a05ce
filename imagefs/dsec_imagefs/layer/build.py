"""Make a layer from an uncompressed tar or from a tree: one pass over the data, hashing on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.layer.index import DEFAULT_BLOCK_BYTES, Encoding, check_block_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dsec_imagefs.blob import Blob
    from dsec_imagefs.layer.manifest import Layer
    from dsec_imagefs.sources.base import Limits
    from dsec_imagefs.tree import Node, Progress


def build_layer(
    source: Blob | Node,
    out_dir: Path,
    *,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    encoding: Encoding = "raw",
    limits: Limits | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
    diff_id: str = "",
) -> Layer:
    """Write a layer's objects into `out_dir`, each a file named by its sha256 in hex, and fsync them.

    The files: blob (none when it is empty), wire blob (when it is encoded), index, metadata, manifest. A file that is
    already there is left as it is. Equal sources give equal bytes. On an error nothing new stays.

    Args:
        source: an uncompressed layer tar (it must stay open meanwhile), or the root of a tree, every entry explicit.
        out_dir: an existing directory.
        block_bytes: a power of two from 64 KiB to 4 MiB.
        encoding: how the blob lies in a store.
        limits: bounds on entries and bytes.
        progress: ``progress("layer", bytes done, bytes in all)``.
        note: told each sentence that also goes into the manifest.
        diff_id: recorded as it is.

    Raises:
        ImageError: ``bad_image``, ``bad_source``, ``unsupported``, ``too_large`` naming the entry; ``no_space``.
    """
    check_block_bytes(block_bytes)
    raise ImageError("unsupported", "layers can't be built yet")
