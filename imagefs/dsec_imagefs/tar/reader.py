"""Iterate the members of a tar blob: metadata and where each body is; bodies are not read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError, show_name
from dsec_imagefs.tar import pax
from dsec_imagefs.tar.header import (
    RECORD,
    ZERO_RECORD,
    Header,
    TarError,
    gnu_real_size,
    parse_gnu_sparse,
    parse_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsec_imagefs.blob import Blob
    from dsec_imagefs.tree import Extent

REG, LINK, SYM, CHR, BLK, DIR, FIFO = "file", "hard link", "symlink", "char device", "block device", "dir", "fifo"
_KINDS = {
    b"0": REG, b"\0": REG, b"7": REG, b"S": REG, b"1": LINK, b"2": SYM, b"3": CHR, b"4": BLK, b"5": DIR, b"D": DIR,
    b"6": FIFO,
}  # fmt: skip
_WITHOUT_BODY = (LINK, SYM, CHR, BLK, DIR, FIFO)  # some writers put a size there all the same
_MAX_EXTRA_BYTES = 16 << 20
_AHEAD_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member. Its body is at `offset` of the blob; with `extents`, only the data runs are there, end to end."""

    name: bytes
    kind: str
    mode: int
    uid: int
    gid: int
    mtime_s: int
    mtime_ns: int
    link: bytes
    device: tuple[int, int]
    size: int
    offset: int
    extents: tuple[Extent, ...] | None
    xattrs: dict[bytes, bytes]


def read_members(blob: Blob) -> Iterator[Member]:
    """Iterate members in order, later ones of a name override earlier ones.

    A blob of no bytes, and one without the closing zero blocks, are accepted; both exist in registries.

    Raises:
        ImageError: ``bad_image`` naming the blob and offset for anything damaged or cut short.
    """
    reader = _Reader(blob)
    try:
        yield from reader.members()
    except TarError as err:
        raise ImageError("bad_image", f"{blob.name} is damaged at byte {reader.at}: {err}", field="source") from err


@dataclass(slots=True)
class _Pending:
    """Extension headers seen since the last member."""

    name: bytes | None = None
    link: bytes | None = None
    records: pax.Records = field(default_factory=list)


class _Reader:
    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._ahead = b""
        self._ahead_at = 0
        self._global: dict[bytes, bytes] = {}
        self.at = 0

    def members(self) -> Iterator[Member]:
        pending = _Pending()
        while True:
            block = self._take(RECORD, at_end=b"")
            if not block:
                break
            if block == ZERO_RECORD:
                if self._take(RECORD, at_end=ZERO_RECORD) != ZERO_RECORD:
                    raise TarError("one zero block alone, with data after it")
                break
            header = parse_header(block)
            if header.size < 0:
                raise TarError("negative size")
            if header.type in b"xXgLK":
                self._extension(header, pending)
            elif header.type == b"V":  # a volume label says nothing about files
                self._skip(header.size)
            elif header.type in _KINDS:
                yield self._member(header, block, pending)
                pending = _Pending()
            else:
                raise TarError(f"{show_name(header.name)} is of unknown type {header.type!r}")
        if pending.name or pending.link or pending.records:
            raise TarError("the archive ends after an extension header")

    def _take(self, count: int, *, at_end: bytes | None = None) -> bytes:
        """The next bytes; `at_end` is what to return at the exact end of the blob."""
        start = self.at - self._ahead_at
        if not 0 <= start <= len(self._ahead) - count:
            self._ahead = self._blob.read(self.at, max(count, _AHEAD_BYTES))
            self._ahead_at, start = self.at, 0
        data = self._ahead[start : start + count]
        if len(data) < count:
            if not data and at_end is not None:
                return at_end
            raise TarError("it is cut short in a header")
        self.at += count
        return data

    def _skip(self, size: int) -> None:
        end = self.at + size
        if end > self._blob.size:
            raise TarError(f"it is cut short: a body ends at {end} and the archive at {self._blob.size}")
        # The last member's padding may be missing.
        self.at = min(end + -size % RECORD, self._blob.size)

    def _extension(self, header: Header, pending: _Pending) -> None:
        if header.size > _MAX_EXTRA_BYTES:
            raise TarError(f"an extension header of {header.size} bytes")
        start = self.at
        self._skip(header.size)
        data = self._blob.read(start, header.size)
        if header.type == b"L":
            pending.name = data.partition(b"\0")[0]
        elif header.type == b"K":
            pending.link = data.partition(b"\0")[0]
        elif header.type == b"g":
            for key, value in pax.parse_records(data):
                if value:
                    self._global[key] = value
                else:
                    self._global.pop(key, None)
        else:
            pending.records += pax.parse_records(data)

    def _member(self, header: Header, block: bytes, pending: _Pending) -> Member:
        records = [*self._global.items(), *pending.records] if self._global else pending.records
        table = {key: value for key, value in records if value}
        name = table.get(b"path", pending.name or header.name)
        kind = _KINDS[header.type]
        if kind == REG and header.type in b"0\0" and name.endswith(b"/"):
            kind = DIR
        size = stored = pax.parse_int(b"size", table[b"size"]) if b"size" in table else header.size
        extents: list[Extent] | None = None
        if header.type == b"S":
            extents, size = self._gnu_map(block), gnu_real_size(block)
        elif kind == REG and (extents := pax.sparse_extents(records)) is not None:
            real = table.get(b"GNU.sparse.size") or table.get(b"GNU.sparse.realsize")
            size = pax.parse_int(b"GNU.sparse.size", real) if real else size
        start = self.at
        if kind in _WITHOUT_BODY and header.type != b"D":
            size = stored = 0
        self._skip(stored)
        if kind == REG and table.get(b"GNU.sparse.major") == b"1":
            extents, skipped = self._pax_map(start, stored)
            size = pax.parse_int(b"GNU.sparse.realsize", table.get(b"GNU.sparse.realsize", b""))
            start, stored = start + skipped, stored - skipped
        seconds, nanos = pax.parse_time(table[b"mtime"]) if b"mtime" in table else (header.mtime, 0)
        return Member(
            name=table.get(b"GNU.sparse.name", name), kind=kind, mode=header.mode,
            uid=pax.parse_int(b"uid", table[b"uid"]) if b"uid" in table else header.uid,
            gid=pax.parse_int(b"gid", table[b"gid"]) if b"gid" in table else header.gid,
            mtime_s=seconds, mtime_ns=nanos, link=table.get(b"linkpath", pending.link or header.link),
            device=header.device, size=size if kind == REG else 0, offset=start,
            extents=None if extents is None else pax.check_extents(extents, size, stored),
            xattrs=pax.xattrs_of(records) if records else {},
        )  # fmt: skip

    def _gnu_map(self, block: bytes) -> list[Extent]:
        pairs, more = parse_gnu_sparse(block, extension=False)
        while more:
            further, more = parse_gnu_sparse(self._take(RECORD), extension=True)
            pairs += further
            if len(pairs) > pax.MAX_EXTENTS:
                raise TarError("a sparse map of too many pieces")
        return pairs

    def _pax_map(self, start: int, stored: int) -> tuple[list[Extent], int]:
        """GNU sparse 1.0: decimal lines at the head of the body, padded to a record; returns the bytes they take."""
        data = b""
        numbers: list[int] = []
        wanted = 1
        while len(numbers) < wanted:
            if len(data) >= stored:
                raise TarError("a sparse map longer than the body")
            data += self._blob.read(start + len(data), min(RECORD * 128, stored - len(data)))
            lines = data.split(b"\n")
            numbers = [pax.parse_int(b"sparse map", line) for line in lines[: min(wanted, len(lines) - 1)]]
            if wanted == 1 and numbers:
                if not 0 <= numbers[0] <= pax.MAX_EXTENTS:
                    raise TarError("a sparse map of too many pieces")
                wanted = 1 + 2 * numbers[0]
                numbers = [pax.parse_int(b"sparse map", line) for line in lines[: min(wanted, len(lines) - 1)]]
        used = sum(len(line) + 1 for line in data.split(b"\n", wanted)[:wanted])
        return list(zip(numbers[1::2], numbers[2::2], strict=True)), used + -used % RECORD
