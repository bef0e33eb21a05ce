"""Apply OCI layers to a tree of metadata, in order, straight from their archives; file bodies stay in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec_imagefs.blob import Blob, BlobContent
from dsec_imagefs.layer.apply import apply_entries
from dsec_imagefs.layer.entries import Meter, read_tar
from dsec_imagefs.tree import Node, Tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dsec_imagefs.sources.base import Limits
    from dsec_imagefs.tar.reader import Member


class LayerMerge:
    """The tree that grows layer by layer."""

    def __init__(self, limits: Limits, note: Callable[[str], None] | None = None) -> None:
        self.tree = Tree()
        self._meter = Meter(limits)
        self._note = note or (lambda _text: None)

    def apply(self, blob: Blob) -> None:
        """Apply one uncompressed layer; the blob must stay open until the contents were read.

        Raises:
            ImageError: ``bad_image`` naming layer and entry; ``too_large`` beyond the limits. The tree is then spoilt.
        """
        apply_entries(self.tree, read_tar(blob, _in_place, self._meter, self._note))


def _in_place(blob: Blob, member: Member) -> BlobContent:
    return BlobContent(blob=blob, offset=member.offset, size=member.size, extents=member.extents)


def apply_layers(
    blobs: Iterable[Blob], limits: Limits, note: Callable[[str], None] | None = None
) -> Node:  # fmt: skip
    """Apply layers from the lowest up; returns the root of the merged tree."""
    merge = LayerMerge(limits, note)
    for blob in blobs:
        merge.apply(blob)
    return merge.tree.root
