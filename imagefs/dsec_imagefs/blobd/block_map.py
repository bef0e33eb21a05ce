"""The record of which blocks of a sparse file are right: what it promises, and its bytes. Pure.

A set bit says: this block was verified, and its data was on disk (fdatasync) before the bit was written. A bit is
cleared before its block is punched out. So within one boot set bits can be believed after a worker's death at any
instant. After another boot nothing is believed: blocks are *suspect* and hashed before use. Data without a bit, which
a killed worker left, is suspect too. Presence is never told from holes alone. A map is overwritten in place, which
needs no room on a full disk; one that is torn does not match its own sum, and then everything is suspect.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MAGIC = b"dsec.map"
VERSION = 1
_HEADER = Struct("=8sII32s36sI")  # magic, version, block_bytes, blob digest, boot id, count
_SUM_BYTES = 32

ABSENT, SUSPECT, TRUSTED = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MapKey:
    """What a map belongs to; a map of anything else is not believed."""

    blob: bytes
    block_bytes: int
    count: int


def render_map(key: MapKey, boot_id: str, present: Iterable[int]) -> bytes:
    """A map's file.

    Args:
        key: the blob.
        boot_id: of the running kernel, 36 characters.
        present: block numbers that are verified and on disk.
    """
    bits = bytearray(-(-key.count // 8))
    for number in present:
        bits[number >> 3] |= 1 << (number & 7)
    body = _HEADER.pack(MAGIC, VERSION, key.block_bytes, key.blob, boot_id.encode()[:36], key.count) + bits
    return body + hashlib.sha256(body).digest()


def parse_map(raw: bytes, key: MapKey, boot_id: str) -> bytearray:
    """The state of each block, one byte a block: TRUSTED, SUSPECT or ABSENT.

    A map that is torn, foreign or of another format gives nothing but ABSENT: its blocks will be hashed or fetched.
    """
    states = bytearray(key.count)
    body = raw[:-_SUM_BYTES]
    if len(raw) != _HEADER.size + -(-key.count // 8) + _SUM_BYTES or hashlib.sha256(body).digest() != raw[-_SUM_BYTES:]:
        return states
    magic, version, block_bytes, blob, boot, count = _HEADER.unpack_from(body)
    if (magic, version, blob, block_bytes, count) != (MAGIC, VERSION, key.blob, key.block_bytes, key.count):
        return states
    state = TRUSTED if boot == boot_id.encode()[:36] else SUSPECT
    bits = body[_HEADER.size :]
    for number in range(count):
        if bits[number >> 3] >> (number & 7) & 1:
            states[number] = state
    return states
