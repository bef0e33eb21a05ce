"""The directory block codec: sorted entries cut into 4 KiB blocks, each a small table followed by its names."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from dsec_imagefs.erofs.ondisk import BLOCK, DIRENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FILE_TYPES = {
    stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFCHR: 3, stat.S_IFBLK: 4,
    stat.S_IFIFO: 5, stat.S_IFSOCK: 6, stat.S_IFLNK: 7,
}  # fmt: skip

Entry = tuple[bytes, int, int]
"""``(name, inode number, file type)``."""


def cut_blocks(names: Sequence[bytes]) -> list[tuple[int, int, int]]:
    """Cut sorted names (``.`` and ``..`` among them) into blocks: ``(first, last + 1, used bytes)`` each.

    The kernel searches by unsigned byte order over all blocks, so the caller must sort with Python's bytes order.
    """
    blocks: list[tuple[int, int, int]] = []
    first, used = 0, 0
    for index, name in enumerate(names):
        need = DIRENT.size + len(name)
        if used + need > BLOCK:
            blocks.append((first, index, used))
            first, used = index, 0
        used += need
    blocks.append((first, len(names), used))
    return blocks


def pack_block(entries: Sequence[Entry]) -> bytes:
    """One block's used bytes; the caller pads all blocks but an inline tail with zeros."""
    offset = DIRENT.size * len(entries)
    table = bytearray()
    for name, nid, kind in entries:
        table += DIRENT.pack(nid, offset, kind, 0)
        offset += len(name)
    return bytes(table) + b"".join(name for name, _, _ in entries)


def unpack_block(raw: bytes) -> Iterator[Entry]:
    """Entries of one block or tail; raises ValueError on offsets that cannot be."""
    if len(raw) < DIRENT.size:
        raise ValueError("directory block is shorter than one entry")
    first_name = DIRENT.unpack_from(raw)[1]
    if first_name % DIRENT.size or not DIRENT.size <= first_name <= len(raw):
        raise ValueError(f"first name offset {first_name} is not the end of a table")
    offsets = [DIRENT.unpack_from(raw, at) for at in range(0, first_name, DIRENT.size)]
    for index, (nid, start, kind, _) in enumerate(offsets):
        end = offsets[index + 1][1] if index + 1 < len(offsets) else len(raw)
        if not first_name <= start < end <= len(raw):
            raise ValueError(f"name offsets {start}..{end} are out of order")
        name = raw[start:end]
        yield (name if index + 1 < len(offsets) else name.rstrip(b"\0")), nid, kind
