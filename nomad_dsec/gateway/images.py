"""Which images the nodes have, and what a name stands for. Soft: learnt from the nodes, asked again for new names."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import msgspec
from libdsec.errors import NotFoundError
from libdsec.wire import ImageInfo, ImageList

if TYPE_CHECKING:
    from collections.abc import Sequence


class ImageIndex:
    """Images by node. A name that differs between nodes means the newest."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[ImageInfo, ...]] = {}
        self._names: dict[str, tuple[float, str]] = {}

    def replace(self, node: str, images: Sequence[ImageInfo]) -> None:
        """A node's whole listing."""
        if self._nodes.get(node) != tuple(images):
            self._nodes[node] = tuple(images)
            self._rebuild()

    def forget(self, node: str) -> None:
        """The node is gone."""
        if self._nodes.pop(node, None) is not None:
            self._rebuild()

    def digests_on(self, node: str) -> frozenset[str]:
        """What the node has."""
        return frozenset(image.digest for image in self._nodes.get(node, ()))

    def resolve(self, name: str) -> str:
        """The digest of a name, of a name whose tag `latest` was left out, or of a digest; "" when none is known."""
        for candidate in (name, f"{name}:latest"):
            found = self._names.get(candidate)
            if found is not None:
                return found[1]
        return ""

    def listing(self) -> ImageList:
        """Every image once, in name order; names of all nodes joined."""
        merged: dict[str, ImageInfo] = {}
        for images in self._nodes.values():
            for image in images:
                known = merged.get(image.digest, image)
                names = sorted(set(known.names) | set(image.names))
                merged[image.digest] = msgspec.structs.replace(image, names=names)
        return ImageList(images=sorted(merged.values(), key=lambda image: (image.names[:1], image.digest)))

    def not_found(self, name: str) -> NotFoundError:
        """The error for a name that no node knows, with the nearest name."""
        near = difflib.get_close_matches(name, self._names, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "`dsec image ls` shows what there is; `dsec image import` adds"
        return NotFoundError("image_not_found", f"no node has an image {name[:200]!r}", field="image", hint=hint)

    def _rebuild(self) -> None:
        names: dict[str, tuple[float, str]] = {}
        for images in self._nodes.values():
            for image in images:
                entry = (image.created_at, image.digest)
                for name in (image.digest, *image.names):
                    names[name] = max(names.get(name, entry), entry)
        self._names = names
