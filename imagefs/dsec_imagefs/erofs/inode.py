"""The inodes of an image being planned: numbered, counted, their sizes and forms decided. Pure."""

from __future__ import annotations

import stat
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsec_imagefs.erofs import ondisk, xattr
from dsec_imagefs.erofs.chunks import ChunkPlan, plan_chunks
from dsec_imagefs.erofs.directory import FILE_TYPES, cut_blocks
from dsec_imagefs.erofs.ondisk import BLOCK, SLOT
from dsec_imagefs.errors import ImageError, show_name
from dsec_imagefs.tree import NO_CHUNKS, StoredContent

if TYPE_CHECKING:
    from dsec_imagefs.tree import Node


@dataclass(slots=True, eq=False)
class PlannedInode:
    """One inode. `at` is its byte offset in the image; `u` what its data needs: address, device or chunk format."""

    node: Node
    path: tuple[PlannedInode | None, bytes]
    number: int
    nlink: int = 0
    parent: PlannedInode | None = None
    names: tuple[bytes, ...] = ()
    cuts: tuple[tuple[int, int, int], ...] = ()
    xattrs: bytes = b""
    size: int = 0
    format: int = ondisk.EROFS_INODE_FLAT_PLAIN
    u: int = 0
    tail: int = 0
    plan: ChunkPlan | None = None
    chunks: array[int] = field(default_factory=lambda: NO_CHUNKS)
    at: int = 0

    @property
    def nid(self) -> int:
        """The number directories name it by."""
        return self.at // SLOT

    @property
    def fixed(self) -> int:
        """Bytes of the inode and its attributes, before a tail or a chunk map."""
        return ondisk.INODE_EXTENDED.size + len(self.xattrs)

    def show(self) -> str:
        """One of its paths, for messages."""
        parts: list[bytes] = []
        here: PlannedInode | None = self
        while here is not None and here.path[0] is not None:
            parts.append(here.path[1])
            here = here.path[0]
        return "/" + show_name(b"/".join(reversed(parts)))


def plan_inodes(root: Node) -> tuple[list[PlannedInode], bytes]:
    """List the tree's inodes breadth first, so that the children of a directory lie together.

    Returns them and the area of shared attributes. Raises ImageError ``unsupported`` or ``bad_image`` naming the path.
    """
    inodes = _number(root)
    for inode in inodes:
        _check(inode)
    area, shared = xattr.plan_shared(inode.node.xattrs for inode in inodes if inode.node.xattrs)
    for inode in inodes:
        if inode.node.xattrs:
            try:
                inode.xattrs = xattr.pack_body(inode.node.xattrs, shared)
            except ValueError as err:
                raise _misfit(inode, err) from err
        _shape(inode)
    return inodes, area


def _number(root: Node) -> list[PlannedInode]:
    first = PlannedInode(root, (None, b""), 1, nlink=2)
    first.parent = first
    inodes = [first]
    seen = {id(root): first}
    queue = deque([first])
    while queue:
        directory = queue.popleft()
        for name, node in sorted(directory.node.children.items()):
            known = seen.get(id(node))
            if known is None:
                known = PlannedInode(node, (directory, name), len(inodes) + 1)
                seen[id(node)] = known
                inodes.append(known)
                if node.fmt == stat.S_IFDIR:
                    known.parent, known.nlink = directory, 1
                    directory.nlink += 1
                    queue.append(known)
            elif node.fmt == stat.S_IFDIR:
                raise ImageError("bad_image", f"{known.show()} is a directory under two names")
            if len(name) > ondisk.EROFS_NAME_LEN or not name or b"/" in name or b"\0" in name:
                raise ImageError("unsupported", f"{known.show()} has a name no Linux file system takes (1-255 bytes)")
            known.nlink += 1
    return inodes


def _check(inode: PlannedInode) -> None:
    node = inode.node
    if node.xattrs:
        try:
            xattr.check_xattrs(node.xattrs)
        except ValueError as err:
            raise _misfit(inode, err) from err
    if not (0 <= node.uid < 0xFFFFFFFF and 0 <= node.gid < 0xFFFFFFFF):
        raise ImageError("unsupported", f"{inode.show()} is owned by {node.uid}:{node.gid}; ids end at 4294967294")
    if not (-(1 << 63) <= node.mtime_s < 1 << 63 and 0 <= node.mtime_ns < 10**9):
        raise ImageError("unsupported", f"{inode.show()} has a time outside 64 bits of seconds")


def _misfit(inode: PlannedInode, err: ValueError) -> ImageError:
    return ImageError("unsupported", f"extended attributes of {inode.show()} don't fit: {err}")


def _shape(inode: PlannedInode) -> None:
    """Decide how an inode's data is kept and how much of it stays beside the inode."""
    node = inode.node
    if node.fmt == stat.S_IFDIR:
        inode.names = tuple(sorted([b".", b"..", *node.children]))
        inode.cuts = tuple(cut_blocks(inode.names))
        inode.size = (len(inode.cuts) - 1) * BLOCK + inode.cuts[-1][2]
        _choose_inline(inode, inode.cuts[-1][2])
    elif node.fmt == stat.S_IFLNK:
        if not 0 < len(node.target) < BLOCK or b"\0" in node.target:
            raise ImageError("unsupported", f"link target of {inode.show()} has {len(node.target)} bytes, not 1-4095")
        inode.size = len(node.target)
        _choose_inline(inode, inode.size)
    elif node.fmt == stat.S_IFREG:
        inode.size = node.content.size
        _choose_chunks(inode)
    elif node.fmt in (stat.S_IFCHR, stat.S_IFBLK):
        major, minor = node.device
        if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
            raise ImageError("unsupported", f"device {major}:{minor} of {inode.show()} is out of range")
        inode.u = ondisk.encode_device(major, minor)
    elif node.fmt not in FILE_TYPES:
        raise ImageError("unsupported", f"{inode.show()} is of a kind that EROFS doesn't know")


def _choose_inline(inode: PlannedInode, tail: int) -> None:
    if inode.fixed + tail <= BLOCK:  # the kernel wants the tail inside one block
        inode.format, inode.tail = ondisk.EROFS_INODE_FLAT_INLINE, tail


def _choose_chunks(inode: PlannedInode) -> None:
    content = inode.node.content
    if isinstance(content, StoredContent):
        if not content.chunks:
            return
        count, inode.u = len(content.chunks), content.chunk_bits
    else:
        try:
            inode.plan = plan_chunks(content.size, content.extents)
        except ValueError as err:
            raise ImageError("unsupported", f"{inode.show()}: {err}") from err
        if inode.plan is None:
            return
        count, inode.u = len(inode.plan.present), inode.plan.bits - ondisk.BLOCK_BITS
    inode.format, inode.chunks = ondisk.EROFS_INODE_CHUNK_BASED, array("I", bytes(4 * count))
