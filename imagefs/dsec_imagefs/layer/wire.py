"""Blocks on their way: each raw, or one zstd frame of its own, so that any block can be fetched and read alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zstandard

from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from dsec_imagefs.layer.index import Encoding, Index

ZSTD_LEVEL = 3


class BlockEncoder:
    """Encodes blocks; keeps one compression context. Not for use by two threads at once."""

    def __init__(self, encoding: Encoding) -> None:
        self._zstd = zstandard.ZstdCompressor(level=ZSTD_LEVEL) if encoding == "zstd" else None

    def encode(self, data: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
        """Wire bytes of one raw block; equal blocks give equal bytes."""
        return data if self._zstd is None else self._zstd.compress(data)


def decode_block(index: Index, number: int, wire: bytes | memoryview) -> bytes:
    """Raw bytes of a block from its wire bytes, with a bound on what they may unpack to; not yet verified.

    A block of zeros has no wire bytes: give ``b""``. Verify what comes back with `Index.verify`, or use `read_block`.

    Raises:
        ImageError: ``corrupt`` when the length is wrong or the frame is damaged.
    """
    _, _, length = index.block(number)
    wanted = index.raw_length(number)
    if len(wire) != length:
        raise ImageError("corrupt", f"block {number} came with {len(wire)} bytes and has {length} on the wire")
    if not length:
        return bytes(wanted)
    if index.encoding == "raw":
        return bytes(wire)
    try:
        if zstandard.frame_content_size(wire) != wanted:  # before unpacking: a small frame can claim gigabytes
            raise ImageError("corrupt", f"block {number} is a frame of another size than {wanted}")
        return zstandard.ZstdDecompressor().decompress(wire, max_output_size=wanted)
    except zstandard.ZstdError as err:
        raise ImageError("corrupt", f"block {number} can't be unpacked: {err}") from err


def read_block(index: Index, number: int, wire: bytes | memoryview) -> bytes:
    """Decode and verify: the right raw bytes, or ImageError ``corrupt``."""
    data = decode_block(index, number, wire)
    if not index.verify(number, data):
        raise ImageError("corrupt", f"block {number} does not match its digest")
    return data
