"""Attached blobs by name, node id and digest. Node ids come from the digest: a new worker knows those of the old."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from dsec_imagefs.blobd.cached import CachedBlob
from dsec_imagefs.blobd.source import load_index
from dsec_imagefs.blobd.spec import BlobSpec, Record
from dsec_imagefs.durable import sync_directory, write_durably
from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from dsec_imagefs.blobd.recorder import Recorder
    from dsec_imagefs.blobd.settings import Places
    from dsec_imagefs.blobd.source import Sources

log = logging.getLogger("dsec.blobd")
MAPPED_ALIGN = 2 << 20  # virtio-pmem maps guests' huge pages


class Attached:
    """One blob that is served. `blob` is None when its files or its index can't be read: `error` says why."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.blob: CachedBlob | None = None
        self.error: ImageError | None = None
        self.recorder: Recorder | None = None
        self.sequence = Sequence()

    @property
    def digest(self) -> str:
        """Of the blob, hex."""
        return self.record.spec.digest


class Sequence:
    """What is known of a blob's readers going through it in order (reads.py): hints, so no lock.

    Attributes:
        last: the block that was missed last.
        run: how many were missed one after the other.
        trigger: the block whose reading is the sign to fetch the next window; -1 is none.
        ahead: the first block after what was fetched ahead.
        window: blocks of the next window.
    """

    __slots__ = ("ahead", "last", "run", "trigger", "window")

    def __init__(self) -> None:
        self.last = -2
        self.run = 0
        self.trigger = -1
        self.ahead = 0
        self.window = 1


class Node:
    """A file of the mount: `<hex>.d` (direct) or `<hex>.m` (mapped)."""

    __slots__ = ("attached", "mapped", "name", "nodeid", "size")

    def __init__(self, attached: Attached, *, mapped: bool) -> None:
        self.attached = attached
        self.mapped = mapped
        self.nodeid = nodeid_of(attached.digest, mapped=mapped)
        self.name = f"{attached.digest}.{'m' if mapped else 'd'}".encode()
        size = attached.record.spec.size
        self.size = -(-size // MAPPED_ALIGN) * MAPPED_ALIGN if mapped else size


def nodeid_of(digest: str, *, mapped: bool) -> int:
    """55 bits of the digest and the kind, never that of the root (1)."""
    return (int(digest[:13], 16) + 1) << 2 | mapped


class Table:
    """Dictionaries that readers use without a lock; changes go one at a time, each durable before it is seen."""

    def __init__(self, places: Places, boot_id: str, sources: Sources) -> None:
        self._places = places
        self._boot_id = boot_id
        self._sources = sources
        self._attached: dict[str, Attached] = {}
        self.nodes: dict[int, Node] = {}
        self.names: dict[bytes, Node] = {}
        self.change = threading.Lock()

    def load(self) -> list[Attached]:
        """Everything that was attached before; what can't be opened stays, and its reads fail."""
        found = []
        for path in sorted(self._places.records.glob("*.json")):
            try:
                attached = Attached(Record.parse(path.read_bytes()))
            except ImageError as err:
                log.warning("record=%s step=load: %s", path.name, err)
                continue
            self._open(attached)
            self._show(attached)
            found.append(attached)
        return found

    def get(self, digest: str) -> Attached:
        """Raises ImageError ``not_found``."""
        found = self._attached.get(digest)
        if found is None:
            raise ImageError("not_found", f"no blob {digest} is attached", "attach it", "digest")
        return found

    def all(self) -> list[Attached]:
        """A copy of the list, by digest."""
        return [one for _, one in sorted(self._attached.items())]

    def attach(self, spec: BlobSpec) -> tuple[Attached, bool]:
        """Serve a blob; attaching it again, also from another store or with a moved index, takes the new spec.

        Returns:
            The blob, and whether it was opened by this call.

        Raises:
            ImageError: ``conflict`` for the same digest with another size, or equal node ids; what `_open` says.
        """
        known = self._attached.get(spec.digest)
        if known is not None and known.blob is not None:
            if known.record.spec.size != spec.size:
                text = f"{spec.digest} is attached with {known.record.spec.size} bytes"
                raise ImageError("conflict", text, "", "size")
            if known.record.spec != spec:
                index = load_index(spec)
                if index.block_bytes != known.blob.index.block_bytes:
                    raise ImageError("conflict", f"{spec.digest} is attached with another index", "detach it", "index")
                if index.table != known.blob.index.table:
                    known.blob.index = index  # the same blocks, laid out differently on the wire
                known.blob.source = self._sources.fetch_of(spec, index)
                self.write(known, Record(spec=spec, ours=known.record.ours, holds=known.record.holds))
            return known, False
        node = self.nodes.get(nodeid_of(spec.digest, mapped=False))
        if node is not None and node.attached.digest != spec.digest:
            raise ImageError("conflict", f"{spec.digest} and {node.attached.digest} have equal node ids", "detach one")
        holds = known.record.holds if known is not None else {}
        attached = Attached(Record(spec=spec, ours=False, holds=holds))
        self._open(attached)
        if attached.error is not None or attached.blob is None:
            raise attached.error or ImageError("corrupt", f"{spec.digest} can't be opened")
        ours = not attached.blob.complete
        try:
            self.write(attached, Record(spec=spec, ours=ours, holds=holds))
        except BaseException:
            attached.blob.close()
            raise
        self._show(attached)
        return attached, True

    def _open(self, attached: Attached) -> None:
        spec = attached.record.spec
        try:
            index = load_index(spec)
            attached.blob = CachedBlob(self._places.blobs / spec.digest, spec.digest, index, self._boot_id)
            attached.blob.source = self._sources.fetch_of(spec, index)
        except ImageError as err:
            attached.error = err
        except OSError as err:
            attached.error = ImageError("syscall", f"the files of blob {spec.digest} can't be opened: {err}")

    def _show(self, attached: Attached) -> None:
        self._attached[attached.digest] = attached
        for mapped in (False, True):
            node = Node(attached, mapped=mapped)
            self.nodes[node.nodeid] = node
            self.names[node.name] = node

    def detach(self, attached: Attached) -> None:
        """Serve it no more; the caller saw to it that nobody reads or fetches. The blob's file is closed."""
        (self._places.records / f"{attached.digest}.json").unlink(missing_ok=True)
        sync_directory(self._places.records)
        self._attached.pop(attached.digest, None)
        for mapped in (False, True):
            node = self.nodes.pop(nodeid_of(attached.digest, mapped=mapped), None)
            if node is not None:
                self.names.pop(node.name, None)
        if attached.blob is not None:
            attached.blob.sync()
            attached.blob.close()

    def write(self, attached: Attached, record: Record) -> None:
        """Change a blob's record, on disk first."""
        write_durably(self._places.records / f"{record.spec.digest}.json", record.render())
        attached.record = record
