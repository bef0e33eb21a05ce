"""Tar members as bytes, written by hand, so that tests can also make what no tar program would."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dsec_imagefs.blob import Blob

if TYPE_CHECKING:
    from collections.abc import Iterator

END = bytes(1024)


def _number(value: int, width: int) -> bytes:
    digits = b"%0*o" % (width - 1, value) if value >= 0 else b""
    if value >= 0 and len(digits) < width:
        return digits + b"\0"
    if value >= 0:
        return b"\x80" + value.to_bytes(width - 1, "big")
    return (value + (1 << (8 * width))).to_bytes(width, "big")


def header(
    name: bytes, kind: bytes = b"0", *, size: int = 0, mode: int = 0o644, uid: int = 0, gid: int = 0, mtime: int = 0,
    link: bytes = b"", device: tuple[int, int] = (0, 0), magic: bytes = b"ustar\x0000", tail: bytes = b"",
) -> bytes:  # fmt: skip
    """One header block. `tail` replaces the last 167 bytes from offset 345 (prefix, or GNU's sparse table)."""
    block = bytearray(512)
    for at, value in (
        (0, name[:100]), (100, _number(mode, 8)), (108, _number(uid, 8)), (116, _number(gid, 8)),
        (124, _number(size, 12)), (136, _number(mtime, 12)), (148, b" " * 8), (156, kind), (157, link[:100]),
        (257, magic), (329, _number(device[0], 8)), (337, _number(device[1], 8)), (345, tail[:167]),
    ):  # fmt: skip
        block[at : at + len(value)] = value
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    """A body, filled up to a whole record."""
    return data + bytes(-len(data) % 512)


def pax(records: list[tuple[bytes, bytes]], kind: bytes = b"x") -> bytes:
    """A PAX extension header with these records, in order."""
    body = b""
    for key, value in records:
        rest = b" " + key + b"=" + value + b"\n"
        length = len(rest) + 1
        while len(str(length)) + len(rest) != length:
            length += 1
        body += b"%d" % length + rest
    return header(b"PaxHeader", kind, size=len(body)) + padded(body)


def file(name: bytes, data: bytes = b"", **fields: object) -> bytes:
    """A regular file."""
    return header(name, size=len(data), **fields) + padded(data)  # type: ignore[arg-type]


def directory(name: bytes, mode: int = 0o755, **fields: object) -> bytes:
    """A directory."""
    return header(name, b"5", mode=mode, **fields)  # type: ignore[arg-type]


def symlink(name: bytes, target: bytes) -> bytes:
    """A symbolic link."""
    return header(name, b"2", mode=0o777, link=target)


def hardlink(name: bytes, target: bytes) -> bytes:
    """A hard link."""
    return header(name, b"1", link=target)


def gnu_sparse(name: bytes, pieces: list[tuple[int, bytes]], size: int) -> bytes:
    """An old GNU sparse member, extension blocks as needed."""
    pairs = [_number(at, 12) + _number(len(data), 12) for at, data in pieces]
    table = b"".join(pairs[:4]).ljust(96, b"\0") + (b"\1" if len(pairs) > 4 else b"\0") + _number(size, 12)
    body = b"".join(data for _, data in pieces)
    out = header(name, b"S", size=len(body), magic=b"ustar  \0", tail=bytes(41) + table)
    rest = pairs[4:]
    while rest:
        out += b"".join(rest[:21]).ljust(504, b"\0") + (b"\1" if len(rest) > 21 else b"\0") + bytes(7)
        rest = rest[21:]
    return out + padded(body)


def pax_sparse(name: bytes, pieces: list[tuple[int, bytes]], size: int, version: str = "1.0") -> bytes:
    """A GNU sparse member in PAX dress, versions 0.0, 0.1 and 1.0."""
    body = b"".join(data for _, data in pieces)
    flat = [number for at, data in pieces for number in (at, len(data))]
    if version == "1.0":
        table = padded(b"".join(b"%d\n" % number for number in (len(pieces), *flat)))
        records = [
            (b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.name", name),
            (b"GNU.sparse.realsize", b"%d" % size),
        ]  # fmt: skip
        stored = table + body
        return pax(records) + header(b"GNUSparseFile.0/" + name, size=len(stored)) + padded(stored)
    records = [(b"GNU.sparse.size", b"%d" % size), (b"GNU.sparse.numblocks", b"%d" % len(pieces))]
    if version == "0.1":
        records += [(b"GNU.sparse.name", name), (b"GNU.sparse.map", b",".join(b"%d" % n for n in flat))]
        return pax(records) + header(b"GNUSparseFile.0/" + name, size=len(body)) + padded(body)
    for at, data in pieces:
        records += [(b"GNU.sparse.offset", b"%d" % at), (b"GNU.sparse.numbytes", b"%d" % len(data))]
    return pax(records) + header(name, size=len(body)) + padded(body)


@contextmanager
def blob_of(data: bytes, name: str = "layer") -> Iterator[Blob]:
    """The bytes as an open blob, in memory."""
    fd = os.memfd_create("layer")
    try:
        os.write(fd, data) if data else None
        yield Blob(fd=fd, size=len(data), name=name)
    finally:
        os.close(fd)
