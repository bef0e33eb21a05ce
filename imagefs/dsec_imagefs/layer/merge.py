"""A stack of layers becomes one tree, and one metadata image over their blobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dsec_imagefs.layer.manifest import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A merged metadata image.

    Attributes:
        metadata: the whole image: mount it with one ``device=`` a blob, in this order.
        digest: its sha256 in hex.
        devices: digests of the blobs it refers to, in the order of the device table.
        inodes: how many it has.
    """

    metadata: bytes
    digest: str
    devices: tuple[str, ...]
    inodes: int


def merge_layers(
    layers: Sequence[tuple[Layer, Path]], *, note: Callable[[str], None] | None = None
) -> Merged:  # fmt: skip
    """Merge layers, lowest first, as the OCI image specification says; each comes with its metadata file's path.

    Deterministic. Reads metadata only, no blob.

    Raises:
        ImageError: ``bad_image`` naming layer and entry (a hard link to nothing, a file as a parent), ``corrupt`` for
            metadata that is damaged or not the layer's.
    """
    raise ImageError("unsupported", "layers can't be merged yet")
