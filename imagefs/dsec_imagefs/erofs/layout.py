"""Plan an EROFS image from a tree: inode numbers, block addresses, all metadata bytes. Pure; no data is read.

Layout: block 0 holds the superblock, then the inode table, then whole directory blocks and long link targets, then
file data, each file on a block boundary and never tail-packed (so that DAX and later block fetching work). Equal trees
give equal bytes: names are sorted, times are the tree's, the UUID is cut from the metadata's own hash.
"""

from __future__ import annotations

import hashlib
import stat
import struct
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.erofs import ondisk, xattr
from dsec_imagefs.erofs.directory import FILE_TYPES, cut_blocks, pack_block
from dsec_imagefs.erofs.ondisk import BLOCK, SLOT, blocks_of
from dsec_imagefs.errors import ImageError, show_name

if TYPE_CHECKING:
    from dsec_imagefs.tree import Content, Node

MIN_HOLE_BYTES = 128 * 1024  # fewer zeros than this are written out: a chunk map would not pay
MAX_CHUNKS = 1 << 18  # a hole map of at most 1 MiB; larger files take larger chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRun:
    """Bytes to copy: `length` from `offset` of a file, to be padded with zeros to a whole block."""

    content: Content
    offset: int
    length: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A planned image: metadata to write first, then the runs in this order, without gaps."""

    metadata: bytes
    runs: tuple[FileRun, ...]
    blocks: int
    inodes: int

    @property
    def size_bytes(self) -> int:
        """Length of the whole image."""
        return self.blocks * BLOCK


@dataclass(slots=True, eq=False)
class _Inode:
    node: Node
    path: tuple[_Inode | None, bytes]
    number: int
    nlink: int = 0
    parent: _Inode | None = None
    names: tuple[bytes, ...] = ()
    cuts: tuple[tuple[int, int, int], ...] = ()
    xattrs: bytes = b""
    size: int = 0
    format: int = ondisk.EROFS_INODE_FLAT_PLAIN
    u: int = 0
    tail: int = 0
    chunk_bits: int = 0
    chunks: tuple[bool, ...] = ()
    at: int = 0

    @property
    def nid(self) -> int:
        return self.at // SLOT

    @property
    def fixed(self) -> int:
        return ondisk.INODE_EXTENDED.size + len(self.xattrs)

    def show(self) -> str:
        parts: list[bytes] = []
        here: _Inode | None = self
        while here is not None and here.path[0] is not None:
            parts.append(here.path[1])
            here = here.path[0]
        return "/" + show_name(b"/".join(reversed(parts)))


def plan_layout(root: Node) -> Layout:
    """Plan the image of a tree.

    Raises:
        ImageError: ``unsupported`` for what EROFS can't hold (long names, huge xattrs, odd device numbers), naming
            the path; ``too_large`` above 16 TiB.
    """
    inodes = _number(root)
    end = _place_slots(inodes)
    meta_blocks = blocks_of(end)
    next_block = _place_directory_blocks(inodes, meta_blocks)
    table = bytearray(next_block * BLOCK)
    runs: list[FileRun] = []
    next_block = _place_data(inodes, next_block, table, runs)
    if next_block > ondisk.MAX_BLOCKS:
        raise ImageError("too_large", f"the tree needs {next_block} blocks of 4 KiB and EROFS addresses 2^32")
    by_node = {id(inode.node): inode for inode in inodes}
    for inode in inodes:
        _write_inode(inode, table, by_node)
    uuid = hashlib.sha256(memoryview(table)[BLOCK:]).digest()[:16]
    super_block = ondisk.SuperBlock(root_nid=inodes[0].nid, inodes=len(inodes), blocks=next_block, uuid=uuid)
    first = bytearray(BLOCK)
    first[ondisk.EROFS_SUPER_OFFSET : ondisk.EROFS_SUPER_OFFSET + 128] = ondisk.pack_super(super_block)
    ondisk.seal_first_block(first)
    table[:BLOCK] = first
    return Layout(metadata=bytes(table), runs=tuple(runs), blocks=next_block, inodes=len(inodes))


def _number(root: Node) -> list[_Inode]:
    """List inodes breadth first, so that the children of a directory lie together; count links."""
    first = _Inode(root, (None, b""), 1, nlink=2)
    first.parent = first
    inodes = [first]
    seen = {id(root): first}
    queue = deque([first])
    while queue:
        directory = queue.popleft()
        for name, node in sorted(directory.node.children.items()):
            known = seen.get(id(node))
            if known is None:
                known = _Inode(node, (directory, name), len(inodes) + 1)
                seen[id(node)] = known
                inodes.append(known)
                if node.is_dir:
                    known.parent, known.nlink = directory, 1
                    directory.nlink += 1
                    queue.append(known)
            elif node.is_dir:
                raise ImageError("bad_image", f"{known.show()} is a directory under two names")
            if len(name) > ondisk.EROFS_NAME_LEN or not name or b"/" in name or b"\0" in name:
                raise ImageError("unsupported", f"{known.show()} has a name no Linux file system takes (1-255 bytes)")
            known.nlink += 1
        _shape(directory)
    for inode in inodes:
        if not inode.node.is_dir:
            _shape(inode)
    return inodes


def _shape(inode: _Inode) -> None:
    """Decide how an inode's data is kept and how much of it stays beside the inode."""
    node = inode.node
    try:
        inode.xattrs = xattr.pack_body(node.xattrs)
    except ValueError as err:
        raise ImageError("unsupported", f"extended attributes of {inode.show()} don't fit: {err}") from err
    if not (0 <= node.uid < 0xFFFFFFFF and 0 <= node.gid < 0xFFFFFFFF):
        raise ImageError("unsupported", f"{inode.show()} is owned by {node.uid}:{node.gid}; ids end at 4294967294")
    if not (-(1 << 63) <= node.mtime_s < 1 << 63 and 0 <= node.mtime_ns < 10**9):
        raise ImageError("unsupported", f"{inode.show()} has a time outside 64 bits of seconds")
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
        _choose_chunks(inode, node.content)
    elif node.fmt in (stat.S_IFCHR, stat.S_IFBLK):
        major, minor = node.device
        if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
            raise ImageError("unsupported", f"device {major}:{minor} of {inode.show()} is out of range")
        inode.u = ondisk.encode_device(major, minor)
    elif node.fmt not in FILE_TYPES:
        raise ImageError("unsupported", f"{inode.show()} is of a kind that EROFS doesn't know")


def _choose_inline(inode: _Inode, tail: int) -> None:
    if inode.fixed + tail <= BLOCK:  # the kernel wants the tail inside one block
        inode.format, inode.tail = ondisk.EROFS_INODE_FLAT_INLINE, tail


def _choose_chunks(inode: _Inode, content: Content) -> None:
    if content.extents is None:
        return
    bits = ondisk.BLOCK_BITS
    while content.size >> bits >= MAX_CHUNKS:
        bits += 1
    if bits - ondisk.BLOCK_BITS > ondisk.EROFS_CHUNK_FORMAT_BLKBITS_MASK:
        raise ImageError("unsupported", f"{inode.show()} says it has {content.size} bytes, more than a file can")
    chunks = [False] * -(-content.size >> bits)
    for offset, length in content.extents:
        if length:
            for index in range(offset >> bits, ((offset + length - 1) >> bits) + 1):
                chunks[index] = True
    if chunks.count(False) << bits >= MIN_HOLE_BYTES:
        inode.format, inode.chunks, inode.chunk_bits = ondisk.EROFS_INODE_CHUNK_BASED, tuple(chunks), bits
        inode.u = bits - ondisk.BLOCK_BITS


def _place_slots(inodes: list[_Inode]) -> int:
    at = BLOCK
    for inode in inodes:
        at += -at % SLOT
        room = BLOCK - at % BLOCK
        keep = inode.fixed + inode.tail if inode.tail else ondisk.INODE_EXTENDED.size
        if keep > room:
            at += room
        inode.at = at
        at += inode.fixed + inode.tail + 4 * len(inode.chunks)
    if inodes[0].nid > 0xFFFF:
        raise ImageError("unsupported", "the root's inode number does not fit 16 bits")
    return at


def _place_directory_blocks(inodes: list[_Inode], block: int) -> int:
    for inode in inodes:
        if inode.node.is_dir or inode.node.is_symlink:
            whole = blocks_of(inode.size - inode.tail)
            inode.u = block if whole else 0
            block += whole
    return block


def _place_data(inodes: list[_Inode], block: int, table: bytearray, runs: list[FileRun]) -> int:
    for inode in inodes:
        if inode.node.fmt != stat.S_IFREG or not inode.size:
            continue
        content, name = inode.node.content, inode.show()
        if not inode.chunks:
            inode.u = block
            runs.append(FileRun(content=content, offset=0, length=inode.size, name=name))
            block += blocks_of(inode.size)
            continue
        addresses = []
        for index, present in enumerate(inode.chunks):
            offset = index << inode.chunk_bits
            length = min(1 << inode.chunk_bits, inode.size - offset)
            addresses.append(block if present else ondisk.EROFS_NULL_ADDR)
            if present:
                last = runs[-1] if runs else None
                if last is not None and last.content is content and last.offset + last.length == offset:
                    runs[-1] = FileRun(content=content, offset=last.offset, length=last.length + length, name=name)
                else:
                    runs.append(FileRun(content=content, offset=offset, length=length, name=name))
                block += blocks_of(length)
        struct.pack_into(f"<{len(addresses)}I", table, inode.at + inode.fixed, *addresses)
    return block


def _write_inode(inode: _Inode, table: bytearray, by_node: dict[int, _Inode]) -> None:
    node = inode.node
    ondisk.INODE_EXTENDED.pack_into(
        table, inode.at, 1 | inode.format << 1, xattr.icount_of(inode.xattrs), node.fmt | (node.mode & 0o7777), 0,
        inode.size, inode.u, inode.number, node.uid, node.gid, node.mtime_s & 0xFFFFFFFFFFFFFFFF, node.mtime_ns,
        inode.nlink, bytes(16),
    )  # fmt: skip
    after = inode.at + ondisk.INODE_EXTENDED.size
    table[after : after + len(inode.xattrs)] = inode.xattrs
    if node.is_symlink:
        at = inode.at + inode.fixed if inode.tail else inode.u * BLOCK
        table[at : at + inode.size] = node.target
    elif node.is_dir:
        _write_directory(inode, table, by_node)


def _write_directory(inode: _Inode, table: bytearray, by_node: dict[int, _Inode]) -> None:
    entries = []
    for name in inode.names:
        if name == b".":
            other: _Inode | None = inode
        elif name == b"..":
            other = inode.parent
        else:
            other = by_node[id(inode.node.children[name])]
        assert other is not None
        entries.append((name, other.nid, FILE_TYPES[other.node.fmt]))
    for index, (first, end, _used) in enumerate(inode.cuts):
        raw = pack_block(entries[first:end])
        inline = inode.tail and index == len(inode.cuts) - 1
        at = inode.at + inode.fixed if inline else (inode.u + index) * BLOCK
        table[at : at + len(raw)] = raw
