"""Merged images as the kernel sees them: over devices, and over one file that holds metadata and blobs end to end."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import tarfile
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest
from dsec_imagefs.erofs.layout import plan_layout
from dsec_imagefs.erofs.ondisk import BLOCK
from dsec_imagefs.erofs.reader import ErofsReader
from dsec_imagefs.errors import ImageError
from dsec_imagefs.mountapi import MOUNT_ATTR_RDONLY, mount_erofs
from dsec_imagefs.syscalls import MS_RDONLY, mount_fs, umount
from dsec_imagefs.tree import Node, StoredContent, new_directory
from hypothesis import HealthCheck, given, settings

from tests.kit import tarbytes as t
from tests.kit.abilities import needs
from tests.kit.layers import build, merge, merged_facts
from tests.kit.trees import directory_facts
from tests.unit.imagefs.strategies import layer_stacks

pytestmark = needs("root", "erofs")

SPARSE = [(0, b"a" * 10), (9_000_000, b"z" * 5000)]
SHARED = t.pax([(b"SCHILY.xattr.user.same", b"value" * 30), (b"SCHILY.xattr.trusted.t", b"1")])
BASE = (
    t.directory(b"usr") + t.directory(b"usr/lib") + t.symlink(b"lib", b"usr/lib")
    + t.file(b"usr/lib/old", b"old" * 4000) + SHARED + t.file(b"one", b"1" * 10)
    + SHARED + t.file(b"two", b"2" * 70_000, mode=0o4755)
    + t.gnu_sparse(b"sparse", SPARSE, 10_000_000) + t.header(b"null0", b"3") + t.file(b"empty")
)  # fmt: skip
TOP = (
    t.file(b"lib/new", b"new" * 5000) + t.file(b"lib/.wh.old") + t.hardlink(b"hard", b"one") + SHARED
    + t.pax_sparse(b"sparse2", SPARSE, 10_000_000) + b"".join(t.file(b"many/%060d" % n, b"%d" % n) for n in range(200))
)  # fmt: skip


@contextmanager
def attached(target: Path, source: Path, devices: list[str] | None = None, *, old_call: bool = False):
    target.mkdir(exist_ok=True)
    if devices and not old_call:
        mount_erofs(str(source), target, devices=devices, flags=MOUNT_ATTR_RDONLY)
    else:
        mount_fs(str(source), target, "erofs", MS_RDONLY, ",".join(f"device={path}" for path in devices or ()))
    try:
        yield target
    finally:
        umount(target)


def stacked(tars: list[bytes], out: Path):
    """The merged image in a file, the facts our reader finds, and its devices' paths."""
    merged = merge(build(tars, out), out)
    (out / "meta").write_bytes(merged.metadata)
    return out / "meta", merged_facts(merged, out), [str(out / blob) for blob in merged.devices]


def flattened(meta: Path, out: Path) -> Path:
    """Metadata and blobs end to end, each from its place on, the whole filled up to 2 MiB: what a VM is given."""
    fd = os.open(meta, os.O_RDONLY)
    try:
        devices = ErofsReader(fd).devices
    finally:
        os.close(fd)
    flat = out / "flat"
    with flat.open("wb") as file:
        file.write(meta.read_bytes())
        for device in devices:
            assert device.uniaddr % 512 == 0
            file.seek(device.uniaddr * BLOCK)
            file.write((out / device.blob).read_bytes())
        file.truncate(file.tell() + -file.tell() % (2 << 20))
    return flat


@pytest.mark.parametrize("old_call", [False, True], ids=["fsconfig", "mount"])
def test_the_kernel_reads_every_entry_over_devices(tmp_path, old_call):
    meta, facts, devices = stacked([BASE, TOP], tmp_path)
    with attached(tmp_path / "mnt", meta, devices, old_call=old_call) as target:
        assert directory_facts(str(target)) == facts
    assert (len(devices), len(facts)) == (2, 13 + 200)


def test_the_kernel_reads_every_entry_of_one_flat_file_without_devices(tmp_path):
    meta, facts, _ = stacked([BASE, TOP], tmp_path)
    with attached(tmp_path / "mnt", flattened(meta, tmp_path)) as target:
        assert directory_facts(str(target)) == facts


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layer_stacks)
def test_any_stack_of_layers_is_in_the_kernel_what_it_is_to_us(tmp_path, tars):
    try:
        meta, facts, devices = stacked(tars, tmp_path)
    except ImageError:  # a stack that is an error; tests/unit says which are
        return
    with attached(tmp_path / "mnt", meta, devices) as target:
        assert directory_facts(str(target)) == facts


def test_300_layers_mount_over_devices_and_flat(tmp_path):
    tars = [SHARED + t.file(b"n%03d" % n, b"%d" % n * 3000) + t.file(b"same", b"%d" % n) for n in range(300)]
    meta, facts, devices = stacked(tars, tmp_path)
    assert len(devices) == 300
    with attached(tmp_path / "mnt", meta, devices) as target:
        assert directory_facts(str(target)) == facts
        assert (target / "same").read_bytes() == b"299"
    with attached(tmp_path / "mnt", flattened(meta, tmp_path)) as target:
        for n in (0, 150, 299):
            assert (target / f"n{n:03d}").read_bytes() == b"%d" % n * 3000


def test_the_kernel_finds_300_shared_attributes_of_many_files(tmp_path):
    records = [(b"SCHILY.xattr.user.%03d" % n, b"value %d" % n) for n in range(300)]
    tar = b"".join(t.pax([*records, (b"SCHILY.xattr.trusted.own", b"%d" % n)]) + t.file(b"f%d" % n) for n in range(5))
    meta, facts, _ = stacked([tar], tmp_path)
    with attached(tmp_path / "mnt", meta) as target:
        assert directory_facts(str(target)) == facts
        assert os.getxattr(target / "f3", "user.299") == b"value 299"
        assert len(os.listxattr(target / "f3")) == 301


def test_a_layer_mounts_alone_over_its_blob(tmp_path):
    layer = build([BASE], tmp_path)[0]
    with attached(tmp_path / "mnt", tmp_path / layer.meta.digest, [str(tmp_path / layer.blob.digest)]) as target:
        assert (target / "two").read_bytes() == b"2" * 70_000
        assert (target / "lib" / "old").read_bytes() == b"old" * 4000


def test_a_mount_lives_on_a_blob_that_lies_elsewhere_and_fails_where_it_is_cut(tmp_path):
    """Positive and negative of one thing: data comes from the device, and a missing device is an error, no zeros."""
    meta, _, devices = stacked([t.file(b"f", b"x" * 100_000)], tmp_path)
    moved = Path(devices[0]).rename(tmp_path / "moved")
    with attached(tmp_path / "mnt", meta, [str(moved)]) as target:
        assert (target / "f").read_bytes() == b"x" * 100_000
    os.truncate(moved, 8192)
    with attached(tmp_path / "mnt", meta, [str(moved)]) as target:
        fd = os.open(target / "f", os.O_RDONLY)
        try:
            with pytest.raises(OSError, match="Input/output error"):
                os.pread(fd, 4096, 50_000)
        finally:
            os.close(fd)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_entry_by_entry_the_mount_is_what_pythons_tarfile_says(tmp_path, form):
    data = _python_tar(form)
    meta, _, devices = stacked([data], tmp_path)
    with attached(tmp_path / "mnt", meta, devices) as target, tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
        for member in members:
            path = target / member.name
            info = path.lstat()
            assert (info.st_mode & 0o7777, info.st_uid, info.st_gid) == (member.mode, member.uid, member.gid)
            assert info.st_mtime == member.mtime
            if member.isreg() or member.islnk():
                body = tar.extractfile(member)
                assert body is not None
                assert path.read_bytes() == body.read()
                assert info.st_size == member.size or member.islnk()
            elif member.issym():
                assert str(path.readlink()) == member.linkname
            elif member.ischr() or member.isblk():
                assert info.st_rdev == os.makedev(member.devmajor, member.devminor)
        assert len(members) == len({member.name for member in members}) == 57
        assert (target / "d0" / "hard").stat().st_ino == (target / "d0" / "f0").stat().st_ino


def _python_tar(form: int) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=form) as tar:
        for number in range(50):
            info = tarfile.TarInfo(f"d{number % 5}/f{number}" if number >= 5 else f"d{number}/f{number}")
            info.uid, info.gid, info.mode, info.mtime = number, number * 40, 0o600 + number, 1_700_000_000 + number
            body = bytes([number]) * (number * 997)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
        for name, kind, link in (
            ("d0/hard", tarfile.LNKTYPE, "d0/f0"), ("d0/sym", tarfile.SYMTYPE, "../d1/" + "x" * 80),
            ("d0/pipe", tarfile.FIFOTYPE, ""), ("d0/chr", tarfile.CHRTYPE, ""), ("d0/blk", tarfile.BLKTYPE, ""),
            ("d5", tarfile.DIRTYPE, ""), ("d5/" + "n" * 90, tarfile.REGTYPE, ""),
        ):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode, info.mtime = kind, link, 0o640, 1_600_000_000
            if kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
                info.devmajor, info.devminor = 8, 17
            if kind == tarfile.LNKTYPE:  # a link's own header says what its file says
                info.mode, info.mtime = 0o600, 1_700_000_000
            tar.addfile(info)
    return raw.getvalue()


@needs("fsck.erofs", "dump.erofs")
def test_fsck_and_dump_find_nothing_wrong_with_the_metadata(tmp_path):
    """Version 1.5 knows devices, but neither the flat form nor, with --extract, addresses by uniaddr: not tried."""
    layers = build([BASE, TOP], tmp_path)
    meta, _, devices = stacked([BASE, TOP], tmp_path)
    alone = [(str(tmp_path / layer.meta.digest), [str(tmp_path / layer.blob.digest)]) for layer in layers]
    for image, blobs in [(str(meta), devices), *alone]:
        given_devices = [f"--device={path}" for path in blobs]
        for argv in (["fsck.erofs", *given_devices, image], ["dump.erofs", "-s", "-S", *given_devices, image]):
            done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "<E>" not in done.stdout + done.stderr
    shown = subprocess.run(
        ["dump.erofs", "--path=/two", *[f"--device={path}" for path in devices], str(meta)],
        capture_output=True, text=True, timeout=30, check=True,
    ).stdout  # fmt: skip
    assert "70000" in shown


def test_an_overlay_shows_the_same_as_the_merged_image(tmp_path):
    """What a sandbox sees: no whiteout, no attribute of ours or of overlayfs comes through (bugs 9 and 15)."""
    meta, facts, devices = stacked([BASE, TOP], tmp_path)
    for name in ("upper", "work", "merged"):
        (tmp_path / name).mkdir()
    with attached(tmp_path / "mnt", meta, devices) as lower:
        options = f"lowerdir={lower},upperdir={tmp_path / 'upper'},workdir={tmp_path / 'work'}"
        mount_fs("overlay", tmp_path / "merged", "overlay", 0, options)
        try:
            seen = {
                p.relative_to(tmp_path / "merged").as_posix() for p in islice((tmp_path / "merged").rglob("*"), 1000)
            }
            assert seen == {path.decode() for path in facts if path} - {"null0"}  # overlayfs hides a device 0:0
            assert (tmp_path / "merged" / "two").stat().st_mode & 0o7777 == 0o4755
            assert os.listxattr(tmp_path / "merged" / "usr") == []
            assert not (tmp_path / "merged" / "usr" / "lib" / "old").exists()
        finally:
            umount(tmp_path / "merged")


def test_data_beyond_4_gib_and_files_of_more_are_read_right(tmp_path):
    """Block numbers above 2^20 and sizes above 2^32, on sparse blobs, over devices (bug 16)."""
    gib, root, blobs = 1 << 30, new_directory(), []
    for name, at in ((b"first", 0), (b"far", 9 * gib), (b"large", 5 * gib)):
        blob = hashlib.sha256(name).hexdigest()
        size = 6 * gib if name == b"large" else 4096
        content = StoredContent(blob=blob, size=size, start=0 if name == b"large" else at // BLOCK)
        root.children[name] = Node(fmt=stat.S_IFREG, mode=0o644, content=content)
        with (tmp_path / blob).open("wb") as file:
            file.truncate(10 * gib)
            file.seek(at)
            file.write(name * 100)
        blobs.append((blob, 10 * gib // BLOCK))
    layout = plan_layout(root, blobs=blobs)
    meta = tmp_path / "meta"
    meta.write_bytes(layout.metadata)
    with attached(tmp_path / "mnt", meta, [str(tmp_path / blob) for blob, _ in blobs]) as target:
        assert (target / "first").read_bytes().rstrip(b"\0") == b"first" * 100
        assert (target / "far").read_bytes().rstrip(b"\0") == b"far" * 100
        assert (target / "large").stat().st_size == 6 * gib
        fd = os.open(target / "large", os.O_RDONLY)
        try:
            assert os.pread(fd, 600, 5 * gib) == b"large" * 100 + bytes(100)
            assert os.pread(fd, 600, 6 * gib - 600) == bytes(600)
        finally:
            os.close(fd)


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_a_full_disk_is_named_and_nothing_stays(tmp_path, encoding):
    small = tmp_path / "small"
    small.mkdir()
    mount_fs("tmpfs", small, "tmpfs", 0, "size=6m")
    try:
        with pytest.raises(ImageError, match="disk is full") as caught:
            build([t.file(b"f", os.urandom(20 << 20))], small, encoding=encoding)
        assert caught.value.code == "no_space"
        assert list(small.iterdir()) == []
        assert os.statvfs(small).f_bavail * 4096 > 5 << 20  # what was written is given back
        assert build([t.file(b"f", b"1")], small, encoding=encoding)[0].blob.size == 4096
    finally:
        umount(small)
