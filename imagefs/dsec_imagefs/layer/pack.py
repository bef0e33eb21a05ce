"""Write a blob in one pass: files one after another on 4 KiB boundaries, hashed whole and by blocks on the way.

Writing and the blob's own hash run in one thread, block hashes and compression in another, beside the reading: hashlib,
zstd and the kernel work without Python's lock, so a second core is used where there is one. The disk is kept busy from
the first buffer on, and the last sync runs beside the planning of the metadata.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsec_imagefs.erofs.chunks import plan_chunks
from dsec_imagefs.erofs.ondisk import BLOCK, BLOCK_BITS
from dsec_imagefs.errors import ImageError, failed_write
from dsec_imagefs.layer.index import Block, Encoding, Index, zero_digest
from dsec_imagefs.layer.manifest import Part, Wire
from dsec_imagefs.layer.wire import BlockEncoder
from dsec_imagefs.syscalls import start_writeback
from dsec_imagefs.tree import HOLE, Content, StoredContent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

BUFFER_BYTES = 4 << 20  # a whole number of the largest blocks
_BUFFERS = 3
_MAX_CHUNKS = 1 << 25  # of all files with holes in a layer: 128 MiB of maps, which no honest layer has


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A finished blob: its identity, its index and what lies on the wire."""

    blob: Part
    wire: Wire
    index: Index


class BlobWriter:
    """A context that owns the unnamed files of a blob: `add` files, `finish` to know it, `publish` to keep it."""

    def __init__(
        self, out_dir: Path, *, block_bytes: int, encoding: Encoding, progress: Callable[[int], None]
    ) -> None:  # fmt: skip
        self._out_dir = out_dir
        self._block_bytes = block_bytes
        self._encoding = encoding
        self._progress = progress
        self._stack = ExitStack()
        self._buffers = [memoryview(bytearray(BUFFER_BYTES)) for _ in range(_BUFFERS)]
        self._busy: list[tuple[Future[None], ...]] = [()] * _BUFFERS
        self._turn = 0
        self._used = 0
        self._flushed = 0
        self._chunks = 0
        self._hash = hashlib.sha256()
        self._wire_hash = hashlib.sha256()
        self._wire_size = 0
        self._blocks: list[Block] = []
        self._encoder = BlockEncoder(encoding)
        self._synced: list[Future[None]] = []

    def __enter__(self) -> BlobWriter:
        self._blob_fd = open_unnamed(self._out_dir, self._stack)
        self._wire_fd = open_unnamed(self._out_dir, self._stack) if self._encoding != "raw" else None
        self._whole = self._stack.enter_context(ThreadPoolExecutor(1, "dsec-layer-hash"))
        self._parts = self._stack.enter_context(ThreadPoolExecutor(1, "dsec-layer-blocks"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._stack.close()

    def add(self, content: Content, name: str) -> StoredContent:
        """Copy a file's data in; returns where it lies, in a blob that has no digest yet.

        Raises ImageError ``bad_source`` when the source is shorter than it said, ``no_space``, ``unsupported``.
        """
        size = content.size
        if not size:
            return StoredContent(blob="", size=0)
        try:
            plan = plan_chunks(size, content.extents)
        except ValueError as err:
            raise ImageError("unsupported", f"{name}: {err}") from err
        reader = content.open()
        try:
            start = self._block
            if plan is None:
                self._copy(reader.readinto, 0, size)
                return StoredContent(blob="", size=size, start=start)
            self._chunks += len(plan.present)
            if self._chunks > _MAX_CHUNKS:
                raise ImageError("too_large", f"{name}: files with holes need too large a map", field="source")
            chunks = array("I", bytes(4 * len(plan.present)))
            for index, present in enumerate(plan.present):
                chunks[index] = self._block if present else HOLE
                if present:
                    offset = index << plan.bits
                    self._copy(reader.readinto, offset, min(1 << plan.bits, size - offset))
            return StoredContent(blob="", size=size, chunk_bits=plan.bits - BLOCK_BITS, chunks=chunks)
        finally:
            reader.close()

    @property
    def _block(self) -> int:
        return (self._flushed + self._used) >> BLOCK_BITS

    def _copy(self, readinto: Callable[[memoryview, int], None], offset: int, length: int) -> None:
        end = offset + length
        while offset < end:
            if self._used == BUFFER_BYTES:
                self._flush()
            room = self._buffers[self._turn][self._used : self._used + end - offset]
            readinto(room, offset)
            offset += len(room)
            self._used += len(room)
        pad = -self._used % BLOCK
        self._buffers[self._turn][self._used : self._used + pad] = bytes(pad)
        self._used += pad

    def _flush(self) -> None:
        """Hand the buffer to the two threads and go on with the next one, once they have done with what was in it."""
        full = self._buffers[self._turn][: self._used]
        self._busy[self._turn] = (self._whole.submit(self._write, full), self._parts.submit(self._cut, full))
        self._flushed += self._used
        self._progress(self._flushed)
        self._turn = (self._turn + 1) % _BUFFERS
        self._used = 0
        for job in self._busy[self._turn]:
            job.result()

    def _write(self, full: memoryview) -> None:
        write_all(self._blob_fd, full)
        start_writeback(self._blob_fd)  # so that the last fsync finds little
        self._hash.update(full)

    def _cut(self, full: memoryview) -> None:
        """Hash and encode the blocks of a buffer; only the blob's last buffer can end within one."""
        for at in range(0, len(full), self._block_bytes):
            raw = full[at : at + self._block_bytes]
            digest = hashlib.sha256(raw).digest()
            offset = self._wire_size
            if digest == zero_digest(len(raw)):
                length = 0
                self._wire_size += len(raw) if self._wire_fd is None else 0
            else:
                wire = self._encoder.encode(raw)
                length = len(wire)
                self._wire_size += length
                if self._wire_fd is not None:
                    self._wire_hash.update(wire)
                    write_all(self._wire_fd, wire)
            self._blocks.append((digest, offset, length))

    def finish(self) -> Packed:
        """Write out what is left; says what the blob is. Its files still have no names."""
        self._flush()
        for jobs in self._busy:
            for job in jobs:
                job.result()
        self._buffers.clear()  # metadata is planned next, and needs the memory
        files = (self._blob_fd, self._wire_fd)
        self._synced = [self._whole.submit(os.fsync, fd) for fd in files if fd is not None]
        blob = Part(digest=self._hash.hexdigest(), size=self._flushed)
        index = Index.of(
            self._blocks, block_bytes=self._block_bytes, blob_size=blob.size, encoding=self._encoding
        )  # fmt: skip
        wire = Wire(digest=blob.digest, size=blob.size, encoding=self._encoding)
        if self._wire_fd is not None:
            wire = Wire(digest=self._wire_hash.hexdigest(), size=self._wire_size, encoding=self._encoding)
        return Packed(blob=blob, wire=wire, index=index)

    def publish(self, packed: Packed) -> None:
        """Sync the files and name them by their digests; what is empty gets no file."""
        for job in self._synced:  # a failed fsync(2) says so once, here
            job.result()
        if packed.blob.size:
            name_file(self._blob_fd, self._out_dir, packed.blob.digest)
        if self._wire_fd is not None and packed.wire.size:
            name_file(self._wire_fd, self._out_dir, packed.wire.digest)


def open_unnamed(directory: Path, stack: ExitStack) -> int:
    """A file that no crash can leave behind: open(2), O_TMPFILE."""
    fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, fd)
    return fd


def name_file(fd: int, directory: Path, name: str) -> None:
    """Give an unnamed file its name once its bytes are on the disk; an equal file that is there stays.

    The name itself is safe after `sync_directory`.
    """
    os.fsync(fd)
    with ExitStack() as stack:
        here = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, here)
        with suppress(FileExistsError):
            # With a directory descriptor Python calls linkat(2), which alone can follow /proc's link to the file.
            os.link(str(fd), directory / name, src_dir_fd=here, follow_symlinks=True)


def write_named(directory: Path, data: bytes) -> Part:
    """Keep an object under its digest, as `name_file` does; returns what to call it by."""
    part = Part(digest=hashlib.sha256(data).hexdigest(), size=len(data))
    with ExitStack() as stack:
        fd = open_unnamed(directory, stack)
        write_all(fd, memoryview(data))
        name_file(fd, directory, part.digest)
    return part


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """write(2) until all is written; raises ImageError ``no_space`` on a full disk."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except OSError as err:
            raise failed_write(err, "writing a layer") from err
