"""A tree from a directory of the host: one file system, nothing followed, nothing executed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_imagefs.blob import FdReader
from dsec_imagefs.erofs.xattr import split_name
from dsec_imagefs.errors import ImageError, show_name
from dsec_imagefs.sources.base import LayerSource, Material, Work
from dsec_imagefs.syscalls import openat2_beneath
from dsec_imagefs.tree import Content, ContentReader, Extent, Node, Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PathContent:
    """A regular file below a directory descriptor, pinned to what the scan saw."""

    root_fd: int
    path: bytes
    size: int
    inode: int
    extents: tuple[Extent, ...] | None

    def open(self) -> ContentReader:
        fd = openat2_beneath(self.root_fd, self.path)
        if os.fstat(fd).st_ino != self.inode:
            os.close(fd)
            raise ImageError("bad_source", f"{show_name(self.path)} was replaced while it was being imported")
        return FdReader(fd, show_name(self.path), owned=True)


def scan_directory(root: Path, root_fd: int, progress: Progress | None = None, note: Note | None = None) -> Node:
    """Read a directory's metadata into a tree; bodies are opened later, below `root_fd`.

    Directories on other file systems come out empty and are named through `note`.

    Raises:
        ImageError: ``bad_source`` when something can't be read.
    """
    scan = _Scan(root_fd, progress, note or (lambda _text: None))
    try:
        return scan.run()
    except OSError as err:
        raise ImageError("bad_source", f"can't read {err.filename or root}: {err.strerror}", field="source") from err


class _Scan:
    def __init__(self, root_fd: int, progress: Progress | None, note: Note) -> None:
        self._root_fd = root_fd
        self._progress = progress
        self._note = note
        self._links: dict[int, Node] = {}
        self._count = 0
        self._base = b"/proc/self/fd/%d" % root_fd

    def run(self) -> Node:
        info = os.fstat(self._root_fd)
        if not stat.S_ISDIR(info.st_mode):
            raise ImageError("bad_source", "the source is not a directory", field="source")
        root = self._node(b"", info)
        todo = [(b"", root)]
        while todo:
            path, directory = todo.pop()
            with os.scandir(self._base + b"/" + path) as entries:
                for entry in entries:
                    below = path + b"/" + entry.name if path else entry.name
                    seen = entry.stat(follow_symlinks=False)
                    child = self._links.get(seen.st_ino) if seen.st_nlink > 1 else None
                    if child is None or child.is_dir:
                        child = self._node(below, seen)
                        if seen.st_nlink > 1 and not child.is_dir:
                            self._links[seen.st_ino] = child
                    directory.children[entry.name] = child
                    if not child.is_dir:
                        continue
                    if seen.st_dev == info.st_dev:
                        todo.append((below, child))
                    else:
                        self._note(f"{show_name(below)} is another file system: kept as an empty directory")
        return root

    def _node(self, path: bytes, info: os.stat_result) -> Node:
        self._count += 1
        if self._progress is not None and self._count % 1000 == 0:
            self._progress("scan", self._count, 0)
        seconds, nanos = divmod(info.st_mtime_ns, 10**9)
        fmt = stat.S_IFMT(info.st_mode)
        where = self._base + b"/" + path
        node = Node(
            fmt=fmt, mode=stat.S_IMODE(info.st_mode), uid=info.st_uid, gid=info.st_gid, mtime_s=seconds,
            mtime_ns=nanos, xattrs=self._xattrs(where, path),
        )  # fmt: skip
        if fmt == stat.S_IFLNK:
            node.target = os.readlink(where)  # noqa: PTH115  (bytes, any of them)
        elif fmt in (stat.S_IFCHR, stat.S_IFBLK):
            node.device = (os.major(info.st_rdev), os.minor(info.st_rdev))
        elif fmt == stat.S_IFREG:
            node.content = self._content(path, info)
        return node

    def _xattrs(self, where: bytes, path: bytes) -> dict[bytes, bytes]:
        # The root itself is a magic link below /proc, and that one must be followed.
        follow = not path
        found: dict[bytes, bytes] = {}
        for name in os.listxattr(where, follow_symlinks=follow):
            raw = os.fsencode(name)
            if split_name(raw) is None:
                self._note(f"{show_name(path)}: attribute {name} left out, EROFS can't hold it")
                continue
            found[raw] = os.getxattr(where, name, follow_symlinks=follow)
        return found

    def _content(self, path: bytes, info: os.stat_result) -> Content:
        extents = None
        if info.st_blocks * 512 < info.st_size:
            fd = openat2_beneath(self._root_fd, path)
            try:
                extents = data_ranges(fd, info.st_size)
            finally:
                os.close(fd)
        return _PathContent(
            root_fd=self._root_fd, path=path, size=info.st_size, inode=info.st_ino, extents=extents
        )  # fmt: skip


def data_ranges(fd: int, size: int) -> tuple[Extent, ...]:
    """Data runs of an open file by SEEK_DATA and SEEK_HOLE (lseek(2)); file systems without holes report one run."""
    found: list[Extent] = []
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            break
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if end > start:
            found.append((start, end - start))
        at = max(end, start + 1)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySource:
    """``dir:PATH``: the tree below a directory of this host."""

    path: str

    @property
    def label(self) -> str:
        """The source string."""
        return f"dir:{self.path}"

    @property
    def cache_key(self) -> str:
        """A directory may have changed: nothing to reuse."""
        return ""

    @contextmanager
    def open(self, work: Work) -> Iterator[Material]:
        """Scan the directory, holding it open until the end."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as err:
            raise ImageError("bad_source", f"can't open {self.path}: {err.strerror}", field="source") from err
        try:
            root = scan_directory(Path(self.path), fd, work.report, work.note)
            yield Material(layers=(LayerSource(open=lambda _stack: root),))
        finally:
            os.close(fd)
