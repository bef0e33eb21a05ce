"""Put one layer on a tree, as the OCI image specification's layer chapter says.

Whiteouts and opaque marks act on lower layers only, wherever they stand in their own layer; so the marks are applied to
the tree below first, then the entries are added in their order. Links in the parents of a path are followed inside the
tree, as an unpacker inside that root would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError, show_name
from dsec_imagefs.layer.entries import AUFS_POOL
from dsec_imagefs.tree import Node, Tree, new_directory, split_path

if TYPE_CHECKING:
    from dsec_imagefs.layer.entries import Entries, Entry, Folder


def apply_entries(tree: Tree, layer: Entries) -> None:
    """Apply a layer to the tree. Nodes of its files become part of the tree, directories are copied.

    Raises:
        ImageError: ``bad_image`` naming layer and entry; the tree is then spoilt.
    """
    if layer.marks:
        directories = layer.directories
        for mark in layer.marks:
            if mark.name:
                folder = _lower_directory(tree, mark.folder, directories)
                if folder is not None:
                    folder.children.pop(mark.name, None)
            else:
                _make_opaque(tree, mark.folder, directories)
    added = _Additions(tree, layer.name)
    for entry in layer.entries:
        added.add(entry)


def _make_opaque(tree: Tree, path: Folder, directories: set[Folder]) -> None:
    """Empty a directory of lower layers; a lower link or file of that name is hidden itself, not followed."""
    if not path:
        tree.root.children.clear()
        return
    folder = _lower_directory(tree, path[:-1], directories)
    if folder is None:
        folder = tree.directory(path[:-1], make=True)
        assert folder is not None
    lower = folder.children.get(path[-1])
    if lower is not None and lower.is_dir:
        lower.children.clear()
    else:
        folder.children[path[-1]] = new_directory()


def _lower_directory(tree: Tree, path: Folder, directories: set[Folder]) -> Node | None:
    """The lower directory that a mark speaks of, None when there is nothing to hide.

    Where this layer itself brings a directory, a lower link of that name is replaced and so never followed.
    """
    here = tree.root
    for depth, name in enumerate(path, start=1):
        child = here.children.get(name)
        if child is None:
            return None
        if not child.is_dir:
            if path[:depth] in directories:
                return None
            return tree.directory(path, make=False)
        here = child
    return here


class _Additions:
    """Adds the entries of one layer."""

    def __init__(self, tree: Tree, name: str) -> None:
        self._tree = tree
        self._name = name
        self._pool: dict[tuple[bytes, ...], Node] = {}
        self._folders: dict[Folder, Node] = {}  # paths resolved so far; dropped when a part of one may have changed

    def add(self, entry: Entry) -> None:
        """Put one entry in its place, replacing what is there; directories keep what is in them."""
        name, node = entry.name, entry.node
        if not name:
            assert node is not None
            _describe(self._tree.root, node)
            return
        if entry.pooled:
            assert node is not None
            self._pool[*entry.folder, name] = node
            return
        folder = self._folders.get(entry.folder)
        if folder is None:
            folder = self._folder(entry)
        if node is None:
            node = self._link_target(entry)
        present = folder.children.get(name)
        if present is node:
            return
        if node.is_dir:
            if present is not None and present.is_dir:
                _describe(present, node)
                return
            bare = Node(fmt=node.fmt, mode=0)
            _describe(bare, node)
            node = bare
        if present is not None and (present.is_dir or present.is_symlink):
            self._folders.clear()
        folder.children[name] = node

    def _folder(self, entry: Entry) -> Node:
        try:
            folder = self._tree.directory(entry.folder, make=True)
        except ImageError as err:
            raise self._error(entry, err.message) from err
        assert folder is not None
        self._folders[entry.folder] = folder
        return folder

    def _link_target(self, entry: Entry) -> Node:
        where = split_path(entry.link)
        target = self._pool.get(tuple(where)) if where and where[0] == AUFS_POOL else None
        if target is None:
            try:
                target = self._tree.lookup(where)
            except ImageError as err:
                raise self._error(entry, err.message) from err
        if target is None:
            what = "itself" if where == [*entry.folder, entry.name] else show_name(entry.link)
            raise self._error(entry, f"it is a hard link to {what}, which no layer so far has")
        if target.is_dir:
            raise self._error(entry, f"it is a hard link to the directory {show_name(entry.link)}")
        return target

    def _error(self, entry: Entry, problem: str) -> ImageError:
        return ImageError("bad_image", f"{self._name}: {show_name(entry.path)}: {problem}", field="source")


def _describe(node: Node, by: Node) -> None:
    node.mode, node.uid, node.gid = by.mode, by.uid, by.gid
    node.mtime_s, node.mtime_ns, node.xattrs = by.mtime_s, by.mtime_ns, by.xattrs
