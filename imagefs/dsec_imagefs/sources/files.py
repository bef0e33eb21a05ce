"""Named files of an image archive, in a directory or in a tar, as blobs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from dsec_imagefs.blob import Blob
from dsec_imagefs.errors import ImageError, SyscallError, show_name
from dsec_imagefs.sources.unpack import unpack_layer
from dsec_imagefs.syscalls import openat2_beneath
from dsec_imagefs.tar import reader
from dsec_imagefs.tar.reader import Member, read_members
from dsec_imagefs.tree import split_path

if TYPE_CHECKING:
    from contextlib import ExitStack

    from dsec_imagefs.sources.base import Work

_MAX_LINKS = 40


class Files(Protocol):
    """Where an archive's parts are looked up by path."""

    def find(self, path: str) -> Blob | None:
        """The file of that path, or None."""


class DirectoryFiles:
    """Files below a directory; links are refused, so that no archive can reach into the host."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        self._stack = stack
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, self._fd)

    def find(self, path: str) -> Blob | None:
        """Open the file; it stays open until the source is closed."""
        try:
            fd = openat2_beneath(self._fd, os.fsencode(path))
        except SyscallError:
            return None
        self._stack.callback(os.close, fd)
        return Blob(fd=fd, size=os.fstat(fd).st_size, name=path)


class TarFiles:
    """Members of a tar, read in place; links between members are followed inside the tar."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._members: dict[bytes, Member] = {}
        for member in read_members(blob):
            self._members[b"/".join(split_path(member.name))] = member

    def find(self, path: str) -> Blob | None:
        """The member's bytes as a window of the tar."""
        name = b"/".join(split_path(os.fsencode(path)))
        for _ in range(_MAX_LINKS):
            member = self._members.get(name)
            if member is None:
                return None
            if member.kind == reader.LINK:
                name = b"/".join(split_path(member.link))
            elif member.kind == reader.SYM:
                name = b"/".join(split_path(name.rpartition(b"/")[0] + b"/" + member.link))
            elif member.kind == reader.REG and member.extents is None:
                return self._blob.window(member.offset, member.size, path)
            else:
                raise ImageError("bad_image", f"{show_name(name)} in the archive is a {member.kind}", field="source")
        raise ImageError("bad_image", f"{path}: links in the archive go round in circles", field="source")


def open_files(path: str, work: Work, stack: ExitStack) -> Files:
    """Open an image archive: a directory, a tar, or a compressed tar.

    Raises:
        ImageError: ``bad_source`` when it can't be opened, ``bad_image`` when it is neither.
    """
    try:
        if os.path.isdir(path):  # noqa: PTH112
            return DirectoryFiles(path, stack)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
    except OSError as err:
        raise ImageError("bad_source", f"can't open {path}: {err.strerror}", field="source") from err
    blob = Blob(fd=fd, size=os.fstat(fd).st_size, name=path)
    if not blob.size:
        raise ImageError("bad_image", f"{path} is empty", field="source")
    return TarFiles(unpack_layer(blob, work, stack))
