"""Writable layers as directories under project quotas of ext4 or XFS (quotactl(2), ioctl_fsgetxattr in linux/fs.h).

Needs a file system mounted with prjquota and a kernel with CONFIG_QFMT_V2 (ext4) or CONFIG_XFS_QUOTA. The sandbox can't
change a file's project: overlayfs passes FS_IOC_FSSETXATTR on, so the default profile's filter refuses it.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import itertools
import os
import shutil
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nomad_dsec.linux.syscalls import SyscallError, quotactl_fd
from nomad_dsec.linux.upper_layer import UpperLayer, UpperUsage

if TYPE_CHECKING:
    from collections.abc import Collection

_FSGETXATTR: Final = 0x801C581F
_FSSETXATTR: Final = 0x401C5820
_XFLAG_PROJINHERIT: Final = 0x200
_FSXATTR: Final = struct.Struct("<IIIII8x")  # struct fsxattr: xflags, extsize, nextents, projid, cowextsize

# linux/quota.h: QCMD(cmd, PRJQUOTA); struct if_dqblk
_PRJQUOTA: Final = 2
_Q_GETQUOTA: Final = 0x800007
_Q_SETQUOTA: Final = 0x800008
_QIF_LIMITS: Final = 1 | 4  # QIF_BLIMITS | QIF_ILIMITS
_DQBLK: Final = struct.Struct("<8QI4x")
_BLOCK: Final = 1024
_PROBE: Final = ".probe"


class ProjectQuotaUpperStore:
    """Directories `<directory>/<name>`, each a project of its own with an id from the node's million."""

    kind = "prjquota"

    def __init__(self, directory: Path, *, node: str) -> None:
        self._directory = directory
        # Two nodes on one file system must not share projects: each starts in its own million.
        self._first = 0x4000_0000 + (zlib.crc32(node.encode()) % 1024) * 0x10_0000
        self._ids = itertools.count(self._first)

    @classmethod
    def probe(cls, directory: Path, *, node: str) -> ProjectQuotaUpperStore | str:
        """The store, or why not; tries a limit and reads it back."""
        store = cls(directory, node=node)
        try:
            layer = store._create(_PROBE, disk_mib=16, inodes=64, owner=0)
            try:
                limits = store._read(layer)
            finally:
                store._remove(layer.name, layer.quota_id)
        except OSError as error:
            return f"{error.strerror or error} ({error.filename or directory})"
        return store if limits[0] * _BLOCK == 16 << 20 else "the kernel did not keep the limit"

    async def create(self, name: str, *, disk_mib: int, inodes: int, owner: int) -> UpperLayer:
        """A directory whose project may hold that much."""
        return await asyncio.to_thread(self._create, name, disk_mib=disk_mib, inodes=inodes, owner=owner)

    async def usage(self, layer: UpperLayer, *, pid: int) -> UpperUsage:
        """The project's own count."""
        del pid
        block = self._read(layer)
        return UpperUsage(used_bytes=block[2], used_inodes=block[5])

    async def remove(self, layer: UpperLayer) -> None:
        """Delete the tree, then the limit."""
        await asyncio.to_thread(self._remove, layer.name, layer.quota_id)

    async def sweep(self, keep: Collection[str]) -> list[str]:
        """Remove directories that no one owns."""
        found = [path.name for path in self._directory.iterdir() if path.name not in keep]
        for name in found:
            await asyncio.to_thread(self._remove, name, _project_of(self._directory / name))
        return sorted(found)

    def _create(self, name: str, *, disk_mib: int, inodes: int, owner: int) -> UpperLayer:
        path = self._directory / name
        path.mkdir(mode=0o755)
        project = 0
        try:
            project = self._free_project(path)
            # Upper and work exist already and are counted; the sandbox gets what it was promised besides.
            _set_limits(path, project, disk_mib << 20, inodes + 3)
            _set_project(path, project)
            for part in ("upper", "work"):
                (path / part).mkdir(mode=0o755)
                os.chown(path / part, owner, owner)
        except BaseException:
            self._remove(name, project)
            raise
        return UpperLayer(kind=self.kind, name=name, path=str(path), quota_id=project)

    def _free_project(self, path: Path) -> int:
        for project in self._ids:
            if project >= self._first + 0x10_0000:
                self._ids = itertools.count(self._first)
                continue
            if _quota(path, project)[5] == 0:  # nobody's inodes, so neither a live nor a half-removed layer's
                return project
        raise AssertionError("itertools.count ends never")

    def _read(self, layer: UpperLayer) -> tuple[int, ...]:
        return _quota(Path(layer.path), layer.quota_id)

    def _remove(self, name: str, project: int) -> None:
        path = self._directory / name
        if path.exists():
            shutil.rmtree(path)
        if project:
            _set_limits(self._directory, project, 0, 0)


def _set_project(path: Path, project: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        attributes = bytearray(_FSXATTR.size)
        fcntl.ioctl(fd, _FSGETXATTR, attributes)
        flags, extent, extents, _, cow = _FSXATTR.unpack(attributes)
        fcntl.ioctl(fd, _FSSETXATTR, _FSXATTR.pack(flags | _XFLAG_PROJINHERIT, extent, extents, project, cow))
    except OSError as error:
        raise SyscallError(error.errno or 0, "FS_IOC_FSSETXATTR", str(path)) from error
    finally:
        os.close(fd)


def _project_of(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        attributes = bytearray(_FSXATTR.size)
        fcntl.ioctl(fd, _FSGETXATTR, attributes)
    finally:
        os.close(fd)
    return int(_FSXATTR.unpack(attributes)[3])


def _quota(path: Path, project: int) -> tuple[int, ...]:
    buffer = ctypes.create_string_buffer(_DQBLK.size)
    _quotactl(path, _Q_GETQUOTA, project, buffer)
    return _DQBLK.unpack(buffer.raw)


def _set_limits(path: Path, project: int, limit_bytes: int, inodes: int) -> None:
    blocks = limit_bytes // _BLOCK
    block = _DQBLK.pack(blocks, blocks, 0, inodes, inodes, 0, 0, 0, _QIF_LIMITS)
    _quotactl(path, _Q_SETQUOTA, project, ctypes.create_string_buffer(block, _DQBLK.size))


def _quotactl(path: Path, command: int, project: int, buffer: ctypes.Array[ctypes.c_char]) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        quotactl_fd(fd, (command << 8) | _PRJQUOTA, project, buffer)
    except SyscallError as error:
        raise SyscallError(error.errno or 0, error.syscall, f"{path} project {project}") from error
    finally:
        os.close(fd)
