"""The xattr codec: prefix numbers, the 12-byte body header, 4-byte aligned entries, and the area of shared ones."""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING

from dsec_imagefs.erofs.ondisk import XATTR_ENTRY, XATTR_IBODY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Shared = dict[tuple[bytes, bytes], int]
"""``(name, value)`` -> id in the shared area."""

PREFIXES: tuple[tuple[bytes, int], ...] = (
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"user.", 1),
    (b"trusted.", 4),
    (b"security.", 6),
)
_NAMES = {index: prefix for prefix, index in PREFIXES}
_EXACT = (2, 3)  # the ACLs are whole names; nothing may follow

MAX_VALUE = 0xFFFF  # e_value_size is 16 bits
MAX_SHARED = 0xFF  # h_shared_count is 8 bits
MAX_BODY = 4 * (0xFFFF - 1) + XATTR_IBODY.size  # i_xattr_icount is 16 bits


def split_name(name: bytes) -> tuple[int, bytes] | None:
    """Prefix number and rest, or None when EROFS has no number for this namespace."""
    for prefix, index in PREFIXES:
        if name == prefix if index in _EXACT else name.startswith(prefix):
            rest = name[len(prefix) :]
            return (index, rest) if len(rest) <= 255 and (rest or index in _EXACT) else None
    return None


def check_xattrs(xattrs: Mapping[bytes, bytes]) -> None:
    """Raise ValueError for a name or value the format can't hold."""
    for name, value in xattrs.items():
        if len(value) > MAX_VALUE:
            raise ValueError(f"its value has {len(value)} bytes and EROFS holds {MAX_VALUE}")
        if split_name(name) is None:
            raise ValueError("EROFS has no number for its namespace")


def pack_entry(name: bytes, value: bytes) -> bytes:
    """One aligned entry; name and value must have passed `check_xattrs`."""
    found = split_name(name)
    assert found is not None
    index, rest = found
    raw = XATTR_ENTRY.pack(len(rest), index, len(value)) + rest + value
    return raw + bytes(-len(raw) % 4)


def plan_shared(all_xattrs: Iterable[Mapping[bytes, bytes]]) -> tuple[bytes, Shared]:
    """The area of entries that two or more inodes have, and where in it each is: an id counts 4-byte units."""
    counts = Counter(pair for xattrs in all_xattrs for pair in xattrs.items())
    area = bytearray()
    ids: Shared = {}
    for pair in sorted(pair for pair, count in counts.items() if count > 1):
        ids[pair] = len(area) // 4
        area += pack_entry(*pair)
    return bytes(area), ids


def pack_body(xattrs: Mapping[bytes, bytes], shared: Shared | None = None) -> bytes:
    """Header, ids of shared entries, then the others in name order; b"" for none. See `check_xattrs`.

    Raises ValueError when the whole is larger than the format's 16-bit count can say.
    """
    if not xattrs:
        return b""
    apart = sorted(pair for pair in xattrs.items() if shared and pair in shared)
    if len(apart) > MAX_SHARED:  # the longest gain most
        apart = sorted(sorted(apart, key=lambda pair: -len(pair[0]) - len(pair[1]))[:MAX_SHARED])
    ids = [shared[pair] for pair in apart] if shared else []
    inline = b"".join(pack_entry(*pair) for pair in sorted(xattrs.items() - set(apart)))
    body = XATTR_IBODY.pack(0, len(ids), bytes(7)) + struct.pack(f"<{len(ids)}I", *ids) + inline
    if len(body) > MAX_BODY:
        raise ValueError(f"all together take {len(body)} bytes and EROFS holds {MAX_BODY}")
    return body


def body_size(icount: int) -> int:
    """Bytes of the body that ``i_xattr_icount`` announces."""
    return XATTR_IBODY.size + 4 * (icount - 1) if icount else 0


def icount_of(body: bytes) -> int:
    """``i_xattr_icount`` for a packed body."""
    return (len(body) - XATTR_IBODY.size) // 4 + 1 if body else 0


def shared_ids(body: bytes) -> tuple[int, ...]:
    """Ids of shared xattrs that a body refers to; raises ValueError when it ends before them."""
    count = XATTR_IBODY.unpack_from(body)[1] if body else 0
    if XATTR_IBODY.size + 4 * count > len(body) > 0:
        raise ValueError(f"{count} shared attributes do not fit {len(body)} bytes")
    return tuple(int.from_bytes(body[12 + 4 * i : 16 + 4 * i], "little") for i in range(count))


def unpack_entry(raw: bytes, at: int) -> tuple[bytes, bytes, int]:
    """Name, value and the offset after one entry; raises ValueError when it runs out of bounds."""
    name_len, index, value_len = XATTR_ENTRY.unpack_from(raw, at)
    start = at + XATTR_ENTRY.size
    end = start + name_len + value_len
    if end > len(raw) or index not in _NAMES:
        raise ValueError(f"xattr entry at {at} is out of bounds or of an unknown namespace")
    return _NAMES[index] + raw[start : start + name_len], raw[start + name_len : end], end + (-end % 4)


def unpack_body(body: bytes) -> dict[bytes, bytes]:
    """The inline entries of a body; shared ones are the reader's to look up."""
    found: dict[bytes, bytes] = {}
    at = XATTR_IBODY.size + 4 * len(shared_ids(body))
    while body and at + XATTR_ENTRY.size <= len(body):
        name, value, at = unpack_entry(body, at)
        found[name] = value
    return found
