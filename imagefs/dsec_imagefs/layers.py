"""Apply OCI layers to a tree of metadata, in order, as the OCI image specification's layer chapter says.

Whiteouts and opaque marks act on lower layers only, wherever they stand in their own layer; so each layer is read
once, its marks are applied to the tree below, then its entries are added in archive order.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from dsec_imagefs.blob import Blob, BlobContent
from dsec_imagefs.erofs.xattr import split_name
from dsec_imagefs.errors import ImageError, show_name
from dsec_imagefs.tar import reader
from dsec_imagefs.tar.reader import Member, read_members
from dsec_imagefs.tree import Node, Tree, new_directory, split_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dsec_imagefs.sources.base import Limits

WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
META = b".wh..wh."  # what AUFS kept beside the files; only its hard-link pool means anything
_AUFS_POOL = b".wh..wh.plnk"

_FORMATS = {
    reader.REG: stat.S_IFREG, reader.SYM: stat.S_IFLNK, reader.CHR: stat.S_IFCHR, reader.BLK: stat.S_IFBLK,
    reader.DIR: stat.S_IFDIR, reader.FIFO: stat.S_IFIFO,
}  # fmt: skip


class LayerMerge:
    """The tree that grows layer by layer."""

    def __init__(self, limits: Limits, note: Callable[[str], None] | None = None) -> None:
        self.tree = Tree()
        self._limits = limits
        self._note = note or (lambda _text: None)
        self._entries = 0
        self._bytes = 0

    def apply(self, blob: Blob) -> int:
        """Apply one uncompressed layer; returns how many members it has.

        The blob must stay open until the contents were read.

        Raises:
            ImageError: ``bad_image`` naming layer and entry; ``too_large`` beyond the limits. The tree is then spoilt.
        """
        members = []
        for member in read_members(blob):
            self._count(member, blob)
            members.append((split_path(member.name), member))
        marks = [(path, m) for path, m in members if path and path[-1].startswith(WHITEOUT)]
        directories = {tuple(path) for path, m in members if m.kind == reader.DIR}
        for path, _ in marks:
            self._hide(path, directories, blob)
        added = _Additions(self.tree, blob, self._note)
        for path, member in members:
            if not any(part.startswith(WHITEOUT) for part in path):
                added.add(path, member)
            elif path[0] == _AUFS_POOL:
                added.pool(path, member)
            elif not path[-1].startswith(WHITEOUT):
                raise ImageError("bad_image", f"{blob.name}: {show_name(member.name)} lies below a whiteout")
        return len(members)

    def _count(self, member: Member, blob: Blob) -> None:
        self._entries += 1
        self._bytes += sum(n for _, n in member.extents) if member.extents is not None else member.size
        if self._entries > self._limits.max_files:
            raise ImageError("too_large", f"{blob.name}: more than {self._limits.max_files} entries", field="source")
        if self._bytes > self._limits.max_unpacked_bytes:
            raise ImageError(
                "too_large",
                f"{blob.name}: files of more than {self._limits.max_unpacked_bytes} bytes in all",
                field="source",
            )

    def _hide(self, path: list[bytes], directories: set[tuple[bytes, ...]], blob: Blob) -> None:
        *parents, mark = path
        if mark == OPAQUE:
            self._make_opaque(parents, directories)
        elif mark.startswith(META):
            return
        else:
            name = mark.removeprefix(WHITEOUT)
            if name in (b"", b".", b".."):
                raise ImageError("bad_image", f"{blob.name}: {show_name(b'/'.join(path))} hides no name")
            folder = self._lower_directory(parents, directories)
            if folder is not None:
                folder.children.pop(name, None)

    def _make_opaque(self, path: list[bytes], directories: set[tuple[bytes, ...]]) -> None:
        """Empty a directory of lower layers; a lower link or file of that name is hidden itself, not followed."""
        if not path:
            self.tree.root.children.clear()
            return
        folder = self._lower_directory(path[:-1], directories)
        if folder is None:
            folder = self.tree.directory(path[:-1], make=True)
            assert folder is not None
        lower = folder.children.get(path[-1])
        if lower is not None and lower.is_dir:
            lower.children.clear()
        else:
            folder.children[path[-1]] = new_directory()

    def _lower_directory(self, path: list[bytes], directories: set[tuple[bytes, ...]]) -> Node | None:
        """The lower directory that a mark speaks of, None when there is nothing to hide.

        Where this layer itself brings a directory, a lower link of that name is replaced and so never followed.
        """
        here = self.tree.root
        for depth, name in enumerate(path, start=1):
            child = here.children.get(name)
            if child is None:
                return None
            if not child.is_dir:
                if tuple(path[:depth]) in directories:
                    return None
                return self.tree.directory(path, make=False)
            here = child
        return here


class _Additions:
    """Adds the entries of one layer."""

    def __init__(self, tree: Tree, blob: Blob, note: Callable[[str], None]) -> None:
        self._tree = tree
        self._blob = blob
        self._note = note
        self._pool: dict[tuple[bytes, ...], Node] = {}

    def add(self, path: list[bytes], member: Member) -> None:
        """Put one entry in its place, replacing what is there; directories keep what is in them."""
        if not path:
            if member.kind != reader.DIR:
                raise self._error(member, "the root can only be a directory")
            self._describe(self._tree.root, member)
            return
        try:
            folder = self._tree.directory(path[:-1], make=True)
        except ImageError as err:
            raise self._error(member, err.message) from err
        assert folder is not None
        name = path[-1]
        if member.kind == reader.LINK:
            target = self._link_target(path, member)
            if folder.children.get(name) is not target:
                folder.children[name] = target
            return
        present = folder.children.get(name)
        if member.kind == reader.DIR and present is not None and present.is_dir:
            self._describe(present, member)
        else:
            folder.children[name] = self._node(member)

    def pool(self, path: list[bytes], member: Member) -> None:
        """Keep a file of AUFS's hard-link pool for the entries that link to it."""
        if member.kind == reader.REG:
            self._pool[tuple(path)] = self._node(member)

    def _link_target(self, path: list[bytes], member: Member) -> Node:
        where = split_path(member.link)
        target = self._pool.get(tuple(where)) if where and where[0] == _AUFS_POOL else None
        if target is None:
            try:
                target = self._tree.lookup(where)
            except ImageError as err:
                raise self._error(member, err.message) from err
        if target is None:
            what = "itself" if where == path else show_name(member.link)
            raise self._error(member, f"it is a hard link to {what}, which no layer so far has")
        if target.is_dir:
            raise self._error(member, f"it is a hard link to the directory {show_name(member.link)}")
        return target

    def _node(self, member: Member) -> Node:
        node = Node(fmt=_FORMATS[member.kind], mode=0)
        self._describe(node, member)
        if member.kind == reader.SYM:
            node.target = member.link
        elif member.kind in (reader.CHR, reader.BLK):
            node.device = member.device
        elif member.kind == reader.REG:
            node.content = BlobContent(
                blob=self._blob, offset=member.offset, size=member.size, extents=member.extents
            )  # fmt: skip
        return node

    def _describe(self, node: Node, member: Member) -> None:
        node.mode, node.uid, node.gid = member.mode, member.uid, member.gid
        node.mtime_s, node.mtime_ns = member.mtime_s, member.mtime_ns
        node.xattrs = member.xattrs
        lost = [name for name in member.xattrs if split_name(name) is None]
        if lost:
            node.xattrs = {name: value for name, value in member.xattrs.items() if name not in lost}
            names = ", ".join(show_name(name) for name in lost)
            self._note(f"{show_name(member.name)}: attributes {names} left out, EROFS can't hold them")

    def _error(self, member: Member, problem: str) -> ImageError:
        return ImageError("bad_image", f"{self._blob.name}: {show_name(member.name)}: {problem}", field="source")


def apply_layers(
    blobs: Iterable[Blob], limits: Limits, note: Callable[[str], None] | None = None
) -> Node:  # fmt: skip
    """Apply layers from the lowest up; returns the root of the merged tree."""
    merge = LayerMerge(limits, note)
    for blob in blobs:
        merge.apply(blob)
    return merge.tree.root
