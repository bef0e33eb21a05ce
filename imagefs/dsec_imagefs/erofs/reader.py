"""Read uncompressed EROFS images without mounting them: walk, stat, read, xattrs, and a check of the structure.

Reads what our writer makes and what mkfs.erofs makes without -z; anything else is refused by name.
"""

from __future__ import annotations

import os
import stat
import struct
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.erofs import ondisk, xattr
from dsec_imagefs.erofs.device import Device, unpack_devices
from dsec_imagefs.erofs.directory import unpack_block
from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ReadAt = Callable[[int, int], bytes]
"""``read(offset, length)`` gives exactly so many bytes of a blob, or raises ImageError."""

_KNOWN_INCOMPAT = ondisk.EROFS_FEATURE_INCOMPAT_CHUNKED_FILE | ondisk.EROFS_FEATURE_INCOMPAT_DEVICE_TABLE
_MAX_DEPTH = 4096
_MAX_OFFSET = 1 << 62  # an inode number has 64 bits, and pread(2) takes less


@dataclass(frozen=True, slots=True, kw_only=True)
class Inode:
    """One inode as stored. `layout` is an ``EROFS_INODE_*`` value and `u` its address, device or chunk format."""

    nid: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_s: int
    mtime_ns: int
    nlink: int
    layout: int
    u: int
    xattr_icount: int
    body_at: int

    @property
    def fmt(self) -> int:
        """``stat.S_IF*``."""
        return stat.S_IFMT(self.mode)

    @property
    def device(self) -> tuple[int, int]:
        """Major and minor of a device node."""
        return ondisk.decode_device(self.u)

    @property
    def tail_at(self) -> int:
        """Where an inline tail or a chunk map starts."""
        return self.body_at + xattr.body_size(self.xattr_icount)


class ErofsReader:
    """An image in an open file; the caller keeps the descriptor."""

    def __init__(self, fd: int, name: str = "image", blobs: Mapping[str, ReadAt] | None = None) -> None:
        """Read and check the superblock; `blobs` reads the data of devices, by digest, where it is wanted.

        Raises ImageError ``corrupt`` or ``unsupported``.
        """
        self._fd = fd
        self._name = name
        self._blobs = blobs or {}
        first = self._bytes(0, ondisk.BLOCK)
        start = ondisk.EROFS_SUPER_OFFSET
        found = ondisk.unpack_super(first[start : start + ondisk.SUPER.size])
        if found is None:
            raise ImageError("corrupt", f"{name} is no EROFS image")
        self.super = found
        if found.block_bits != ondisk.BLOCK_BITS or found.feature_incompat & ~_KNOWN_INCOMPAT:
            raise ImageError("unsupported", f"{name} uses EROFS features {found.feature_incompat:#x} unknown here")
        summed = found.feature_compat & ondisk.EROFS_FEATURE_COMPAT_SB_CHKSUM
        if summed and ondisk.first_block_checksum(first) != found.checksum:
            raise ImageError("corrupt", f"the superblock checksum of {name} is wrong")
        if os.fstat(fd).st_size < found.blocks * ondisk.BLOCK:
            raise ImageError("corrupt", f"{name} is shorter than its {found.blocks} blocks")
        self.devices = self._read_devices()
        self._starts = [device.uniaddr for device in self.devices]

    def _read_devices(self) -> tuple[Device, ...]:
        if not self.super.feature_incompat & ondisk.EROFS_FEATURE_INCOMPAT_DEVICE_TABLE:
            return ()
        size = ondisk.DEVICE_SLOT.size
        devices = unpack_devices(self._bytes(self.super.devt_slotoff * size, self.super.extra_devices * size))
        end = self.super.blocks
        for device in devices:
            if device.uniaddr < end:
                raise ImageError("corrupt", f"{self._name}: devices overlap at block {device.uniaddr}")
            end = device.uniaddr + device.blocks
        return devices

    @property
    def root(self) -> Inode:
        """The root directory."""
        return self.inode(self.super.root_nid)

    def inode(self, nid: int) -> Inode:
        """Read an inode by number."""
        at = (self.super.meta_blkaddr << ondisk.BLOCK_BITS) + nid * ondisk.SLOT
        raw = self._bytes(at, ondisk.INODE_EXTENDED.size)
        layout = (raw[0] >> 1) & 7
        if raw[0] & 1:
            f = ondisk.INODE_EXTENDED.unpack(raw)
            seconds = f[9] - (1 << 64) if f[9] >> 63 else f[9]
            return Inode(
                nid=nid, mode=f[2], uid=f[7], gid=f[8], size=f[4], mtime_s=seconds, mtime_ns=f[10], nlink=f[11],
                layout=layout, u=f[5], xattr_icount=f[1], body_at=at + ondisk.INODE_EXTENDED.size,
            )  # fmt: skip
        c = ondisk.INODE_COMPACT.unpack(raw[: ondisk.INODE_COMPACT.size])
        return Inode(
            nid=nid, mode=c[2], uid=c[8], gid=c[9], size=c[4], mtime_s=self.super.epoch_s,
            mtime_ns=self.super.epoch_ns, nlink=c[3], layout=layout, u=c[6], xattr_icount=c[1],
            body_at=at + ondisk.INODE_COMPACT.size,
        )  # fmt: skip

    def read(self, inode: Inode, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file, link target or directory; holes are zeros."""
        end = inode.size if length is None else min(inode.size, offset + length)
        parts = []
        while offset < end:
            at, run = self._locate(inode, offset)
            run = min(run, end - offset)
            parts.append(bytes(run) if at is None else self._data(at, run))
            offset += run
        return b"".join(parts)

    def _data(self, at: int, count: int) -> bytes:
        """Bytes of the common address space: of the image itself, or of the device that lies there."""
        if at < self.super.blocks * ondisk.BLOCK:
            return self._bytes(at, count)
        number = bisect_right(self._starts, at // ondisk.BLOCK) - 1
        device = self.devices[number] if number >= 0 else None
        offset = at - (device.uniaddr if device is not None else 0) * ondisk.BLOCK
        if device is None or offset + count > device.blocks * ondisk.BLOCK:
            raise ImageError("corrupt", f"{self._name}: no device holds {count} bytes at {at}")
        if device.blob not in self._blobs:
            raise ImageError("not_found", f"{self._name}: data lies in the blob {device.blob}, which is not at hand")
        data = self._blobs[device.blob](offset, count)
        if len(data) != count:
            raise ImageError("corrupt", f"the blob {device.blob} gave {len(data)} bytes instead of {count}")
        return data

    def _locate(self, inode: Inode, offset: int) -> tuple[int | None, int]:
        """Image address of a file offset (None in a hole) and how far it runs from there."""
        if inode.layout == ondisk.EROFS_INODE_FLAT_PLAIN:
            return inode.u * ondisk.BLOCK + offset, inode.size - offset
        if inode.layout == ondisk.EROFS_INODE_FLAT_INLINE:
            inline_from = (inode.size - 1) // ondisk.BLOCK * ondisk.BLOCK
            if offset >= inline_from:
                return inode.tail_at + offset - inline_from, inode.size - offset
            return inode.u * ondisk.BLOCK + offset, inline_from - offset
        if inode.layout == ondisk.EROFS_INODE_CHUNK_BASED and not inode.u & ondisk.EROFS_CHUNK_FORMAT_INDEXES:
            bits = ondisk.BLOCK_BITS + (inode.u & ondisk.EROFS_CHUNK_FORMAT_BLKBITS_MASK)
            index, within = divmod(offset, 1 << bits)
            (block,) = struct.unpack("<I", self._bytes(inode.tail_at + 4 * index, 4))
            return None if block == ondisk.EROFS_NULL_ADDR else block * ondisk.BLOCK + within, (1 << bits) - within
        raise ImageError("unsupported", f"{self._name}: inode {inode.nid} has data layout {inode.layout}")

    def entries(self, inode: Inode) -> dict[bytes, int]:
        """Names and inode numbers of a directory, without ``.`` and ``..``."""
        found: dict[bytes, int] = {}
        data = self.read(inode)
        try:
            for at in range(0, len(data), ondisk.BLOCK):
                found.update({name: nid for name, nid, _ in unpack_block(data[at : at + ondisk.BLOCK])})
        except ValueError as err:
            raise ImageError("corrupt", f"{self._name}: directory {inode.nid}: {err}") from err
        return {name: nid for name, nid in found.items() if name not in (b".", b"..")}

    def xattrs(self, inode: Inode) -> dict[bytes, bytes]:
        """All extended attributes of an inode."""
        body = self._bytes(inode.body_at, xattr.body_size(inode.xattr_icount))
        try:
            found = xattr.unpack_body(body)
            for shared in xattr.shared_ids(body):
                at = (self.super.xattr_blkaddr << ondisk.BLOCK_BITS) + 4 * shared
                head = ondisk.XATTR_ENTRY.unpack(self._bytes(at, ondisk.XATTR_ENTRY.size))
                raw = self._bytes(at, ondisk.XATTR_ENTRY.size + head[0] + head[2])
                name, value, _ = xattr.unpack_entry(raw, 0)
                found[name] = value
        except ValueError as err:
            raise ImageError("corrupt", f"{self._name}: attributes of inode {inode.nid}: {err}") from err
        return found

    def walk(self) -> Iterator[tuple[bytes, Inode]]:
        """Every path (relative, the root as b"") with its inode, parents before children, names in order."""
        todo = [(b"", self.super.root_nid, 0)]
        while todo:
            path, nid, depth = todo.pop()
            inode = self.inode(nid)
            yield path, inode
            if inode.fmt == stat.S_IFDIR:
                if depth > _MAX_DEPTH:
                    raise ImageError("corrupt", f"{self._name}: directories are nested without end")
                below = sorted(self.entries(inode).items(), reverse=True)
                todo.extend((path + b"/" + name if path else name, child, depth + 1) for name, child in below)

    def lookup(self, path: bytes) -> Inode:
        """Find an entry by its path, links not followed; raises ImageError ``not_found``."""
        inode = self.root
        for name in filter(None, path.split(b"/")):
            nid = self.entries(inode).get(name) if inode.fmt == stat.S_IFDIR else None
            if nid is None:
                raise ImageError("not_found", f"{self._name} has no {path.decode(errors='backslashreplace')}")
            inode = self.inode(nid)
        return inode

    def _bytes(self, at: int, count: int) -> bytes:
        data = os.pread(self._fd, count, at) if at < _MAX_OFFSET else b""
        if len(data) != count:
            raise ImageError("corrupt", f"{self._name} ends before byte {at + count}")
        return data
