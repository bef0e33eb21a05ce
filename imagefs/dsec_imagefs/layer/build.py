"""Make a layer from an uncompressed tar or from a tree: one pass over the data, hashing on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec_imagefs.blob import Blob, BlobContent
from dsec_imagefs.durable import sync_directory
from dsec_imagefs.erofs.layout import plan_layout
from dsec_imagefs.erofs.ondisk import BLOCK_BITS
from dsec_imagefs.errors import show_name
from dsec_imagefs.layer.encode import encode_entries
from dsec_imagefs.layer.entries import Meter, read_tar, read_tree
from dsec_imagefs.layer.index import DEFAULT_BLOCK_BYTES, check_block_bytes
from dsec_imagefs.layer.manifest import Layer
from dsec_imagefs.layer.pack import BlobWriter, Packed, write_named
from dsec_imagefs.sources.base import Limits
from dsec_imagefs.tree import StoredContent

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dsec_imagefs.layer.entries import Entries
    from dsec_imagefs.layer.index import Encoding
    from dsec_imagefs.tar.reader import Member
    from dsec_imagefs.tree import Content, Node, Progress

_MAX_NOTES = 100  # beyond it only their number would grow


def build_layer(
    source: Blob | Node,
    out_dir: Path,
    *,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    encoding: Encoding = "raw",
    limits: Limits | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
    diff_id: str = "",
) -> Layer:
    """Write a layer's objects into `out_dir`, each a file named by its sha256 in hex, and fsync them.

    The files: blob (none when it is empty), wire blob (when it is encoded), index, metadata, manifest. A file that is
    already there is left as it is. Equal sources give equal bytes. What can't be a layer leaves no file.

    Memory: 30 MiB and 1.2 KB an entry; file data passes through three buffers of 4 MiB.

    Args:
        source: an uncompressed layer tar (it must stay open meanwhile), or the root of a tree, every entry explicit.
        out_dir: an existing directory, on a file system with O_TMPFILE.
        block_bytes: a power of two from 64 KiB to 4 MiB.
        encoding: how the blob lies in a store.
        limits: bounds on entries and bytes.
        progress: ``progress("layer", bytes of data done, bytes of the source)``.
        note: told each sentence that also goes into the manifest.
        diff_id: recorded as it is.

    Raises:
        ImageError: ``bad_image``, ``bad_source``, ``unsupported``, ``too_large`` naming the entry; ``no_space``.
    """
    check_block_bytes(block_bytes)
    total = source.size if isinstance(source, Blob) else 0
    notes: list[str] = []

    def keep(text: str) -> None:
        if len(notes) < _MAX_NOTES:
            notes.append(text)
        if note is not None:
            note(text)

    def report(done: int) -> None:
        if progress is not None:
            progress("layer", min(done, total) if total else done, total)

    meter = Meter(limits or Limits())
    with BlobWriter(out_dir, block_bytes=block_bytes, encoding=encoding, progress=report) as writer:
        entries = _read(source, writer, meter, keep)
        packed = writer.finish()
        metadata = _metadata(entries, packed)
        writer.publish(packed)
    meta, index = write_named(out_dir, metadata), write_named(out_dir, packed.index.render())
    layer = Layer(
        meta=meta, blob=packed.blob, index=index, wire=packed.wire, diff_id=diff_id,
        entries=len(entries.entries) + len(entries.marks), notes=tuple(notes),
    )  # fmt: skip
    sync_directory(out_dir)  # a manifest is there only when all it names is
    write_named(out_dir, layer.render())
    sync_directory(out_dir)
    return layer


def _read(source: Blob | Node, writer: BlobWriter, meter: Meter, note: Callable[[str], None]) -> Entries:
    def from_tar(blob: Blob, member: Member) -> Content:
        body = BlobContent(blob=blob, offset=member.offset, size=member.size, extents=member.extents)
        return writer.add(body, f"{blob.name}: {show_name(member.name)}")

    def from_tree(node: Node, name: str) -> Content:
        return writer.add(node.content, name)

    if isinstance(source, Blob):
        return read_tar(source, from_tar, meter, note)
    return read_tree(source, from_tree, meter, note)


def _metadata(entries: Entries, packed: Packed) -> bytes:
    """The layer's metadata image, once the blob has a name."""
    digest = packed.blob.digest
    for entry in entries.entries:
        node = entry.node
        if node is not None and isinstance(node.content, StoredContent) and node.content.size:
            old = node.content
            node.content = StoredContent(
                blob=digest, size=old.size, start=old.start, chunk_bits=old.chunk_bits, chunks=old.chunks
            )  # fmt: skip
    encoded = encode_entries(entries)
    blobs = [(digest, packed.blob.size >> BLOCK_BITS)] if packed.blob.size else []
    return plan_layout(encoded.root, blobs=blobs, numbers=encoded.numbers).metadata
