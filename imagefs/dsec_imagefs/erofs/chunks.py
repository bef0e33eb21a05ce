"""Which parts of a file with holes are kept: equal chunks, each whole or absent. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.erofs.ondisk import BLOCK_BITS, EROFS_CHUNK_FORMAT_BLKBITS_MASK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsec_imagefs.tree import Extent

MIN_HOLE_BYTES = 128 * 1024  # fewer zeros than this are written out: a chunk map would not pay
MAX_CHUNKS = 1 << 18  # a hole map of at most 1 MiB; larger files take larger chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """`present` says of each chunk of ``1 << bits`` bytes whether it holds data."""

    bits: int
    present: tuple[bool, ...]


def plan_chunks(size: int, extents: Sequence[Extent] | None) -> ChunkPlan | None:
    """Cut a file by its data runs; None when it is best kept in one piece. Raises ValueError above EROFS's limits."""
    if extents is None:
        return None
    bits = BLOCK_BITS
    while size >> bits >= MAX_CHUNKS:
        bits += 1
    if bits - BLOCK_BITS > EROFS_CHUNK_FORMAT_BLKBITS_MASK:
        raise ValueError(f"{size} bytes are more than a file can have")
    present = bytearray(-(-size >> bits))
    for offset, length in extents:
        if length:
            first, end = offset >> bits, ((offset + length - 1) >> bits) + 1
            present[first:end] = b"\1" * (end - first)
    if present.count(0) << bits < MIN_HOLE_BYTES:
        return None
    return ChunkPlan(bits=bits, present=tuple(map(bool, present)))
