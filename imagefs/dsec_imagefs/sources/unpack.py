"""Bring a layer to uncompressed, seekable, verified bytes: in place when it is a plain tar, else in scratch space.

The scratch file has no name (O_TMPFILE), so no crash can leave it behind.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from typing import TYPE_CHECKING, Protocol

import zstandard

from dsec_imagefs.blob import Blob
from dsec_imagefs.errors import ImageError, failed_write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import ExitStack

    from dsec_imagefs.sources.base import Work

CHUNK_BYTES = 1 << 20
MAX_WINDOW_BYTES = 1 << 27  # zstd's own limit unless told --long
_ZSTD_SLICE = 1024  # input per call; four bytes can mean 128 KiB, and the call returns all of it at once
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = (0x184D2A50, 0x184D2A5F)  # zstd frames that say nothing, which zstd:chunked and seekable files have
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x04\x22\x4d\x18": "lz4"}


class _Decoder(Protocol):
    def feed(self, data: bytes) -> Iterator[bytes]: ...

    def finish(self) -> None: ...


class _Gzip:
    """Members one after another (gzip(1)); zero padding after the last is allowed, anything else is damage."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=31)
        self._began = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        while True:
            if not self._began:
                data = data.lstrip(b"\0")
                if not data:
                    return
                self._began = True
            plain = self._inflate.decompress(data, CHUNK_BYTES)
            yield plain
            data = self._inflate.unconsumed_tail
            if self._inflate.eof:
                data = self._inflate.unused_data
                self._inflate = zlib.decompressobj(wbits=31)
                self._began = False
            elif not data and len(plain) < CHUNK_BYTES:  # a full piece may have more behind it, without more input
                return

    def finish(self) -> None:
        if self._began:
            raise ValueError("the gzip stream is cut short")


class _Zstd:
    """Frames one after another, skippable ones among them."""

    def __init__(self) -> None:
        self._context = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._inflate = self._context.decompressobj()
        self._head = b""
        self._skip = 0
        self._began = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        for at in range(0, len(data), _ZSTD_SLICE):
            yield from self._feed(data[at : at + _ZSTD_SLICE])

    def _feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._skip:
                cut = min(self._skip, len(data))
                self._skip -= cut
                data = data[cut:]
                continue
            if not self._began:
                self._head += data
                data = b""
                if len(self._head) < 8:
                    return
                head, self._head = self._head, b""
                if _SKIPPABLE[0] <= int.from_bytes(head[:4], "little") <= _SKIPPABLE[1]:
                    self._skip = int.from_bytes(head[4:8], "little")
                    data = head[8:]
                    continue
                data = head
                self._began = True
            yield self._inflate.decompress(data)
            data = b""
            if self._inflate.eof:
                data = self._inflate.unused_data
                self._inflate = self._context.decompressobj()
                self._began = False

    def finish(self) -> None:
        if self._began or self._skip or self._head:
            raise ValueError("the zstd stream is cut short")


def unpack_layer(
    blob: Blob, work: Work, stack: ExitStack, *, digest: str = "", diff_id: str = "", before: int = 0, total: int = 0
) -> Blob:
    """Give back the layer uncompressed; descriptors it opens are closed by `stack`.

    Args:
        blob: the layer as stored.
        work: scratch space, limits, progress.
        stack: lives as long as the layer's contents are needed.
        digest: what the stored bytes must hash to (``sha256:...``), or "" to trust them.
        diff_id: what the uncompressed bytes must hash to, or "".
        before: bytes of earlier layers, for the progress report.
        total: bytes of all layers, or 0 to report this one alone.

    Raises:
        ImageError: ``bad_image`` for damage or a wrong digest, ``unsupported`` for another compression.
    """
    head = blob.read(0, 16)
    decoder: _Decoder | None = None
    if head.startswith(_GZIP):
        decoder = _Gzip()
    elif head.startswith(_ZSTD) or _SKIPPABLE[0] <= int.from_bytes(head[:4], "little") <= _SKIPPABLE[1]:
        decoder = _Zstd()
    else:
        for magic, kind in _OTHERS.items():
            if head.startswith(magic):
                raise ImageError("unsupported", f"{blob.name} is compressed by {kind}", "gzip, zstd or plain", "source")
    same = decoder is None and digest == diff_id  # a plain tar stored as it is: one hash says both
    stored, plain = _Check(digest), _Check("" if same else diff_id)

    def report(done: int) -> None:
        work.progress("unpack", before + done, total or blob.size)

    if decoder is None:
        if stored.wanted or plain.wanted:
            for piece in _pieces(blob, report):
                stored.update(piece)
                plain.update(piece)
        result = blob
    else:
        result = _inflate(blob, decoder, work, stack, (stored, plain), report)
    stored.finish(f"{blob.name} (as stored)")
    plain.finish(f"{blob.name} (uncompressed)")
    return result


def _inflate(
    blob: Blob,
    decoder: _Decoder,
    work: Work,
    stack: ExitStack,
    checks: tuple[_Check, _Check],
    report: Callable[[int], None],
) -> Blob:
    fd = os.open(work.tmp, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, fd)
    size = 0
    try:
        for piece in _pieces(blob, report):
            checks[0].update(piece)
            for plain in decoder.feed(piece):
                checks[1].update(plain)
                size += len(plain)
                if size > work.limits.max_unpacked_bytes:
                    limit = work.limits.max_unpacked_bytes
                    raise ImageError("too_large", f"{blob.name} unpacks to more than {limit} bytes", field="source")
                _write(fd, plain)
        decoder.finish()
    except (zlib.error, zstandard.ZstdError, ValueError) as err:
        raise ImageError("bad_image", f"{blob.name} can't be decompressed: {err}", field="source") from err
    return Blob(fd=fd, size=size, name=blob.name)


def _pieces(blob: Blob, report: Callable[[int], None]) -> Iterator[bytes]:
    at = 0
    while piece := blob.read(at, CHUNK_BYTES):
        at += len(piece)
        yield piece
        report(at)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except OSError as err:
            raise failed_write(err, "unpacking a layer") from err


class _Check:
    """A running digest, when one is wanted."""

    def __init__(self, wanted: str) -> None:
        algorithm, _, self.wanted = wanted.rpartition(":")
        if wanted and algorithm not in ("sha256", "sha512"):
            raise ImageError("unsupported", f"digest algorithm {algorithm!r}", "sha256 or sha512", "source")
        self._hash = hashlib.new(algorithm) if wanted else None

    def update(self, data: bytes) -> None:
        """Hash some more."""
        if self._hash is not None:
            self._hash.update(data)

    def finish(self, what: str) -> None:
        """Compare."""
        if self._hash is not None and self._hash.hexdigest() != self.wanted:
            raise ImageError("bad_image", f"{what} does not match its digest", "fetch the image again", "source")
