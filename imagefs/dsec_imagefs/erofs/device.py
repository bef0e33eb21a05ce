"""The device table: where an image's data is when it lies outside the image. Pure.

All devices share one 32-bit space of 4 KiB blocks with the image itself: `uniaddr` is where a device starts in it. So
the same metadata works with one ``device=`` a blob, and over one file that holds image and blobs end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.erofs.ondisk import DEVICE_SLOT, EROFS_SUPER_OFFSET, SUPER

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FLAT_BLOCKS = 512  # devices start on 2 MiB, so that a guest may map them by huge pages
TABLE_AT = EROFS_SUPER_OFFSET + SUPER.size
SLOT_OFFSET = TABLE_AT // DEVICE_SLOT.size
assert TABLE_AT % DEVICE_SLOT.size == 0
MAX_DEVICES = 8192  # the root's inode number has 16 bits, and the inodes come after the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One slot. `blob` is the sha256 of the device's bytes in hex; `blocks` its length, `uniaddr` its start."""

    blob: str
    blocks: int
    uniaddr: int


def place_devices(blobs: Sequence[tuple[str, int]], first: int) -> tuple[Device, ...]:
    """Give ``(digest, blocks)`` pairs their places after block `first`, each aligned to 2 MiB."""
    placed = []
    for blob, blocks in blobs:
        first += -first % FLAT_BLOCKS
        placed.append(Device(blob=blob, blocks=blocks, uniaddr=first))
        first += blocks
    return tuple(placed)


def pack_devices(devices: Iterable[Device]) -> bytes:
    """The table's bytes, for offset `TABLE_AT` of an image."""
    return b"".join(DEVICE_SLOT.pack(one.blob.encode("ascii"), one.blocks, one.uniaddr, bytes(56)) for one in devices)


def unpack_devices(raw: bytes) -> tuple[Device, ...]:
    """Read a table; a tag that is no text comes out escaped, for the caller to refuse."""
    return tuple(
        Device(blob=tag.rstrip(b"\0").decode("ascii", "backslashreplace"), blocks=blocks, uniaddr=uniaddr)
        for tag, blocks, uniaddr, _ in DEVICE_SLOT.iter_unpack(raw)
    )
