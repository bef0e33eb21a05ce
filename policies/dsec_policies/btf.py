"""Finds one type in the kernel's BTF (Documentation/bpf/btf.rst), which BPF LSM programs name their hook by. Pure."""

from __future__ import annotations

import struct

MAGIC = 0xEB9F
HEADER = struct.Struct("<HBBIIIII")
TYPE = struct.Struct("<III")
#: Bytes that follow struct btf_type: (fixed, for each of its vlen members), by BTF_KIND_ number.
TAILS = {
    1: (4, 0),
    3: (12, 0),
    4: (0, 12),
    5: (0, 12),
    6: (0, 8),
    13: (0, 8),
    14: (4, 0),
    15: (0, 12),
    17: (4, 0),
    19: (0, 12),
}
KIND_FUNC = 12


def type_id_of(btf: bytes, function: str) -> int:
    """Returns the id of ``function``; raises LookupError when this kernel doesn't have it, ValueError on other data."""
    magic, _, _, header_bytes, types_at, types_bytes, names_at, names_bytes = HEADER.unpack_from(btf)
    if magic != MAGIC:
        raise ValueError("this is no BTF")
    names = btf[header_bytes + names_at : header_bytes + names_at + names_bytes]
    wanted = names.find(b"\0" + function.encode() + b"\0") + 1
    if wanted == 0:
        raise LookupError(f"the kernel has no {function}")
    place, end, number = header_bytes + types_at, header_bytes + types_at + types_bytes, 1
    while place < end:
        name, info, _ = TYPE.unpack_from(btf, place)
        kind = info >> 24 & 0x1F
        if name == wanted and kind == KIND_FUNC:
            return number
        fixed, each = TAILS.get(kind, (0, 0))
        place += TYPE.size + fixed + each * (info & 0xFFFF)
        number += 1
    raise LookupError(f"the kernel has no function {function}")
