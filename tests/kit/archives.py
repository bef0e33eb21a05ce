"""Layers applied to a tree straight from their archives, bodies left in them: what merging metadata must equal."""

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


def apply_layers(blobs: Iterable[Blob], limits: Limits, note: Callable[[str], None] | None = None) -> Node:
    """Apply layers from the lowest up; returns the root. The blobs must stay open until the contents were read."""
    tree, meter = Tree(), Meter(limits)
    for blob in blobs:
        apply_entries(tree, read_tar(blob, _in_place, meter, note or (lambda _text: None)))
    return tree.root


def _in_place(blob: Blob, member: Member) -> BlobContent:
    return BlobContent(blob=blob, offset=member.offset, size=member.size, extents=member.extents)
