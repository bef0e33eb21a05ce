"""PAX extended headers: records, exact times, xattrs in both spellings, three sparse forms. Pure; see pax(1)."""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from dsec_imagefs.tar.header import TarError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsec_imagefs.tree import Extent

Records = list[tuple[bytes, bytes]]
MAX_EXTENTS = 1 << 20
_TIME = re.compile(rb"([+-]?)(\d*)(?:\.(\d*))?")


def parse_records(data: bytes) -> Records:
    r"""``<length> <key>=<value>\\n`` in order; keys may repeat (sparse 0.0). Raises TarError on a wrong length."""
    records: Records = []
    at = 0
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + 20)
        digits = data[at:space] if space > at else b""
        if not digits.isdigit():
            raise TarError("a PAX record has no length")
        end = at + int(digits)
        if end > len(data) or end <= space + 1 or data[end - 1] != 0x0A:
            raise TarError("a PAX record's length is wrong")
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not equals or not key:
            raise TarError("a PAX record has no key")
        records.append((key, value))
        at = end
    return records


def parse_int(key: bytes, value: bytes) -> int:
    """A decimal number of a record."""
    if not value.removeprefix(b"-").isdigit():
        raise TarError(f"PAX {key.decode(errors='replace')} is no number: {value[:40]!r}")
    return int(value)


def parse_time(value: bytes) -> tuple[int, int]:
    """``-1.25`` -> ``(-2, 750000000)``: floor seconds and nanoseconds, exact, further digits dropped."""
    match = _TIME.fullmatch(value)
    whole, fraction = (match[2], match[3] or b"") if match else (b"", b"")
    if match is None or not whole + fraction:
        raise TarError(f"PAX mtime is no time: {value[:40]!r}")
    nanos = int(whole or b"0") * 10**9 + int(fraction[:9].ljust(9, b"0"))
    return divmod(-nanos if match[1] == b"-" else nanos, 10**9)


def xattrs_of(records: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Extended attributes of SCHILY (raw), LIBARCHIVE (base64) and RHT records; the raw spelling wins."""
    raw: dict[bytes, bytes] = {}
    other: dict[bytes, bytes] = {}
    for key, value in records:
        if key.startswith(b"SCHILY.xattr."):
            raw[key[13:]] = value
        elif key.startswith(b"LIBARCHIVE.xattr."):
            try:
                other[unquote_to_bytes(key[17:])] = base64.b64decode(value + b"=" * (-len(value) % 4))
            except binascii.Error as err:
                raise TarError("a LIBARCHIVE.xattr value is no base64") from err
        elif key == b"RHT.security.selinux":
            other[b"security.selinux"] = value
    return other | raw


def sparse_extents(records: Records) -> list[Extent] | None:
    """The map of a GNU sparse 0.0 or 0.1 member; None for others (1.0 keeps its map in the data)."""
    table = dict(records)
    if b"GNU.sparse.map" in table:
        flat = table[b"GNU.sparse.map"].split(b",") if table[b"GNU.sparse.map"] else []
        numbers = [parse_int(b"GNU.sparse.map", part) for part in flat]
    elif b"GNU.sparse.numblocks" in table or b"GNU.sparse.offset" in table:
        wanted = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
        numbers = [parse_int(key, value) for key, value in records if key in wanted]
    else:
        return None
    if len(numbers) % 2:
        raise TarError("a sparse map has an odd count of numbers")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def check_extents(extents: Sequence[Extent], size: int, stored: int) -> tuple[Extent, ...]:
    """Refuse maps that overlap, run backwards, or say more than is stored; empty runs are dropped."""
    at = total = 0
    for offset, length in extents:
        if offset < at or length < 0 or offset + length > size:
            raise TarError(f"sparse map entry {offset}+{length} is out of order or beyond the size {size}")
        at = offset + length
        total += length
    if total > stored:
        raise TarError(f"sparse map speaks of {total} bytes and {stored} are stored")
    return tuple(extent for extent in extents if extent[1])
