"""A layer's entries as a tree with marks, which becomes its metadata image; see `dsec_imagefs.layer.marks`. Pure."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsec_imagefs.layer import marks
from dsec_imagefs.tree import NO_CHILDREN, Node, new_directory

if TYPE_CHECKING:
    from dsec_imagefs.layer.entries import Entries, Entry, Folder, Mark


@dataclass(slots=True)
class Encoded:
    """The tree and the position of each entry's node, by `id`."""

    root: Node
    numbers: dict[int, int] = field(default_factory=dict)


def encode_entries(layer: Entries) -> Encoded:
    """Place every entry and mark; what has no place goes aside with its path.

    The layer's nodes become the tree's: read the entries no more.
    """
    work = _Encoder()
    for number, entry in enumerate(layer.entries, start=1):
        work.add_entry(entry, number)
    for number, mark in enumerate(layer.marks, start=1):
        work.add_mark(mark, b"%d" % number)
    return work.finish()


class _Encoder:
    def __init__(self) -> None:
        root = _implicit()
        self._done = Encoded(root)
        self._folders: dict[Folder, Node] = {(): root}
        self._aside: list[Node] = []

    def add_entry(self, entry: Entry, number: int) -> None:
        node = entry.node if entry.node is not None else _link(entry.link)
        self._done.numbers[id(node)] = number
        folder = None if entry.pooled else self._folder(entry.folder)
        if not entry.name:
            self._describe_implicit(self._done.root, node, entry.path)
            return
        present = folder.children.get(entry.name) if folder is not None else None
        if folder is None or (present is not None and not node.is_dir):
            self._put_aside(node, entry.path)
        elif present is not None:
            self._describe_implicit(present, node, entry.path)
        elif not entry.folder and entry.name == marks.ASIDE:
            self._put_aside(node, entry.path)
        else:
            folder.children[entry.name] = node

    def _describe_implicit(self, present: Node, node: Node, path: bytes) -> None:
        """An entry for a directory that so far was only a parent; if it was described before, it is one too many."""
        if marks.IMPLICIT not in present.xattrs:
            self._put_aside(node, path)
            return
        present.mode, present.uid, present.gid = node.mode, node.uid, node.gid
        present.mtime_s, present.mtime_ns, present.xattrs = node.mtime_s, node.mtime_ns, node.xattrs
        self._done.numbers[id(present)] = self._done.numbers.pop(id(node))

    def add_mark(self, mark: Mark, number: bytes) -> None:
        folder = self._folder(mark.folder)
        if not mark.name:
            if folder is None or marks.OPAQUE in folder.xattrs:
                self._put_aside(_whiteout(marks.OPAQUE, number), b"/".join(mark.folder))
            else:
                folder.xattrs = folder.xattrs | {marks.OPAQUE: number}
            return
        present = folder.children.get(mark.name) if folder is not None else None
        if folder is not None and present is None and (mark.folder or mark.name != marks.ASIDE):
            folder.children[mark.name] = _whiteout(marks.WHITEOUT, number)
        elif present is None or marks.WHITEOUT in present.xattrs or marks.REPLACES in present.xattrs:
            self._put_aside(_whiteout(marks.WHITEOUT, number), b"/".join((*mark.folder, mark.name)))
        else:
            present.xattrs = present.xattrs | {marks.REPLACES: number}

    def _folder(self, path: Folder) -> Node | None:
        """The directory of a path, made when it is missing; None when something else of this layer is in the way."""
        known = self._folders.get(path)
        if known is not None:
            return known
        if path[0] == marks.ASIDE:
            return None
        above: list[bytes] = []
        here = self._done.root
        for name in path:
            child = here.children.get(name)
            if child is None:
                child = here.children[name] = _implicit()
            if not child.is_dir:
                return None
            above.append(name)
            here = child
        self._folders[tuple(above)] = here
        return here

    def _put_aside(self, node: Node, path: bytes) -> None:
        node.xattrs = node.xattrs | {marks.PATH: path}
        self._aside.append(node)

    def finish(self) -> Encoded:
        if self._aside:
            folder = self._done.root.children[marks.ASIDE] = _implicit()
            folder.children = {b"%08x" % index: node for index, node in enumerate(self._aside)}
        return self._done


def _implicit() -> Node:
    node = new_directory()
    node.xattrs = {marks.IMPLICIT: b""}
    return node


def _link(target: bytes) -> Node:
    return Node(fmt=stat.S_IFREG, mode=0, xattrs={marks.LINK: target}, children=NO_CHILDREN)


def _whiteout(mark: bytes, number: bytes) -> Node:
    return Node(fmt=stat.S_IFCHR, mode=0, xattrs={mark: number}, children=NO_CHILDREN)
