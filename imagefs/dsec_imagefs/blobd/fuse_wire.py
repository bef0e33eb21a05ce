"""The part of the FUSE protocol that a read-only server of a few big files needs: bytes in, bytes out. Pure.

Names and layouts are those of Linux's include/uapi/linux/fuse.h (7.41); see fuse(4).
"""

from __future__ import annotations

import errno
import stat
from dataclasses import dataclass
from struct import Struct

KERNEL_VERSION = 7
MINOR = 41  # what we speak; older kernels negotiate down
OLDEST_MINOR = 31  # Linux 5.4

IN_HEADER = Struct("=IIQQIIIHH")  # len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding
OUT_HEADER = Struct("=IiQ")  # len, error, unique
_INIT_IN = Struct("=IIII")  # major, minor, max_readahead, flags; flags2 follows from 7.36 on
_INIT_OUT = Struct("=IIIIHHIIHHIIH22x")  # ..., max_pages, map_alignment, flags2, max_stack_depth, unused
_ATTR = Struct("=QQQQQQIIIIIIIIII")
_ENTRY_OUT = Struct("=QQQQII")
_ATTR_OUT = Struct("=QII")
OPEN_IN = Struct("=II")  # flags, open_flags
_OPEN_OUT = Struct("=QIi")  # fh, open_flags, backing_id
READ_IN = Struct("=QQI")  # fh, offset, size; the rest is of no use here
RELEASE_IN = Struct("=QII")  # fh, flags, release_flags
INTERRUPT_IN = Struct("=Q")  # unique
_DIRENT = Struct("=QQII")
_STATFS = Struct("=QQQQQIIII24x")
assert (_INIT_OUT.size, _ATTR.size, _ENTRY_OUT.size, _STATFS.size) == (64, 88, 40, 80)

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 14, 15, 17, 18
GETXATTR, LISTXATTR, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR = 22, 23, 25, 26, 27, 28, 29
ACCESS, INTERRUPT, DESTROY, IOCTL, BATCH_FORGET, LSEEK, STATX = 34, 36, 38, 39, 42, 46, 52
#: setattr, symlink, mknod, mkdir, unlink, rmdir, rename, link, write, setxattr, removexattr, create, fallocate,
#: rename2, copy_file_range, tmpfile
CHANGING = frozenset({4, 6, 8, 9, 10, 11, 12, 13, 16, 21, 24, 35, 43, 45, 47, 51})
SILENT = frozenset({FORGET, BATCH_FORGET})  # the kernel waits for no answer to these

ASYNC_READ = 1 << 0
PARALLEL_DIROPS = 1 << 18
MAX_PAGES = 1 << 22
INIT_EXT = 1 << 30
DIRECT_IO_ALLOW_MMAP = 1 << 36
PASSTHROUGH = 1 << 37
HAS_RESEND = 1 << 39
UNIQUE_RESEND = 1 << 63

FOPEN_DIRECT_IO = 1 << 0
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_PASSTHROUGH = 1 << 7

NOTIFY_RESEND = 7

ROOT_ID = 1
MAX_READ_BYTES = 1 << 20
PAGES = MAX_READ_BYTES // 4096
#: The kernel refuses reads into less than this: FUSE_MIN_READ_BUFFER, or header + max_write.
REQUEST_BYTES = 16384
ANSWER_BYTES = OUT_HEADER.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Negotiated:
    """What INIT settled; a new worker gets it from the supervisor, since the kernel asks only once."""

    minor: int
    flags: int

    @property
    def resend(self) -> bool:
        """Requests that a dead worker had taken can be asked for again."""
        return bool(self.flags & HAS_RESEND)

    @property
    def passthrough(self) -> bool:
        """Files can be read by the kernel alone."""
        return bool(self.flags & PASSTHROUGH)


def answer_init(request: bytes, *, wanted: int) -> tuple[bytes, Negotiated]:
    """The answer to INIT, and what holds from then on.

    Raises:
        ValueError: not an INIT, or of a kernel before 5.4.
    """
    length, opcode, unique, *_ = IN_HEADER.unpack_from(request)
    if opcode != INIT or length < IN_HEADER.size + _INIT_IN.size:
        raise ValueError(f"the first request is no INIT but {opcode}")
    major, minor, readahead, offered = _INIT_IN.unpack_from(request, IN_HEADER.size)
    if major != KERNEL_VERSION or minor < OLDEST_MINOR:
        raise ValueError(f"the kernel speaks FUSE {major}.{minor}; 7.{OLDEST_MINOR} (Linux 5.4) is the oldest we do")
    if offered & INIT_EXT and length >= IN_HEADER.size + _INIT_IN.size + 4:
        offered |= int.from_bytes(request[IN_HEADER.size + 16 : IN_HEADER.size + 20], "little") << 32
    flags = (ASYNC_READ | PARALLEL_DIROPS | MAX_PAGES | INIT_EXT | DIRECT_IO_ALLOW_MMAP | wanted) & offered
    settled = Negotiated(minor=min(minor, MINOR), flags=flags)
    depth = 1 if settled.passthrough else 0
    body = _INIT_OUT.pack(
        KERNEL_VERSION,
        settled.minor,
        min(readahead, MAX_READ_BYTES),
        flags & 0xFFFFFFFF,
        256,  # max_background: the readahead and direct reads the kernel keeps under way
        192,
        4096,  # max_write: nobody writes
        1,
        PAGES,
        0,
        flags >> 32,
        depth,
        0,
    )
    return answer(unique, body), settled


def answer(unique: int, body: bytes = b"") -> bytes:
    """A good answer."""
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), 0, unique) + body


def answer_error(unique: int, number: int) -> bytes:
    """An answer that carries an errno (positive here)."""
    return OUT_HEADER.pack(OUT_HEADER.size, -number, unique)


def notify_resend() -> bytes:
    """Ask for everything that was taken and not answered: FUSE_NOTIFY_RESEND, Linux 6.9."""
    return OUT_HEADER.pack(OUT_HEADER.size, NOTIFY_RESEND, 0)


def attr_of(nodeid: int, size: int) -> bytes:
    """A struct fuse_attr of a blob, or of the root directory."""
    mode = stat.S_IFDIR | 0o555 if nodeid == ROOT_ID else stat.S_IFREG | 0o444
    links = 2 if nodeid == ROOT_ID else 1
    return _ATTR.pack(nodeid, size, (size + 511) // 512, 0, 0, 0, 0, 0, 0, mode, links, 0, 0, 0, 4096, 0)


def entry_out(nodeid: int, size: int, *, name_valid_s: int, attr_valid_s: int) -> bytes:
    """A struct fuse_entry_out: a name that was found."""
    return _ENTRY_OUT.pack(nodeid, 0, name_valid_s, attr_valid_s, 0, 0) + attr_of(nodeid, size)


def attr_out(nodeid: int, size: int, *, valid_s: int) -> bytes:
    """A struct fuse_attr_out."""
    return _ATTR_OUT.pack(valid_s, 0, 0) + attr_of(nodeid, size)


def open_out(fh: int, flags: int, backing_id: int = 0) -> bytes:
    """A struct fuse_open_out."""
    return _OPEN_OUT.pack(fh, flags, backing_id)


def statfs_out(files: int) -> bytes:
    """A struct fuse_statfs_out of a full, read-only file system."""
    return _STATFS.pack(0, 0, 0, files, 0, 4096, 255, 4096, 0)


def dirents(names: list[tuple[int, bytes, bool]], offset: int, room: int) -> bytes:
    """As many struct fuse_dirent as fit; entry i has the offset i + 1.

    Args:
        names: nodeid, name, and whether it is a directory, in a stable order.
        offset: where the last answer ended.
        room: bytes the kernel can take.
    """
    out = bytearray()
    for place in range(offset, len(names)):
        nodeid, name, is_dir = names[place]
        kind = stat.S_IFDIR >> 12 if is_dir else stat.S_IFREG >> 12
        one = _DIRENT.pack(nodeid, place + 1, len(name), kind) + name
        one += bytes(-len(one) % 8)
        if len(out) + len(one) > room:
            break
        out += one
    return bytes(out)


def refusal(opcode: int) -> int:
    """The errno for a request that this file system has no answer to."""
    if opcode in CHANGING:
        return errno.EROFS
    return errno.ENOTTY if opcode == IOCTL else errno.ENOSYS
