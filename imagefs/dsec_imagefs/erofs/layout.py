"""Plan an EROFS image from a tree: inode numbers, block addresses, all metadata bytes. Pure; no data is read.

Layout: block 0 holds the superblock, the device table follows it, then the inode table, the shared attributes, whole
directory blocks and long link targets, then file data that is not in a blob, each file on a block boundary and never
tail-packed (so that DAX and fetching by blocks work). Equal trees give equal bytes: names are sorted, times are the
tree's, the UUID is cut from the metadata's own hash.
"""

from __future__ import annotations

import hashlib
import stat
import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.erofs import ondisk, xattr
from dsec_imagefs.erofs.device import MAX_DEVICES, SLOT_OFFSET, TABLE_AT, Device, pack_devices, place_devices
from dsec_imagefs.erofs.directory import FILE_TYPES, pack_block
from dsec_imagefs.erofs.inode import plan_inodes
from dsec_imagefs.erofs.ondisk import BLOCK, SLOT, blocks_of
from dsec_imagefs.errors import ImageError
from dsec_imagefs.tree import HOLE, StoredContent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsec_imagefs.erofs.inode import PlannedInode
    from dsec_imagefs.tree import Content, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRun:
    """Bytes to copy: `length` from `offset` of a file, to be padded with zeros to a whole block."""

    content: Content
    offset: int
    length: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A planned image: metadata to write first, then the runs in this order, without gaps; `devices` lie outside."""

    metadata: bytes
    runs: tuple[FileRun, ...]
    blocks: int
    inodes: int
    devices: tuple[Device, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Length of the whole image, without its devices."""
        return self.blocks * BLOCK


def plan_layout(
    root: Node, *, blobs: Sequence[tuple[str, int]] = (), numbers: Mapping[int, int] | None = None
) -> Layout:
    """Plan the image of a tree.

    Args:
        root: the tree; every `StoredContent` in it lies in one of the blobs.
        blobs: digest and length in blocks of each device, in the order they are to be mounted.
        numbers: `id` of a node -> what to record as its ``i_ino`` (0 for nodes not in it), which only our own reader
            looks at; without it, inodes are counted from 1.

    Raises:
        ImageError: ``unsupported`` for what EROFS can't hold (long names, huge xattrs, odd device numbers), naming
            the path; ``too_large`` above 16 TiB.
    """
    if len(blobs) > MAX_DEVICES:
        raise ImageError("too_large", f"{len(blobs)} blobs under one image, the limit is {MAX_DEVICES}")
    inodes, area = plan_inodes(root)
    start = TABLE_AT + ondisk.DEVICE_SLOT.size * len(blobs)
    xattr_block = blocks_of(_place_slots(inodes, start + -start % BLOCK))
    next_block = _place_directory_blocks(inodes, xattr_block + blocks_of(len(area)))
    table = bytearray(next_block * BLOCK)
    table[xattr_block * BLOCK : xattr_block * BLOCK + len(area)] = area
    runs: list[FileRun] = []
    next_block = _place_own_data(inodes, next_block, runs)
    devices = place_devices(blobs, next_block)
    end = devices[-1].uniaddr + devices[-1].blocks if devices else next_block
    if end > ondisk.MAX_BLOCKS:
        raise ImageError("too_large", f"the tree needs {end} blocks of 4 KiB and EROFS addresses 2^32")
    _place_stored_data(inodes, {device.blob: device for device in devices})
    by_node = {id(inode.node): inode for inode in inodes}
    for inode in inodes:
        number = inode.number if numbers is None else numbers.get(id(inode.node), 0)
        _write_inode(inode, number, table, by_node)
    slots = pack_devices(devices)
    table[TABLE_AT : TABLE_AT + len(slots)] = slots
    _seal(table, inodes, next_block, xattr_block if area else 0, len(devices))
    return Layout(
        metadata=bytes(table), runs=tuple(runs), blocks=next_block, inodes=len(inodes), devices=devices
    )  # fmt: skip


def _seal(table: bytearray, inodes: list[PlannedInode], blocks: int, xattr_block: int, devices: int) -> None:
    """Write the superblock, last: it holds a hash of all the rest."""
    features = ondisk.EROFS_FEATURE_INCOMPAT_CHUNKED_FILE
    if devices:
        features |= ondisk.EROFS_FEATURE_INCOMPAT_DEVICE_TABLE
    super_block = ondisk.SuperBlock(
        root_nid=inodes[0].nid, inodes=len(inodes), blocks=blocks, uuid=hashlib.sha256(table).digest()[:16],
        xattr_blkaddr=xattr_block, feature_incompat=features, extra_devices=devices,
        devt_slotoff=SLOT_OFFSET if devices else 0,
    )  # fmt: skip
    first = table[:BLOCK]
    first[ondisk.EROFS_SUPER_OFFSET : TABLE_AT] = ondisk.pack_super(super_block)
    ondisk.seal_first_block(first)
    table[:BLOCK] = first


def _place_slots(inodes: list[PlannedInode], at: int) -> int:
    for inode in inodes:
        at += -at % SLOT
        room = BLOCK - at % BLOCK
        keep = inode.fixed + inode.tail if inode.tail else ondisk.INODE_EXTENDED.size
        if keep > room:
            at += room
        inode.at = at
        at += inode.fixed + inode.tail
        if inode.chunks:
            at += 4 * len(inode.chunks)
    if inodes[0].nid > 0xFFFF:
        raise ImageError("unsupported", "the root's inode number does not fit 16 bits")
    return at


def _place_directory_blocks(inodes: list[PlannedInode], block: int) -> int:
    for inode in inodes:
        if inode.node.fmt in (stat.S_IFDIR, stat.S_IFLNK):
            whole = blocks_of(inode.size - inode.tail)
            inode.u = block if whole else 0
            block += whole
    return block


def _place_own_data(inodes: list[PlannedInode], block: int, runs: list[FileRun]) -> int:
    """Give files that are not in a blob their blocks behind the metadata."""
    for inode in inodes:
        content = inode.node.content
        if inode.node.fmt != stat.S_IFREG or not inode.size or isinstance(content, StoredContent):
            continue
        name = inode.show()
        if inode.plan is None:
            inode.u = block
            runs.append(FileRun(content=content, offset=0, length=inode.size, name=name))
            block += blocks_of(inode.size)
            continue
        bits = inode.plan.bits
        for index, present in enumerate(inode.plan.present):
            offset = index << bits
            length = min(1 << bits, inode.size - offset)
            inode.chunks[index] = block if present else HOLE
            if present:
                last = runs[-1] if runs else None
                if last is not None and last.content is content and last.offset + last.length == offset:
                    runs[-1] = FileRun(content=content, offset=last.offset, length=last.length + length, name=name)
                else:
                    runs.append(FileRun(content=content, offset=offset, length=length, name=name))
                block += blocks_of(length)
    return block


def _place_stored_data(inodes: list[PlannedInode], devices: Mapping[str, Device]) -> None:
    """Turn block numbers of a blob into those of the common space."""
    for inode in inodes:
        content = inode.node.content
        if inode.node.fmt != stat.S_IFREG or not inode.size or not isinstance(content, StoredContent):
            continue
        device = devices.get(content.blob)
        if device is None and any(block != HOLE for block in content.chunks or (0,)):
            raise ImageError("bad_image", f"{inode.show()} lies in the blob {content.blob}, which is not given")
        base = device.uniaddr if device is not None else 0
        for index, block in enumerate(content.chunks):
            inode.chunks[index] = block if block == HOLE else block + base
        if not content.chunks:
            inode.u = base + content.start


def _write_inode(inode: PlannedInode, number: int, table: bytearray, by_node: dict[int, PlannedInode]) -> None:
    node = inode.node
    ondisk.INODE_EXTENDED.pack_into(
        table, inode.at, 1 | inode.format << 1, xattr.icount_of(inode.xattrs), node.fmt | (node.mode & 0o7777), 0,
        inode.size, inode.u, number, node.uid, node.gid, node.mtime_s & 0xFFFFFFFFFFFFFFFF, node.mtime_ns,
        inode.nlink, bytes(16),
    )  # fmt: skip
    after = inode.at + ondisk.INODE_EXTENDED.size
    table[after : after + len(inode.xattrs)] = inode.xattrs
    if inode.chunks:
        at = inode.at + inode.fixed
        table[at : at + 4 * len(inode.chunks)] = _little_endian(inode.chunks)
    if node.fmt == stat.S_IFLNK:
        at = inode.at + inode.fixed if inode.tail else inode.u * BLOCK
        table[at : at + inode.size] = node.target
    elif node.fmt == stat.S_IFDIR:
        _write_directory(inode, table, by_node)


def _little_endian(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers = array("I", numbers)
        numbers.byteswap()
    return numbers.tobytes()


def _write_directory(inode: PlannedInode, table: bytearray, by_node: dict[int, PlannedInode]) -> None:
    entries = []
    for name in inode.names:
        if name == b".":
            other: PlannedInode | None = inode
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
