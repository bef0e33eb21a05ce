"""The tree of a whole EROFS image, file bodies read from the image itself; for images of the store's first format."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.erofs import ondisk
from dsec_imagefs.tree import EMPTY, Node

if TYPE_CHECKING:
    from dsec_imagefs.erofs.reader import ErofsReader, Inode
    from dsec_imagefs.tree import Content, ContentReader, Extent


@dataclass(frozen=True, slots=True)
class _ImageContent:
    """A file's body; the image stays open as long as it is used."""

    image: ErofsReader
    inode: Inode
    extents: tuple[Extent, ...] | None

    @property
    def size(self) -> int:
        return self.inode.size

    def open(self) -> ContentReader:
        return self

    def readinto(self, view: memoryview, offset: int) -> None:
        view[:] = self.image.read(self.inode, offset, len(view))

    def close(self) -> None:
        """The image is the caller's."""


def tree_of_image(image: ErofsReader) -> Node:
    """Read all metadata; inodes with several names become one node.

    Raises:
        ImageError: ``corrupt`` for a damaged image.
    """
    nodes: dict[int, Node] = {}
    root = _node(image, image.root)
    todo = [(root, image.root)]
    while todo:
        directory, inode = todo.pop()
        for name, nid in image.entries(inode).items():
            child = nodes.get(nid)
            if child is None:
                found = image.inode(nid)
                child = nodes[nid] = _node(image, found)
                if child.is_dir:
                    todo.append((child, found))
            directory.children[name] = child
    return root


def _node(image: ErofsReader, inode: Inode) -> Node:
    node = Node(
        fmt=inode.fmt, mode=stat.S_IMODE(inode.mode), uid=inode.uid, gid=inode.gid, mtime_s=inode.mtime_s,
        mtime_ns=inode.mtime_ns, xattrs=image.xattrs(inode),
    )  # fmt: skip
    if inode.fmt == stat.S_IFLNK:
        node.target = image.read(inode)
    elif inode.fmt in (stat.S_IFCHR, stat.S_IFBLK):
        node.device = inode.device
    elif inode.fmt == stat.S_IFREG:
        node.content = _content(image, inode)
    return node


def _content(image: ErofsReader, inode: Inode) -> Content:
    if not inode.size:
        return EMPTY
    if inode.layout != ondisk.EROFS_INODE_CHUNK_BASED:
        return _ImageContent(image, inode, None)
    runs: list[Extent] = []
    at = 0
    while at < inode.size:
        where, run = image._locate(inode, at)
        run = min(run, inode.size - at)
        if where is not None:
            runs.append((at, run))
        at += run
    return _ImageContent(image, inode, tuple(runs))
