"""Read a whole metadata image, held in memory, back into a tree of nodes. Fast, and strict: it may be a stranger's.

For images as `plan_layout` makes them: file data in devices, link targets and directories inside.
"""

from __future__ import annotations

import stat
import struct
import sys
from array import array
from bisect import bisect_right
from dataclasses import dataclass

from dsec_imagefs.erofs import ondisk, xattr
from dsec_imagefs.erofs.device import Device, unpack_devices
from dsec_imagefs.erofs.directory import unpack_block
from dsec_imagefs.erofs.ondisk import BLOCK, BLOCK_BITS, INODE_EXTENDED, SLOT, blocks_of
from dsec_imagefs.errors import ImageError, show_name
from dsec_imagefs.tree import HOLE, NO_CHILDREN, NO_XATTRS, Content, Node, StoredContent

_KNOWN_INCOMPAT = ondisk.EROFS_FEATURE_INCOMPAT_CHUNKED_FILE | ondisk.EROFS_FEATURE_INCOMPAT_DEVICE_TABLE
_MAX_DEPTH = 4096 + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The tree, its devices, and `id` of each node -> its recorded ``i_ino``."""

    root: Node
    devices: tuple[Device, ...]
    numbers: dict[int, int]


def load_tree(data: bytes, name: str) -> Loaded:
    """Parse an image whose bytes were verified by digest; `name` is for messages.

    Raises:
        ImageError: ``corrupt`` for structures that can't be, ``unsupported`` for features we never write.
    """
    try:
        return _Loader(data, name).load()
    except (struct.error, ValueError, IndexError) as err:
        raise ImageError("corrupt", f"metadata of {name} is damaged: {err}", "publish the layer again") from err


class _Loader:
    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        self._left = 2 * len(data) + BLOCK  # honest parts don't overlap; else a little file could fill the memory
        self._name = name
        start = ondisk.EROFS_SUPER_OFFSET
        found = ondisk.unpack_super(data[start : start + ondisk.SUPER.size])
        if found is None:
            raise ValueError("it is no EROFS image")
        if found.block_bits != BLOCK_BITS or found.feature_incompat & ~_KNOWN_INCOMPAT:
            raise ImageError("unsupported", f"metadata of {name} uses features {found.feature_incompat:#x}")
        if len(data) != found.blocks * BLOCK:
            raise ValueError(f"{len(data)} bytes and {found.blocks} blocks")
        self._super = found
        self._devices = self._read_devices()
        self._starts = [device.uniaddr for device in self._devices]
        self._nodes: dict[int, Node] = {}
        self._numbers: dict[int, int] = {}
        self._bodies: dict[bytes, dict[bytes, bytes]] = {}
        self._shared: dict[int, tuple[bytes, bytes]] = {}

    def _read_devices(self) -> tuple[Device, ...]:
        if not self._super.feature_incompat & ondisk.EROFS_FEATURE_INCOMPAT_DEVICE_TABLE:
            return ()
        at, size = self._super.devt_slotoff * ondisk.DEVICE_SLOT.size, ondisk.DEVICE_SLOT.size
        devices = unpack_devices(self._slice(at, self._super.extra_devices * size))
        end = self._super.blocks
        for device in devices:
            if device.uniaddr < end:
                raise ValueError(f"devices overlap at block {device.uniaddr}")
            end = device.uniaddr + device.blocks
        return devices

    def load(self) -> Loaded:
        """Walk from the root down; every directory is met once, other inodes may have several names."""
        root, todo = self._node(self._super.root_nid)
        if todo is None:
            raise ValueError("the root is no directory")
        stack = [(todo, 1)]
        while stack:
            (node, blocks), depth = stack.pop()
            if depth > _MAX_DEPTH:
                raise ValueError("directories are nested without end")
            for block in blocks:
                for name, nid, _ in unpack_block(block):
                    if name in (b".", b".."):
                        continue
                    if len(name) > ondisk.EROFS_NAME_LEN or b"/" in name or b"\0" in name or name in node.children:
                        raise ValueError(f"a name that can't be: {show_name(name)}")
                    child = self._nodes.get(nid)
                    if child is None:
                        child, below = self._node(nid)
                        if below is not None:
                            stack.append((below, depth + 1))
                    elif child.is_dir:
                        raise ValueError(f"a directory under two names: {show_name(name)}")
                    node.children[name] = child
        return Loaded(root=root, devices=self._devices, numbers=self._numbers)

    def _node(self, nid: int) -> tuple[Node, tuple[Node, list[bytes]] | None]:
        """Make the node of an inode; for a directory also the blocks of its entries."""
        at = (self._super.meta_blkaddr << BLOCK_BITS) + nid * SLOT
        if at > len(self._data):  # inode numbers have 64 bits, and struct takes no such offset
            raise ValueError(f"inode {nid} is beyond the end")
        form, icount, mode, _, size, u, number, uid, gid, mtime, mtime_ns, _, _ = INODE_EXTENDED.unpack_from(
            self._data, at
        )
        if not form & 1 or form >> 4:
            raise ValueError(f"inode {nid} is of another form than ours")
        layout = (form >> 1) & 7
        body_at = at + INODE_EXTENDED.size
        node = Node(
            fmt=stat.S_IFMT(mode), mode=mode & 0o7777, uid=uid, gid=gid,
            mtime_s=mtime - (1 << 64) if mtime >> 63 else mtime, mtime_ns=mtime_ns, xattrs=NO_XATTRS,
            children={} if stat.S_ISDIR(mode) else NO_CHILDREN,
        )  # fmt: skip
        if icount:
            node.xattrs = self._xattrs(self._slice(body_at, xattr.body_size(icount)))
        tail_at = body_at + xattr.body_size(icount)
        self._nodes[nid] = node
        if number:
            self._numbers[id(node)] = number
        if node.fmt == stat.S_IFREG:
            node.content = self._content(layout, size, u, tail_at)
        elif node.fmt == stat.S_IFDIR:
            return node, (node, list(self._blocks(layout, size, u, tail_at)))
        elif node.fmt == stat.S_IFLNK:
            node.target = b"".join(self._blocks(layout, size, u, tail_at))
        elif node.fmt in (stat.S_IFCHR, stat.S_IFBLK):
            node.device = ondisk.decode_device(u)
        return node, None

    def _blocks(self, layout: int, size: int, u: int, tail_at: int) -> list[bytes]:
        """The metadata blocks of a directory or link."""
        if layout == ondisk.EROFS_INODE_FLAT_INLINE and size:
            whole = (size - 1) // BLOCK
            tail = [self._slice(tail_at, size - whole * BLOCK)]
        elif layout == ondisk.EROFS_INODE_FLAT_PLAIN:
            whole, tail = size // BLOCK, []
            if size % BLOCK:
                tail = [self._slice((u + whole) * BLOCK, size % BLOCK)]
        else:
            raise ValueError(f"data layout {layout} where names are kept")
        return [self._slice((u + index) * BLOCK, BLOCK) for index in range(whole)] + tail

    def _content(self, layout: int, size: int, u: int, tail_at: int) -> Content:
        if not size:
            return StoredContent(blob="", size=0)
        if layout == ondisk.EROFS_INODE_FLAT_PLAIN:
            device = self._device(u, blocks_of(size))
            return StoredContent(blob=device.blob, size=size, start=u - device.uniaddr)
        if layout != ondisk.EROFS_INODE_CHUNK_BASED or u & ~ondisk.EROFS_CHUNK_FORMAT_BLKBITS_MASK:
            raise ValueError(f"data layout {layout} for a file")
        bits = BLOCK_BITS + u
        chunks = array("I", self._slice(tail_at, 4 * (-(-size >> bits))))
        if sys.byteorder == "big":
            chunks.byteswap()
        found: Device | None = None
        for index, block in enumerate(chunks):
            if block == HOLE:
                continue
            device = self._device(block, blocks_of(min(1 << bits, size - (index << bits))))
            if found is not None and device is not found:
                raise ValueError("a file in two devices")
            found = device
            chunks[index] = block - device.uniaddr
        return StoredContent(blob=found.blob if found else "", size=size, chunk_bits=u, chunks=chunks)

    def _device(self, block: int, count: int) -> Device:
        index = bisect_right(self._starts, block) - 1
        if index < 0 or block + count > self._devices[index].uniaddr + self._devices[index].blocks:
            raise ValueError(f"file data at block {block}, which is in no device")
        return self._devices[index]

    def _xattrs(self, body: bytes) -> dict[bytes, bytes]:
        known = self._bodies.get(body)  # most attributes are the same ones over and over
        if known is None:
            known = xattr.unpack_body(body)
            for shared in xattr.shared_ids(body):
                name, value = self._shared_entry(shared)
                known[name] = value
            self._bodies[body] = known
        return known

    def _shared_entry(self, number: int) -> tuple[bytes, bytes]:
        found = self._shared.get(number)
        if found is None:
            name, value, _ = xattr.unpack_entry(self._data, (self._super.xattr_blkaddr << BLOCK_BITS) + 4 * number)
            self._take(len(name) + len(value))
            found = self._shared[number] = (name, value)
        return found

    def _slice(self, at: int, count: int) -> bytes:
        data = self._data[at : at + count]
        if len(data) != count:
            raise ValueError(f"it ends before byte {at + count}")
        self._take(count)
        return data

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("its parts overlap")
