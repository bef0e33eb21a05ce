"""Trees as plain facts, from nodes, from an EROFS image by our reader, and from a mounted directory, to be compared."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import TYPE_CHECKING

from dsec_imagefs.erofs.layout import plan_layout
from dsec_imagefs.erofs.reader import ErofsReader, ReadAt
from dsec_imagefs.erofs.writer import Written, write_image

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dsec_imagefs.tree import Node

Facts = dict[bytes, tuple[object, ...]]


def write_tree(root: Node, fd: int) -> Written:
    """Plan and write a tree's image."""
    return write_image(plan_layout(root), fd)


def node_facts(root: Node) -> Facts:
    """What a tree says of itself."""
    links: dict[int, list[bytes]] = {}
    for path, node in _walk(root):
        links.setdefault(id(node), []).append(path)
    found: Facts = {}
    for path, node in _walk(root):
        names = links[id(node)]
        count = 2 + sum(child.is_dir for child in node.children.values()) if node.is_dir else len(names)
        found[path] = (
            node.fmt, node.mode, node.uid, node.gid, (node.mtime_s, node.mtime_ns), count, min(names),
            tuple(sorted(node.xattrs.items())), node.device if node.fmt in (stat.S_IFCHR, stat.S_IFBLK) else (0, 0),
            node.target, _body(node),
        )  # fmt: skip
    return found


def _walk(root: Node) -> Iterator[tuple[bytes, Node]]:
    todo = [(b"", root)]
    while todo:
        path, node = todo.pop()
        yield path, node
        todo.extend((path + b"/" + name if path else name, child) for name, child in node.children.items())


def _body(node: Node) -> str:
    if node.fmt != stat.S_IFREG:
        return ""
    reader = node.content.open()
    data = bytearray(node.content.size)
    reader.readinto(memoryview(data), 0)
    reader.close()
    return _digest(bytes(data))


def _digest(data: bytes) -> str:
    return f"{len(data)}:{hashlib.sha256(data).hexdigest()}"


def image_facts(fd: int, blobs: Mapping[str, ReadAt] | None = None) -> Facts:
    """What our reader says of an image, and of the blobs its data lies in."""
    reader = ErofsReader(fd, blobs=blobs)
    entries = list(reader.walk())
    names: dict[int, bytes] = {}
    for path, inode in entries:
        names[inode.nid] = min(path, names.get(inode.nid, path))
    found: Facts = {}
    for path, inode in entries:
        is_link, is_file = inode.fmt == stat.S_IFLNK, inode.fmt == stat.S_IFREG
        found[path] = (
            inode.fmt, stat.S_IMODE(inode.mode), inode.uid, inode.gid, (inode.mtime_s, inode.mtime_ns), inode.nlink,
            names[inode.nid], tuple(sorted(reader.xattrs(inode).items())),
            inode.device if inode.fmt in (stat.S_IFCHR, stat.S_IFBLK) else (0, 0),
            reader.read(inode) if is_link else b"", _digest(reader.read(inode)) if is_file else "",
        )  # fmt: skip
    return found


def directory_facts(top: str) -> Facts:
    """What the kernel says of a directory."""
    base = os.fsencode(top)
    infos = {path: os.lstat(base + b"/" + path if path else base) for path in _paths(base)}
    names: dict[int, bytes] = {}
    for path, info in infos.items():
        names[info.st_ino] = min(path, names.get(info.st_ino, path))
    found: Facts = {}
    for path, info in infos.items():
        where = base + b"/" + path if path else base
        fmt = stat.S_IFMT(info.st_mode)
        xattrs = {os.fsencode(n): os.getxattr(where, n, follow_symlinks=False) for n in _xattrs(where)}
        device = (os.major(info.st_rdev), os.minor(info.st_rdev)) if fmt in (stat.S_IFCHR, stat.S_IFBLK) else (0, 0)
        body = ""
        if fmt == stat.S_IFREG:
            with open(where, "rb") as file:
                body = _digest(file.read())
        found[path] = (
            fmt, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, divmod(info.st_mtime_ns, 10**9), info.st_nlink,
            names[info.st_ino], tuple(sorted(xattrs.items())), device,
            os.readlink(where) if fmt == stat.S_IFLNK else b"", body,
        )  # fmt: skip
    return found


def _xattrs(where: bytes) -> list[str]:
    return os.listxattr(where, follow_symlinks=False)


def _paths(base: bytes) -> Iterator[bytes]:
    todo = [b""]
    while todo:
        path = todo.pop()
        yield path
        with os.scandir(base + b"/" + path) as entries:
            for entry in entries:
                below = path + b"/" + entry.name if path else entry.name
                if entry.is_dir(follow_symlinks=False):
                    todo.append(below)
                else:
                    yield below
