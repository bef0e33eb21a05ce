"""What a layer says, in its order: marks that hide what lower layers have, then entries; read from tars and trees."""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsec_imagefs.erofs.xattr import split_name
from dsec_imagefs.errors import ImageError, show_name
from dsec_imagefs.layer import marks
from dsec_imagefs.tar import reader
from dsec_imagefs.tar.reader import Member, read_members
from dsec_imagefs.tree import EMPTY, NO_CHILDREN, NO_XATTRS, Node, split_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsec_imagefs.blob import Blob
    from dsec_imagefs.sources.base import Limits
    from dsec_imagefs.tree import Content

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
META = b".wh..wh."  # what AUFS kept beside the files; only its hard-link pool means anything
AUFS_POOL = b".wh..wh.plnk"
MAX_DEPTH = 4096  # twice what fits PATH_MAX

Folder = tuple[bytes, ...]
"""A directory's path by names, as the layer spells it: links are not resolved, no name is ``.`` or ``..``."""

ContentOf = Callable[["Blob", Member], "Content"]
"""Called for each file in archive order: what its node shall hold."""

_FORMATS = {
    reader.REG: stat.S_IFREG, reader.SYM: stat.S_IFLNK, reader.CHR: stat.S_IFCHR, reader.BLK: stat.S_IFBLK,
    reader.DIR: stat.S_IFDIR, reader.FIFO: stat.S_IFIFO,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mark:
    """Hides `name` of the lower layers' `folder`; the name b"" (opaque) hides all that is in the folder."""

    folder: Folder
    name: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. `node` is None for a hard link to the path `link`; the root's own entry has the name b"".

    A pooled one (AUFS) has no place in the tree, and is only there for hard links of its layer.
    """

    folder: Folder
    name: bytes
    node: Node | None
    link: bytes = b""
    pooled: bool = False

    @property
    def path(self) -> bytes:
        """For messages, and to be kept."""
        return b"/".join((*self.folder, self.name))


@dataclass(slots=True, kw_only=True)
class Entries:
    """A layer's marks and entries, each in its order. Its nodes are not changed by who reads them."""

    name: str
    marks: list[Mark] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @property
    def directories(self) -> set[Folder]:
        """Paths of the directories that the layer itself describes."""
        return {(*e.folder, e.name) for e in self.entries if e.node is not None and e.node.is_dir}


class Meter:
    """Counts what sources hold against the limits, over all layers of an image."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._entries = 0
        self._bytes = 0

    def count(self, where: str, size: int) -> None:
        """One more entry with so many bytes; raises ImageError ``too_large``."""
        self._entries += 1
        self._bytes += size
        if self._entries > self._limits.max_files:
            raise ImageError("too_large", f"{where}: more than {self._limits.max_files} entries", field="source")
        if self._bytes > self._limits.max_unpacked_bytes:
            raise ImageError(
                "too_large", f"{where}: files of more than {self._limits.max_unpacked_bytes} bytes in all",
                field="source",
            )  # fmt: skip


def read_tar(blob: Blob, content_of: ContentOf, meter: Meter, note: Callable[[str], None]) -> Entries:
    """Read an uncompressed layer; bodies are left to `content_of`.

    Raises:
        ImageError: ``bad_image`` naming layer and entry; ``too_large`` beyond the limits.
    """
    found = Entries(name=blob.name)
    folders: dict[Folder, Folder] = {}  # one tuple a directory, not one an entry
    for member in read_members(blob):
        meter.count(blob.name, _stored_bytes(member))
        path = split_path(member.name)
        if len(path) > MAX_DEPTH:
            raise ImageError("bad_image", f"{blob.name}: an entry lies below more than {MAX_DEPTH} directories")
        if any(part.startswith(WHITEOUT) for part in path):
            if path[-1].startswith(WHITEOUT):
                _read_mark(path, found)
            elif path[0] != AUFS_POOL:
                raise ImageError("bad_image", f"{blob.name}: {show_name(member.name)} lies below a whiteout")
            if path[-1].startswith(WHITEOUT) or member.kind != reader.REG:
                continue
        if not path and member.kind != reader.DIR:
            raise ImageError("bad_image", f"{blob.name}: {show_name(member.name)}: the root can only be a directory")
        folder = tuple(path[:-1])
        folder = folders.setdefault(folder, folder)
        name = path[-1] if path else b""
        if member.kind == reader.LINK:
            found.entries.append(Entry(folder, name, None, member.link))
        else:
            node = _node(blob, member, content_of, note)
            found.entries.append(Entry(folder, name, node, pooled=bool(folder) and folder[0] == AUFS_POOL))
    return found


def _stored_bytes(member: Member) -> int:
    return sum(length for _, length in member.extents) if member.extents is not None else member.size


def _read_mark(path: list[bytes], found: Entries) -> None:
    *parents, mark = path
    if mark == OPAQUE:
        found.marks.append(Mark(tuple(parents), b""))
    elif not mark.startswith(META):
        name = mark.removeprefix(WHITEOUT)
        if name in (b"", b".", b".."):
            raise ImageError("bad_image", f"{found.name}: {show_name(b'/'.join(path))} hides no name")
        found.marks.append(Mark(tuple(parents), name))


def _node(blob: Blob, member: Member, content_of: ContentOf, note: Callable[[str], None]) -> Node:
    node = Node(
        fmt=_FORMATS[member.kind], mode=member.mode, uid=member.uid, gid=member.gid, mtime_s=member.mtime_s,
        mtime_ns=member.mtime_ns, xattrs=_kept_xattrs(member.name, member.xattrs, note),
        children={} if member.kind == reader.DIR else NO_CHILDREN,
    )  # fmt: skip
    if member.kind == reader.SYM:
        node.target = member.link
    elif member.kind in (reader.CHR, reader.BLK):
        node.device = member.device
    elif member.kind == reader.REG:
        node.content = content_of(blob, member)
    return node


def _kept_xattrs(name: bytes, xattrs: dict[bytes, bytes], note: Callable[[str], None]) -> dict[bytes, bytes]:
    if not xattrs:
        return NO_XATTRS
    lost = [key for key in xattrs if split_name(key) is None]
    ours = [key for key in xattrs if key.startswith(marks.PREFIX)]  # else a source could forge a layer's marks
    for keys, why in ((lost, "EROFS can't hold them"), (ours, "the name space is this store's own")):
        if keys:
            note(f"{show_name(name)}: attributes {', '.join(map(show_name, keys))} left out, {why}")
    if not lost and not ours:
        return xattrs
    return {key: value for key, value in xattrs.items() if key not in lost and key not in ours}


def read_tree(
    root: Node, content_of: Callable[[Node, str], Content], meter: Meter, note: Callable[[str], None]
) -> Entries:
    """The entries of a tree: every directory described, a file's further names as hard links to its first."""
    found = Entries(name="tree")
    firsts: dict[int, bytes] = {}
    for folder, name, node in _walk(root):
        path = b"/".join((*folder, name))
        if not node.is_dir and id(node) in firsts:
            found.entries.append(Entry(folder, name, None, firsts[id(node)]))
            continue
        firsts[id(node)] = path
        content: Content = EMPTY
        if node.fmt == stat.S_IFREG:
            extents = node.content.extents
            meter.count("tree", node.content.size if extents is None else sum(length for _, length in extents))
            content = content_of(node, show_name(path))
        else:
            meter.count("tree", 0)
        kept = Node(
            fmt=node.fmt, mode=node.mode, uid=node.uid, gid=node.gid, mtime_s=node.mtime_s, mtime_ns=node.mtime_ns,
            xattrs=_kept_xattrs(path, node.xattrs, note), device=node.device, target=node.target, content=content,
        )  # fmt: skip
        found.entries.append(Entry(folder, name, kept))
    return found


def _walk(root: Node) -> Iterator[tuple[Folder, bytes, Node]]:
    """Each directory, what is in it in order, then what is below: files of a directory lie together in the blob."""
    yield (), b"", root
    todo: list[tuple[Folder, Node]] = [((), root)]
    while todo:
        folder, directory = todo.pop()
        below = []
        for name, node in sorted(directory.children.items()):
            yield folder, name, node
            if node.is_dir:
                below.append(((*folder, name), node))
        if len(folder) > MAX_DEPTH:
            raise ImageError("bad_image", f"an entry lies below more than {MAX_DEPTH} directories")
        todo.extend(reversed(below))
