"""Writable layers as btrfs subvolumes, each under a quota group of its own (btrfs-qgroup(8), linux/btrfs.h).

The sandbox sees the subvolume only through overlayfs, which passes none of btrfs's ioctls: it can't make a subvolume
below, outside the quota, as policy.md 3.4 shows for a directly mounted one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nomad_dsec.linux.mountinfo import mount_of, read_mounts
from nomad_dsec.linux.syscalls import SyscallError
from nomad_dsec.linux.upper_layer import UpperLayer, UpperUsage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_SUBVOL_CREATE: Final = 0x5000940E
_SNAP_DESTROY: Final = 0x5000940F
_INO_LOOKUP: Final = 0xD0009412
_FS_INFO: Final = 0x8400941F
_QUOTA_CTL: Final = 0xC0109428
_QGROUP_CREATE: Final = 0x4010942A
_QGROUP_LIMIT: Final = 0x8030942B
_QUOTA_ENABLE: Final = 1
_QUOTA_ENABLE_SIMPLE: Final = 4  # 6.7: counts by owner, without the cost of back references
_LIMIT_MAX_RFER: Final = 1
_FIRST_FREE_OBJECTID: Final = 256
_PROBE: Final = ".probe"


class BtrfsUpperStore:
    """Subvolumes `<directory>/<name>`."""

    kind = "btrfs"

    def __init__(self, directory: Path, filesystem: str) -> None:
        self._directory = directory
        self._qgroups = Path("/sys/fs/btrfs", filesystem, "qgroups")

    @classmethod
    def probe(cls, directory: Path, *, node: str) -> BtrfsUpperStore | str:
        """The store, or the reason why the directory can't hold one; tries a limited subvolume."""
        del node
        mount = mount_of(str(directory.resolve()), read_mounts())
        if mount is None or mount.fstype != "btrfs":
            return f"{directory} is on {mount.fstype if mount else 'an unknown file system'}, not btrfs"
        try:
            with _opened(directory) as fd:
                _enable_quota(fd)
                store = cls(directory, _filesystem_id(fd))
            store._remove(_PROBE, 0)
            layer = store._create(_PROBE, disk_mib=16, owner=0)
            try:
                used = store._referenced(layer.quota_id)
            finally:
                store._remove(_PROBE, layer.quota_id)
        except OSError as error:
            return f"{error.strerror or error} ({error.filename or directory})"
        return store if used is not None else "the kernel shows no quota groups in /sys/fs/btrfs (before 5.9)"

    async def create(self, name: str, *, disk_mib: int, inodes: int, owner: int) -> UpperLayer:
        """A subvolume with a byte limit; its metadata counts, so inodes are bounded by the same number."""
        del inodes
        return await asyncio.to_thread(self._create, name, disk_mib=disk_mib, owner=owner)

    async def usage(self, layer: UpperLayer, *, pid: int) -> UpperUsage:
        """Referenced bytes of the quota group; lags behind writes until the next commit."""
        del pid
        return UpperUsage(used_bytes=self._referenced(layer.quota_id) or 0, used_inodes=0)

    async def remove(self, layer: UpperLayer) -> None:
        """Drop the subvolume; its space is freed by the file system's cleaner."""
        await asyncio.to_thread(self._remove, layer.name, layer.quota_id)

    async def sweep(self, keep: Collection[str]) -> list[str]:
        """Remove subvolumes that no one owns."""
        found = [path.name for path in self._directory.iterdir() if path.name not in keep]
        for name in found:
            await asyncio.to_thread(self._remove, name, 0)
        return sorted(found)

    def _create(self, name: str, *, disk_mib: int, owner: int) -> UpperLayer:
        path = self._directory / name
        with _opened(self._directory) as parent:
            _ioctl(parent, _SUBVOL_CREATE, _volume_args(name), "BTRFS_IOC_SUBVOL_CREATE", path)
        quota_id = 0
        try:
            with _opened(path) as fd:
                quota_id = _subvolume_id(fd, path)
                limit = struct.pack("<QQQQQQ", quota_id, _LIMIT_MAX_RFER, disk_mib << 20, 0, 0, 0)
                _ioctl(fd, _QGROUP_LIMIT, limit, "BTRFS_IOC_QGROUP_LIMIT", path)
            for part in ("upper", "work"):
                (path / part).mkdir(mode=0o755)
                os.chown(path / part, owner, owner)
        except BaseException:
            self._remove(name, quota_id)
            raise
        return UpperLayer(kind=self.kind, name=name, path=str(path), quota_id=quota_id)

    def _remove(self, name: str, quota_id: int) -> None:
        path = self._directory / name
        if not quota_id:
            with contextlib.suppress(FileNotFoundError, SyscallError), _opened(path) as fd:
                quota_id = _subvolume_id(fd, path)
        with _opened(self._directory) as parent:
            try:
                _ioctl(parent, _SNAP_DESTROY, _volume_args(name), "BTRFS_IOC_SNAP_DESTROY", path)
            except SyscallError as error:
                if error.errno != errno.ENOENT:
                    raise
            # Newer kernels drop the group with the subvolume; older ones keep an empty one, which costs a tree item.
            with contextlib.suppress(SyscallError):
                _ioctl(parent, _QGROUP_CREATE, struct.pack("<QQ", 0, quota_id), "BTRFS_IOC_QGROUP_CREATE", path)

    def _referenced(self, quota_id: int) -> int | None:
        try:
            return int((self._qgroups / f"0_{quota_id}" / "referenced").read_text(encoding="ascii"))
        except FileNotFoundError:
            return None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)


def _enable_quota(fd: int) -> None:
    for command in (_QUOTA_ENABLE_SIMPLE, _QUOTA_ENABLE):
        try:
            _ioctl(fd, _QUOTA_CTL, struct.pack("<QQ", command, 0), "BTRFS_IOC_QUOTA_CTL", Path())
        except SyscallError as error:
            if error.errno == errno.EEXIST:
                return  # on already
            if command == _QUOTA_ENABLE:
                raise
        else:
            return


def _filesystem_id(fd: int) -> str:
    raw = _ioctl(fd, _FS_INFO, b"\0" * 1024, "BTRFS_IOC_FS_INFO", Path())[16:32].hex()
    return "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))


def _subvolume_id(fd: int, path: Path) -> int:
    request = struct.pack("<QQ", 0, _FIRST_FREE_OBJECTID).ljust(4096, b"\0")
    (tree,) = struct.unpack_from("<Q", _ioctl(fd, _INO_LOOKUP, request, "BTRFS_IOC_INO_LOOKUP", path))
    return int(tree)


def _volume_args(name: str) -> bytes:
    return struct.pack("<q", 0) + os.fsencode(name).ljust(4088, b"\0")


def _ioctl(fd: int, request: int, argument: bytes, name: str, path: Path) -> bytes:
    buffer = bytearray(argument)
    try:
        fcntl.ioctl(fd, request, buffer)
    except OSError as error:
        raise SyscallError(error.errno or 0, name, str(path)) from error
    return bytes(buffer)
