"""A layer's entries out of its metadata image: the way back from `dsec_imagefs.layer.encode`. Strict."""

from __future__ import annotations

from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from dsec_imagefs.erofs.load import Loaded, load_tree
from dsec_imagefs.erofs.ondisk import BLOCK_BITS
from dsec_imagefs.errors import ImageError, show_name
from dsec_imagefs.layer import marks
from dsec_imagefs.layer.entries import AUFS_POOL, Entries, Entry, Mark

if TYPE_CHECKING:
    from dsec_imagefs.layer.entries import Folder
    from dsec_imagefs.layer.manifest import Part
    from dsec_imagefs.tree import Node

_Row = TypeVar("_Row", Entry, Mark)


def read_metadata(data: bytes, blob: Part, name: str) -> Entries:
    """Parse layer metadata whose bytes were verified by digest; `blob` is the layer's, `name` is for messages.

    Raises:
        ImageError: ``corrupt`` when it is damaged, marked as no layer is, or about another blob.
    """
    loaded = load_tree(data, name)
    if any((device.blob, device.blocks << BLOCK_BITS) != (blob.digest, blob.size) for device in loaded.devices):
        raise ImageError("corrupt", f"metadata of {name} refers to another blob than the layer's", "publish it again")
    try:
        return _Decoder(loaded, name).decode()
    except ValueError as err:
        raise ImageError("corrupt", f"metadata of {name} is no layer: {err}", "publish the layer again") from err


class _Decoder:
    def __init__(self, loaded: Loaded, name: str) -> None:
        self._root = loaded.root
        self._numbers = loaded.numbers
        self._name = name
        self._entries: list[tuple[int, Entry]] = []
        self._marks: list[tuple[int, Mark]] = []

    def decode(self) -> Entries:
        aside = self._root.children.pop(marks.ASIDE, None)
        self._place((), b"", self._root)
        todo: list[tuple[Folder, Node]] = [((), self._root)]
        while todo:
            folder, directory = todo.pop()
            for name, node in directory.children.items():
                if node.is_dir:
                    todo.append(((*folder, name), node))
                self._place(folder, name, node)
        for node in aside.children.values() if aside is not None else ():
            path = node.xattrs.get(marks.PATH)
            if path is None:
                raise ValueError("something lies aside without a path")
            self._place_aside(path, node)
        return Entries(
            name=self._name,
            marks=_ordered(self._marks),
            entries=_ordered(self._entries),
        )

    def _place(self, folder: Folder, name: bytes, node: Node) -> None:
        """Note what a node at its own place says: marks, then the entry itself unless it is only a mark or parent."""
        if not node.xattrs:
            self._entries.append((self._number(node), Entry(folder, name, node)))
            return
        found = _take_marks(node)
        if (number := found.get(marks.OPAQUE)) is not None:
            if not node.is_dir:
                raise ValueError(f"{show_name(name)} is opaque and no directory")
            self._marks.append((_position(number), Mark((*folder, name) if name else (), b"")))
        for mark in (marks.REPLACES, marks.WHITEOUT):
            if (number := found.get(mark)) is not None:
                if not name:
                    raise ValueError("the root is hidden")
                self._marks.append((_position(number), Mark(folder, name)))
        if marks.IMPLICIT in found or marks.WHITEOUT in found:
            return
        link = found.get(marks.LINK)
        entry = Entry(folder, name, node) if link is None else Entry(folder, name, None, link)
        self._entries.append((self._number(node), entry))

    def _place_aside(self, path: bytes, node: Node) -> None:
        *folder, name = path.split(b"/") if path else [b""]
        if path and any(part in (b"", b".", b"..") for part in (*folder, name)):
            raise ValueError(f"a path that can't be: {show_name(path)}")
        found = _take_marks(node)
        if (number := found.get(marks.OPAQUE)) is not None:
            self._marks.append((_position(number), Mark((*folder, name) if path else (), b"")))
        elif (number := found.get(marks.WHITEOUT)) is not None and name:
            self._marks.append((_position(number), Mark(tuple(folder), name)))
        elif (link := found.get(marks.LINK)) is not None and name:
            self._entries.append((self._number(node), Entry(tuple(folder), name, None, link)))
        elif name or node.is_dir:
            pooled = bool(folder) and folder[0] == AUFS_POOL
            self._entries.append((self._number(node), Entry(tuple(folder), name, node, pooled=pooled)))
        else:
            raise ValueError("the root is no directory")

    def _number(self, node: Node) -> int:
        number = self._numbers.get(id(node))
        if number is None:
            raise ValueError("an entry without a position")
        return number


def _take_marks(node: Node) -> dict[bytes, bytes]:
    """Remove the layer's own attributes from a node and return them."""
    found = {name: value for name, value in node.xattrs.items() if name.startswith(marks.PREFIX)}
    if found:
        node.xattrs = {name: value for name, value in node.xattrs.items() if name not in found}
    return found


def _position(value: bytes) -> int:
    if not value.isdigit() or len(value) > 10:
        raise ValueError("a mark without a position")
    return int(value)


def _ordered(rows: list[tuple[int, _Row]]) -> list[_Row]:
    rows.sort(key=itemgetter(0))
    if any(one[0] == other[0] for one, other in pairwise(rows)):
        raise ValueError("two entries at one position")
    return [row for _, row in rows]
