"""Writable layers on the real kernel: bounded in bytes and inodes, unlink still works when full, nothing is left."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from libdsec.errors import PlatformError, UsageError

from nomad_dsec.linux import upper
from nomad_dsec.linux.syscalls import MNT_DETACH, mount, umount2
from tests.kit.abilities import make_prjquota_image, needs

pytestmark = needs("root")
MIB = 1 << 20


def fill(path: Path, limit_mib: int) -> int:
    """Write until refused; the errno."""
    block = os.urandom(MIB)
    with open(path, "wb", buffering=0) as file:
        for _ in range(limit_mib):
            try:
                file.write(block)
                os.fdatasync(file.fileno())
            except OSError as error:
                return error.errno or 0
    return 0


def flood(path: Path, count: int) -> int:
    """Make files until refused; how many there are."""
    for number in range(count):
        try:
            (path / str(number)).touch()
        except OSError:
            return number
    return count


def as_user(uid: int, inside: str, act: Callable[..., int], *args: object) -> int:
    """The result of `act` in a child in that directory without privileges: CAP_SYS_RESOURCE writes past a quota."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            os.chdir(inside)  # which the user can't reach by its path
            os.setgid(uid)
            os.setuid(uid)
            code = act(*args)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


async def test_tmpfs_is_bounded_in_bytes_and_inodes(tmp_path: Path) -> None:
    store = upper.probe(tmp_path / "store", node="n1").store
    assert store.kind == "tmpfs"
    layer = await store.create("sb-1", disk_mib=8, inodes=64, owner=7000)
    assert upper.adopt_layer(layer.to_record()) == layer
    point = tmp_path / "point"
    point.mkdir()
    mount("tmpfs", str(point), "tmpfs", 0, layer.tmpfs_data)
    try:
        assert point.stat().st_uid == 7000
        assert fill(point / "big", 64) == errno.ENOSPC
        assert upper.statfs_usage(str(point)).used_bytes == 8 * MIB
        (point / "big").unlink()
        made = 0
        with pytest.raises(OSError) as full:
            for made in range(200):
                (point / str(made)).touch()
        assert full.value.errno == errno.ENOSPC
        assert 40 < made < 64
    finally:
        umount2(str(point), MNT_DETACH)
    await store.remove(layer)
    assert await store.sweep(()) == []


def test_reasons_are_told(tmp_path: Path) -> None:
    choice = upper.probe(tmp_path / "store", node="n1")
    assert choice.reasons["tmpfs"] == ""
    assert "not btrfs" in choice.reasons["btrfs"]
    assert choice.reasons["prjquota"]
    assert list((tmp_path / "store").iterdir()) == []
    with pytest.raises(PlatformError) as missing:
        upper.probe(tmp_path / "store", node="n1", kind="btrfs")
    assert missing.value.code == "upper_unavailable"
    with pytest.raises(UsageError):
        upper.probe(tmp_path / "store", node="n1", kind="zfs")  # type: ignore[arg-type]


@pytest.fixture
def btrfs(tmp_path: Path):
    image, point = tmp_path / "image", tmp_path / "point"
    with open(image, "wb") as file:
        file.truncate(256 * MIB)
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True, timeout=30)
    point.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True, timeout=30)
    yield point
    subprocess.run(["umount", "-d", str(point)], check=True, timeout=30)


@needs("btrfs", "mkfs.btrfs")
async def test_btrfs_is_bounded_and_goes_whole(btrfs: Path) -> None:
    store = upper.probe(btrfs / "upper", node="n1").store
    assert store.kind == "btrfs"
    layer = await store.create("sb-1", disk_mib=24, inodes=0, owner=7000)
    assert Path(layer.upper).stat().st_uid == Path(layer.work).stat().st_gid == 7000
    assert fill(Path(layer.upper) / "big", 64) == errno.EDQUOT
    os.sync()
    usage = await store.usage(layer, pid=os.getpid())
    assert 12 * MIB < usage.used_bytes <= 24 * MIB
    (Path(layer.upper) / "big").unlink()
    other = await store.create("sb-2", disk_mib=24, inodes=0, owner=8000)
    assert other.quota_id != layer.quota_id
    with pytest.raises(OSError):
        await store.create("sb-2", disk_mib=24, inodes=0, owner=8000)
    assert Path(other.upper).is_dir()
    assert await store.sweep({"sb-2"}) == ["sb-1"]
    await store.remove(layer)
    await store.remove(other)
    assert list((btrfs / "upper").iterdir()) == []


@needs("btrfs", "mkfs.btrfs")
async def test_btrfs_inode_flood_meets_the_same_bound(btrfs: Path) -> None:
    store = upper.probe(btrfs / "upper", node="n1").store
    layer = await store.create("sb-1", disk_mib=8, inodes=0, owner=0)
    with pytest.raises(OSError) as full:
        for number in range(200_000):
            os.close(os.open(f"{layer.upper}/{number}", os.O_CREAT | os.O_WRONLY))
    assert full.value.errno == errno.EDQUOT
    await store.remove(layer)


@pytest.fixture
def ext4(tmp_path: Path):
    image, point = tmp_path / "image", tmp_path / "point"
    make_prjquota_image(image)
    point.mkdir()
    subprocess.run(["mount", "-o", "loop,prjquota", str(image), str(point)], check=True, timeout=30)
    yield point
    subprocess.run(["umount", "-d", str(point)], check=True, timeout=30)


@needs("ext4-prjquota")
async def test_project_quota_bounds_bytes_and_inodes_of_each_layer(ext4: Path) -> None:
    store = upper.probe(ext4 / "upper", node="n1").store
    assert store.kind == "prjquota"
    layer = await store.create("sb-1", disk_mib=8, inodes=64, owner=7000)
    other = await store.create("sb-2", disk_mib=8, inodes=64, owner=8000)
    assert other.quota_id != layer.quota_id
    assert Path(layer.upper).stat().st_uid == Path(layer.work).stat().st_gid == 7000
    assert as_user(7000, layer.upper, fill, Path("big"), 32) == errno.EDQUOT
    usage = await store.usage(layer, pid=os.getpid())
    assert 7 * MIB < usage.used_bytes <= 8 * MIB
    assert as_user(8000, other.upper, fill, Path("small"), 4) == 0
    (Path(layer.upper) / "big").unlink()
    assert 50 < as_user(7000, layer.upper, flood, Path(), 200) <= 64
    assert (await store.usage(layer, pid=os.getpid())).used_inodes == 64 + 3
    assert await store.sweep({"sb-2"}) == ["sb-1"]
    await store.remove(layer)
    again = await store.create("sb-1", disk_mib=8, inodes=64, owner=7000)
    assert (await store.usage(again, pid=os.getpid())).used_inodes == 3
    for last in (again, other):
        await store.remove(last)
    assert list((ext4 / "upper").iterdir()) == []
