"""The 512-byte tar header block: fields, numbers, checksum, GNU sparse tables. Pure; see tar(5)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

RECORD = 512
_HEADER = struct.Struct("100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s155s12x")
assert _HEADER.size == RECORD
_SPARSE_PAIR = struct.Struct("12s12s")
ZERO_RECORD = bytes(RECORD)


class TarError(ValueError):
    """A header or map that can't be right; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """One header block, decoded. `name` and `link` are the raw bytes without padding."""

    name: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    type: bytes
    link: bytes
    device: tuple[int, int]


def parse_number(raw: bytes) -> int:
    """An octal field, or GNU's base-256 (also negative); an empty field is 0."""
    if raw[0] & 0x80:
        value = int.from_bytes(raw, "big")
        if raw[0] == 0xFF:
            return value - (1 << (8 * len(raw)))
        return value - (0x80 << (8 * (len(raw) - 1)))
    digits = raw.partition(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    try:
        return int(digits, 8)
    except ValueError as err:
        raise TarError(f"{digits!r} is no octal number") from err


def parse_header(block: bytes) -> Header:
    """Decode a header block; raises TarError when its checksum or a number is wrong."""
    fields = _HEADER.unpack(block)
    stored = parse_number(fields[6])
    unsigned = sum(block) - sum(block[148:156]) + 256
    if stored != unsigned:  # some old writers summed signed chars
        negative = sum(byte >= 0x80 for byte in block[:148] + block[156:])
        if stored != unsigned - 256 * negative:
            raise TarError("header checksum is wrong")
    name = fields[0].partition(b"\0")[0]
    if fields[9] == b"ustar\0" and (prefix := fields[15].partition(b"\0")[0]):
        name = prefix + b"/" + name
    kind = fields[7]
    has_device = kind in b"34" and fields[9].startswith(b"ustar")
    return Header(
        name=name, mode=parse_number(fields[1]) & 0o7777, uid=parse_number(fields[2]), gid=parse_number(fields[3]),
        size=parse_number(fields[4]), mtime=parse_number(fields[5]), type=kind,
        link=fields[8].partition(b"\0")[0],
        device=(parse_number(fields[13]), parse_number(fields[14])) if has_device else (0, 0),
    )  # fmt: skip


def parse_gnu_sparse(block: bytes, *, extension: bool) -> tuple[list[tuple[int, int]], bool]:
    """Pairs of a GNU ``S`` header (four of them) or of an extension block (21), and whether another block follows."""
    start, count, flag = (0, 21, 504) if extension else (386, 4, 482)
    pairs = []
    for index in range(count):
        offset, length = _SPARSE_PAIR.unpack_from(block, start + 24 * index)
        if not offset.strip(b"\0 ") and not length.strip(b"\0 "):
            break
        pairs.append((parse_number(offset), parse_number(length)))
    return pairs, block[flag] != 0


def gnu_real_size(block: bytes) -> int:
    """Length of the file that a GNU ``S`` header describes."""
    return parse_number(block[483:495])
