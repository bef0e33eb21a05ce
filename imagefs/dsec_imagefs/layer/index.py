"""The block index of a blob: for each block its sha256 and where its bytes are on the wire. Pure; binary, fixed size.

Header of 32 bytes (magic, version, block_bytes, blob_size, encoding, count), then 44 bytes a block (sha256 of the raw
block, wire offset, wire length), all little-endian. A block of zeros has no wire bytes: its wire length is 0.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Sequence

Encoding = Literal["raw", "zstd"]
"""How wire bytes become raw ones: as they are, or one zstd frame a block."""

ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
MAGIC = b"dsec.idx"
VERSION = 1
DEFAULT_BLOCK_BYTES = 1 << 20
MIN_BLOCK_BYTES = 64 << 10
MAX_BLOCK_BYTES = 4 << 20
MAX_BLOB_BYTES = 1 << 44  # EROFS addresses 2^32 blocks of 4 KiB

_HEADER = struct.Struct("<8sIIQII")
_ENTRY = struct.Struct("<32sQI")
assert (_HEADER.size, _ENTRY.size) == (32, 44)

Block = tuple[bytes, int, int]
"""``(sha256 of the raw block, wire offset, wire length)``."""


def check_block_bytes(block_bytes: int) -> None:
    """Raise ImageError ``unsupported`` unless it is a power of two from 64 KiB to 4 MiB."""
    if not MIN_BLOCK_BYTES <= block_bytes <= MAX_BLOCK_BYTES or block_bytes & (block_bytes - 1):
        raise ImageError(
            "unsupported", f"blocks of {block_bytes} bytes", "a power of two from 65536 to 4194304", "block_bytes"
        )


def max_wire_length(raw_length: int) -> int:
    """The most bytes an honest encoding of a block takes: zstd's own bound and a frame header."""
    return raw_length + (raw_length >> 8) + 1024


@lru_cache(maxsize=64)
def zero_digest(length: int) -> bytes:
    """Sha256 of so many zeros."""
    return hashlib.sha256(bytes(length)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """A parsed index. Blocks are numbered from 0; all but the last have `block_bytes` bytes."""

    block_bytes: int
    blob_size: int
    encoding: Encoding
    table: bytes

    @classmethod
    def of(cls, blocks: Sequence[Block], *, block_bytes: int, blob_size: int, encoding: Encoding) -> Index:
        """Make an index from its blocks; checked as a read one is."""
        table = b"".join(_ENTRY.pack(*block) for block in blocks)
        head = _HEADER.pack(MAGIC, VERSION, block_bytes, blob_size, ENCODINGS.index(encoding), len(blocks))
        return cls.parse(head + table)

    @classmethod
    def parse(cls, raw: bytes) -> Index:
        """Read an index; raises ImageError ``corrupt`` (or ``unsupported`` for another version)."""
        if len(raw) < _HEADER.size or not raw.startswith(MAGIC):
            raise ImageError("corrupt", "this is no block index")
        _, version, block_bytes, blob_size, encoding, count = _HEADER.unpack_from(raw)
        if version != VERSION or encoding >= len(ENCODINGS):
            raise ImageError("unsupported", f"a block index of version {version}, encoding {encoding}")
        check_block_bytes(block_bytes)
        if blob_size > MAX_BLOB_BYTES or count != -(-blob_size // block_bytes):
            raise ImageError("corrupt", f"a block index of {count} blocks for {blob_size} bytes")
        if len(raw) != _HEADER.size + count * _ENTRY.size:
            raise ImageError("corrupt", f"a block index of {len(raw)} bytes with {count} blocks")
        index = cls(
            block_bytes=block_bytes, blob_size=blob_size, encoding=ENCODINGS[encoding], table=raw[_HEADER.size :]
        )  # fmt: skip
        index._check()
        return index

    def _check(self) -> None:
        at = 0
        for number, (digest, offset, length) in enumerate(_ENTRY.iter_unpack(self.table)):
            raw_length = self.raw_length(number)
            if self.encoding == "raw":
                right = offset == number * self.block_bytes and length in (0, raw_length)
            else:
                right = offset == at and length <= max_wire_length(raw_length)
                at += length
            if not right or (not length and digest != zero_digest(raw_length)):
                raise ImageError("corrupt", f"block {number} of an index is at {offset}+{length}, which can't be")

    def render(self) -> bytes:
        """The bytes `parse` reads."""
        encoding = ENCODINGS.index(self.encoding)
        return _HEADER.pack(MAGIC, VERSION, self.block_bytes, self.blob_size, encoding, self.count) + self.table

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.table) // _ENTRY.size

    @property
    def wire_size(self) -> int:
        """Length of the wire blob."""
        if self.encoding == "raw":
            return self.blob_size
        return sum(length for _, _, length in _ENTRY.iter_unpack(self.table))

    def block_of(self, offset: int) -> int:
        """The number of the block that holds a byte of the blob."""
        if not 0 <= offset < self.blob_size:
            raise ValueError(f"byte {offset} of a blob of {self.blob_size}")
        return offset // self.block_bytes

    def raw_length(self, number: int) -> int:
        """Bytes of a block; the last may be shorter."""
        return min(self.block_bytes, self.blob_size - number * self.block_bytes)

    def block(self, number: int) -> Block:
        """Digest, wire offset and wire length of a block."""
        if not 0 <= number < self.count:
            raise ValueError(f"block {number} of {self.count}")
        digest, offset, length = _ENTRY.unpack_from(self.table, number * _ENTRY.size)
        return digest, offset, length

    def digest(self, number: int) -> bytes:
        """Sha256 of a raw block, 32 bytes."""
        return self.block(number)[0]

    def is_zero(self, number: int) -> bool:
        """Whether a block is all zeros, so that nothing is to be fetched."""
        return self.block(number)[2] == 0

    def verify(self, number: int, data: bytes | bytearray | memoryview) -> bool:
        """Whether these are the raw bytes of a block: length and digest."""
        return len(data) == self.raw_length(number) and hashlib.sha256(data).digest() == self.digest(number)
