"""Trees as tar streams: packing a local tree, and unpacking a stream that a sandbox (so: an attacker) wrote.

Unpacking walks by directory fd and never follows a link, so nothing outside the target is touched whatever the names
say. Links that could lead outside, and special files, are left out and named. Both run in a worker thread.
"""

from __future__ import annotations

import os
import stat
import tarfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from libdsec.errors import PlatformError, UsageError
from libdsec.wire import TreeResult

if TYPE_CHECKING:
    from pathlib import Path

SKIPPED_MEMBER = ".dsec-skipped.json"
MAX_TREE_BYTES = 64 * 1024**3
_MAX_SKIPPED_BYTES = 16 * 1024 * 1024
_COPY_BYTES = 256 * 1024
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = {tarfile.CHRTYPE: "character device", tarfile.BLKTYPE: "block device", tarfile.FIFOTYPE: "fifo"}


def pack_tree(root: Path, sink: BinaryIO) -> TreeResult:
    """Write the contents of a local directory as a tar stream; special files are left out and named."""
    result = TreeResult()
    with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_COPY_BYTES) as tar:
        _pack_directory(tar, root, "", result)
    return result


def _pack_directory(tar: tarfile.TarFile, here: Path, prefix: str, result: TreeResult) -> None:
    with os.scandir(here) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        name = f"{prefix}{entry.name}"
        info = tar.gettarinfo(entry.path, arcname=name)
        if info is None or info.type in _KINDS:
            result.skipped.append((name, "special file"))
            continue
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        if info.isreg():
            with open(os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as source:
                tar.addfile(info, source)
        else:
            tar.addfile(info)
        result.files += 1
        if info.isdir():
            _pack_directory(tar, here / entry.name, f"{name}/", result)


@dataclass(slots=True)
class Unpacker:
    """Unpacks one stream below `target`. max_bytes bounds the sum of file sizes."""

    target: Path
    max_bytes: int = MAX_TREE_BYTES
    result: TreeResult = field(default_factory=TreeResult)
    _bytes: int = 0
    _trailer: bytes | None = None
    _modes: list[tuple[tuple[str, ...], int, float]] = field(default_factory=list)

    def run(self, source: BinaryIO) -> TreeResult:
        """Unpack all of it. Raises PlatformError short_tree when the stream ends before its last member."""
        self.target.mkdir(parents=True, exist_ok=True)
        root = os.open(self.target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with tarfile.open(fileobj=source, mode="r|", bufsize=_COPY_BYTES, errors="surrogateescape") as tar:
                for member in tar:
                    self._member(root, tar, member)
            self._finish(root)
        except (tarfile.TarError, EOFError) as error:
            raise PlatformError(
                "short_tree", f"the tree's stream is cut or broken: {error}", retry_after_s=1.0
            ) from error
        finally:
            os.close(root)
        return self.result

    def _member(self, root: int, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        if self._trailer is not None:  # not the last one after all: a file of the user's that has this name
            self._write(root, (SKIPPED_MEMBER,), self._trailer)
            self._trailer = None
        parts = tuple(part for part in member.name.split("/") if part not in {"", "."})
        if ".." in parts:
            self.result.skipped.append((member.name, "name points outside"))
        elif parts == (SKIPPED_MEMBER,) and member.isreg() and member.size <= _MAX_SKIPPED_BYTES:
            body = tar.extractfile(member)
            self._trailer = body.read() if body is not None else b""
        elif member.isdir():
            self._directory(root, parts, member)
        elif not parts or not (member.isreg() or member.issym() or member.islnk()):
            self.result.skipped.append((member.name, _KINDS.get(member.type, "special file")))
        else:
            self._entry(root, tar, parts, member)

    def _entry(self, root: int, tar: tarfile.TarFile, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        if member.issym() and not _stays_inside(parts, member.linkname):
            self.result.skipped.append((member.name, "link points outside"))
            return
        with ExitStack() as stack:
            parent = _descend(root, parts[:-1], stack, make=True)
            _clear(parent, parts[-1])
            if member.issym():
                os.symlink(member.linkname, parts[-1], dir_fd=parent)
            elif member.islnk():
                if not self._hard_link(root, parent, parts[-1], member, stack):
                    return
            else:
                self._regular(tar, parent, parts[-1], member)
        self.result.files += 1

    def _regular(self, tar: tarfile.TarFile, parent: int, name: str, member: tarfile.TarInfo) -> None:
        self._bytes += member.size
        if self._bytes > self.max_bytes:
            raise UsageError(
                "tree_too_large",
                f"the tree holds more than {self.max_bytes} bytes",
                field="max_bytes",
                hint="raise max_bytes",
            )
        body = tar.extractfile(member)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=parent), "wb") as out:
            left = member.size
            while body is not None and left:
                chunk = body.read(min(_COPY_BYTES, left))
                if not chunk:
                    raise EOFError(f"{member.name} ends early")
                out.write(chunk)
                left -= len(chunk)
            os.fchmod(out.fileno(), member.mode & 0o777)
            out.flush()
            os.utime(out.fileno(), (member.mtime, member.mtime))

    def _hard_link(self, root: int, parent: int, name: str, member: tarfile.TarInfo, stack: ExitStack) -> bool:
        parts = tuple(part for part in member.linkname.split("/") if part not in {"", "."})
        try:
            if not parts or ".." in parts:
                raise OSError
            origin = _descend(root, parts[:-1], stack, make=False)
            if not stat.S_ISREG(os.stat(parts[-1], dir_fd=origin, follow_symlinks=False).st_mode):
                raise OSError
            os.link(parts[-1], name, src_dir_fd=origin, dst_dir_fd=parent, follow_symlinks=False)
        except OSError:
            self.result.skipped.append((member.name, "hard link to nothing in this tree"))
            return False
        return True

    def _directory(self, root: int, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        with ExitStack() as stack:
            _descend(root, parts, stack, make=True)
        if parts:
            self._modes.append((parts, (member.mode & 0o777) | 0o700, member.mtime))
            self.result.files += 1

    def _write(self, root: int, parts: tuple[str, ...], body: bytes) -> None:
        _clear(root, parts[-1])
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(parts[-1], flags, 0o644, dir_fd=root), "wb") as out:
            out.write(body)
        self.result.files += 1

    def _finish(self, root: int) -> None:
        if self._trailer is None:
            raise PlatformError("short_tree", "the tree's stream ended before its last member", retry_after_s=1.0)
        try:
            self.result.skipped.extend(msgspec.json.decode(self._trailer, type=list[tuple[str, str]]))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise PlatformError("short_tree", f"the tree's last member can't be read: {error}") from error
        for parts, mode, mtime in reversed(self._modes):  # last, since a read-only directory takes no more entries
            with ExitStack() as stack, suppress(FileNotFoundError, NotADirectoryError):
                fd = _descend(root, parts, stack, make=False)
                os.fchmod(fd, mode)
                os.utime(fd, (mtime, mtime))


def _descend(root: int, parts: tuple[str, ...], stack: ExitStack, *, make: bool) -> int:
    """The fd of a directory below root, reached without following any link; what is in the way is replaced."""
    here = root
    for part in parts:
        try:
            below = os.open(part, _DIR_FLAGS, dir_fd=here)
        except OSError:
            if not make:
                raise
            _clear(here, part)
            os.mkdir(part, 0o755, dir_fd=here)
            below = os.open(part, _DIR_FLAGS, dir_fd=here)
        stack.callback(os.close, below)
        here = below
    return here


def _clear(parent: int, name: str) -> None:
    """Make room for a new entry: a file or link of that name goes; a directory stays and the creation then fails."""
    with suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(name, dir_fd=parent)


def _stays_inside(parts: tuple[str, ...], target: str) -> bool:
    """Whether a link leads inside for certain: leading `..` no deeper than the link lies, none after a name."""
    steps = [part for part in PurePosixPath(target).parts if part != "."]
    if target.startswith("/"):
        return False
    ups = 0
    while ups < len(steps) and steps[ups] == "..":
        ups += 1
    return ups < len(parts) and ".." not in steps[ups:]
