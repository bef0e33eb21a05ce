"""A file system tree as metadata: nodes, where their data is, and path resolution scoped to the tree's own root.

Pure: no file of the host is touched here. Hard links are one `Node` under several names.
"""

from __future__ import annotations

import stat
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dsec_imagefs.errors import ImageError, show_name

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)``; the total is 0 while it is not known."""

Extent = tuple[int, int]
"""``(offset, length)`` of one run of data, in bytes of the file it belongs to."""

MAX_SYMLINK_HOPS = 40  # the kernel's MAXSYMLINKS


class ContentReader(Protocol):
    """An open file body."""

    def readinto(self, view: memoryview, offset: int) -> None:
        """Fill the whole view from byte `offset` on; raises ImageError when the source is shorter."""

    def close(self) -> None:
        """Give the source back."""


class Content(Protocol):
    """Where the bytes of one regular file are. `extents` is None for a file without holes."""

    @property
    def size(self) -> int:
        """Length of the file in bytes, holes included."""

    @property
    def extents(self) -> tuple[Extent, ...] | None:
        """Data ranges in ascending order; what is outside them reads as zeros."""

    def open(self) -> ContentReader:
        """Open the source for reading."""


@dataclass(frozen=True, slots=True)
class BytesContent:
    """A file body held in memory."""

    data: bytes
    extents: tuple[Extent, ...] | None = None

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.data)

    def open(self) -> ContentReader:
        """Read from the memory itself."""
        return _BytesReader(self.data)


@dataclass(frozen=True, slots=True)
class _BytesReader:
    data: bytes

    def readinto(self, view: memoryview, offset: int) -> None:
        view[:] = self.data[offset : offset + len(view)]

    def close(self) -> None:
        """Nothing is held."""


EMPTY = BytesContent(b"")

NO_CHUNKS = array("I")  # one for all: a layer may have a million files, and nobody writes to it
HOLE = 0xFFFFFFFF
"""In a chunk map: no block, reads as zeros (``EROFS_NULL_ADDR``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredContent:
    """A file body in a layer's blob: in one piece from block `start` on, or in the chunks of `chunks`.

    `blob` is the blob's digest, blocks are of 4 KiB and counted from the blob's start. `chunks` holds one block number
    (or `HOLE`) for each ``4096 << chunk_bits`` bytes of the file; empty means one piece.
    """

    blob: str
    size: int
    start: int = 0
    chunk_bits: int = 0
    chunks: array[int] = field(default_factory=lambda: NO_CHUNKS)

    @property
    def extents(self) -> tuple[Extent, ...] | None:
        """Data runs by whole chunks, None for a file in one piece."""
        if not self.chunks:
            return None
        step = 4096 << self.chunk_bits
        return tuple(
            (index * step, min(step, self.size - index * step)) for index, at in enumerate(self.chunks) if at != HOLE
        )

    def open(self) -> ContentReader:
        """Refused: the tree knows where the bytes are, and has no blob to read them from."""
        raise ImageError("unsupported", f"data of blob {self.blob} can't be read through a tree", "mount the image")


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """One inode. `fmt` is a ``stat.S_IF*`` value; `mode` the twelve permission bits; `mtime` is floor seconds + ns."""

    fmt: int
    mode: int
    uid: int = 0
    gid: int = 0
    mtime_s: int = 0
    mtime_ns: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    device: tuple[int, int] = (0, 0)
    target: bytes = b""
    content: Content = EMPTY
    children: dict[bytes, Node] = field(default_factory=dict)

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.fmt == stat.S_IFDIR

    @property
    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        return self.fmt == stat.S_IFLNK


NO_CHILDREN: dict[bytes, Node] = {}
"""For nodes that are no directories, where there are many: nobody writes to it."""

NO_XATTRS: dict[bytes, bytes] = {}
"""For nodes without attributes: a node's attributes are replaced, never changed in place."""


def new_directory() -> Node:
    """Make a directory nobody described: 0755, root's, dated 1970 so that equal trees have equal digests."""
    return Node(fmt=stat.S_IFDIR, mode=0o755)


def split_path(path: bytes) -> list[bytes]:
    """Clean a path lexically, clamped to the root: ``/a/./b/../../../c`` is ``[c]``."""
    parts: list[bytes] = []
    for part in path.split(b"/"):
        if part in (b"", b"."):
            continue
        if part == b"..":
            if parts:
                parts.pop()
            continue
        parts.append(part)
    return parts


class Tree:
    """A root directory and the path walk that follows links as a process chrooted into it would."""

    __slots__ = ("root",)

    def __init__(self, root: Node | None = None) -> None:
        self.root = root if root is not None else new_directory()

    def directory(self, parts: Sequence[bytes], *, make: bool) -> Node | None:
        """Resolve a directory path, links followed inside the tree.

        With `make`, missing directories (also those a dangling link points at) are made; without, None says missing.
        Raises ImageError ``bad_image`` when a component is neither a directory nor a link, or links loop.
        """
        stack: list[Node] = [self.root]
        todo = list(reversed(parts))
        hops = 0
        while todo:
            name = todo.pop()
            if name == b"..":
                if len(stack) > 1:
                    stack.pop()
                continue
            here = stack[-1]
            child = here.children.get(name)
            if child is None:
                if not make:
                    return None
                child = here.children[name] = new_directory()
            if child.is_symlink:
                hops += 1
                if hops > MAX_SYMLINK_HOPS:
                    raise ImageError("bad_image", f"too many symbolic links in {show_name(b'/'.join(parts))}")
                if child.target.startswith(b"/"):
                    del stack[1:]
                todo.extend(p for p in reversed(child.target.split(b"/")) if p not in (b"", b"."))
            elif child.is_dir:
                stack.append(child)
            elif make:
                where = show_name(b"/".join(parts))
                raise ImageError("bad_image", f"{where} passes through {show_name(name)}, which is not a directory")
            else:
                return None
        return stack[-1]

    def lookup(self, parts: list[bytes]) -> Node | None:
        """Find an entry; links in the parents are followed, the last component is not."""
        if not parts:
            return self.root
        parent = self.directory(parts[:-1], make=False)
        return None if parent is None else parent.children.get(parts[-1])
