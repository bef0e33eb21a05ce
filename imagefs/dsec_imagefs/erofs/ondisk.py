"""EROFS on-disk structures and constants, named as in Linux ``fs/erofs/erofs_fs.h``; pure byte work.

Only what an uncompressed image needs: extended inodes, flat and chunk-based data, xattrs, the device table.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

BLOCK_BITS = 12
BLOCK = 1 << BLOCK_BITS

EROFS_SUPER_OFFSET = 1024
EROFS_SUPER_MAGIC_V1 = 0xE0F5E1E2
EROFS_FEATURE_COMPAT_SB_CHKSUM = 0x1
EROFS_FEATURE_COMPAT_MTIME = 0x2
EROFS_FEATURE_INCOMPAT_CHUNKED_FILE = 0x4
EROFS_FEATURE_INCOMPAT_DEVICE_TABLE = 0x8

EROFS_INODE_FLAT_PLAIN = 0
EROFS_INODE_FLAT_INLINE = 2
EROFS_INODE_CHUNK_BASED = 4
EROFS_CHUNK_FORMAT_BLKBITS_MASK = 0x1F
EROFS_CHUNK_FORMAT_INDEXES = 0x20
EROFS_NULL_ADDR = 0xFFFFFFFF

EROFS_NAME_LEN = 255
MAX_BLOCKS = EROFS_NULL_ADDR - 1  # block addresses are 32 bits and the highest means "hole"

SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB3sIQ8s")
assert SUPER.size == 128  # struct erofs_super_block
INODE_EXTENDED = struct.Struct("<HHHHQIIIIQII16s")
assert INODE_EXTENDED.size == 64  # struct erofs_inode_extended
INODE_COMPACT = struct.Struct("<HHHHIIIIHHI")
assert INODE_COMPACT.size == 32  # struct erofs_inode_compact
DIRENT = struct.Struct("<QHBB")
assert DIRENT.size == 12  # struct erofs_dirent
DEVICE_SLOT = struct.Struct("<64sII56s")
assert DEVICE_SLOT.size == 128  # struct erofs_deviceslot
XATTR_IBODY = struct.Struct("<IB7s")
assert XATTR_IBODY.size == 12  # struct erofs_xattr_ibody_header
XATTR_ENTRY = struct.Struct("<BBH")
assert XATTR_ENTRY.size == 4  # struct erofs_xattr_entry
SLOT = 32  # an inode number counts slots of this many bytes

_CRC32C_POLY = 0x82F63B78


def _crc32c_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_CRC32C_POLY if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _crc32c_table()


def crc32c_raw(data: bytes, seed: int = 0xFFFFFFFF) -> int:
    """CRC-32C without the final inversion, as the kernel's ``crc32c(seed, ...)`` computes it."""
    crc = seed
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperBlock:
    """The fields of the superblock that this package sets or reads."""

    root_nid: int
    inodes: int
    blocks: int
    uuid: bytes
    meta_blkaddr: int = 0
    xattr_blkaddr: int = 0
    feature_compat: int = EROFS_FEATURE_COMPAT_SB_CHKSUM | EROFS_FEATURE_COMPAT_MTIME
    feature_incompat: int = EROFS_FEATURE_INCOMPAT_CHUNKED_FILE
    block_bits: int = BLOCK_BITS
    checksum: int = 0
    epoch_s: int = 0
    epoch_ns: int = 0
    extra_devices: int = 0
    devt_slotoff: int = 0


def pack_super(sb: SuperBlock) -> bytes:
    """128 bytes for offset 1024; the checksum is filled in by `seal_first_block`."""
    return SUPER.pack(
        EROFS_SUPER_MAGIC_V1, sb.checksum, sb.feature_compat, sb.block_bits, 0, sb.root_nid, sb.inodes,
        sb.epoch_s, sb.epoch_ns, sb.blocks, sb.meta_blkaddr, sb.xattr_blkaddr, sb.uuid, bytes(16),
        sb.feature_incompat, 0, sb.extra_devices, sb.devt_slotoff, 0, 0, 0, 0, 0, bytes(3), 0, 0, bytes(8),
    )  # fmt: skip


def unpack_super(raw: bytes) -> SuperBlock | None:
    """Read 128 bytes of offset 1024; None when the magic is another's."""
    f = SUPER.unpack(raw)
    if f[0] != EROFS_SUPER_MAGIC_V1:
        return None
    return SuperBlock(
        checksum=f[1], feature_compat=f[2], block_bits=f[3], root_nid=f[5], inodes=f[6], epoch_s=f[7],
        epoch_ns=f[8], blocks=f[9], meta_blkaddr=f[10], xattr_blkaddr=f[11], uuid=f[12], feature_incompat=f[14],
        extra_devices=f[16], devt_slotoff=f[17],
    )  # fmt: skip


def first_block_checksum(block: bytes) -> int:
    """Checksum of a first block (4096 bytes), its checksum field taken as zero."""
    covered = bytearray(block[EROFS_SUPER_OFFSET:])
    covered[4:8] = bytes(4)
    return crc32c_raw(bytes(covered))


def seal_first_block(block: bytearray) -> None:
    """Write the checksum into a first block in place."""
    struct.pack_into("<I", block, EROFS_SUPER_OFFSET + 4, first_block_checksum(bytes(block)))


def encode_device(major: int, minor: int) -> int:
    """The kernel's ``new_encode_dev``: 12 bits of major, 20 of minor."""
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def decode_device(value: int) -> tuple[int, int]:
    """Major and minor out of ``new_encode_dev``."""
    return (value >> 8) & 0xFFF, (value & 0xFF) | ((value >> 12) & 0xFFF00)


def blocks_of(size: int) -> int:
    """Blocks that hold `size` bytes."""
    return (size + BLOCK - 1) >> BLOCK_BITS
