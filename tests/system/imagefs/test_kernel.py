"""Images as the kernel and erofs-utils see them, compared entry by entry with what was written."""

from __future__ import annotations

import os
import stat
import subprocess
from contextlib import contextmanager

from dsec_imagefs.erofs.reader import ErofsReader
from dsec_imagefs.sources.base import Limits
from dsec_imagefs.sources.directory import scan_directory
from dsec_imagefs.syscalls import MS_RDONLY, mount_fs, umount
from dsec_imagefs.tree import BytesContent, Node, new_directory
from hypothesis import HealthCheck, given, settings

from tests.kit import tarbytes as t
from tests.kit.abilities import needs
from tests.kit.archives import apply_layers
from tests.kit.trees import directory_facts, image_facts, node_facts, write_tree
from tests.unit.imagefs.strategies import trees

pytestmark = needs("root", "erofs")


@contextmanager
def mounted(root: Node, tmp_path):
    image, target = tmp_path / "image.erofs", tmp_path / "mnt"
    target.mkdir(exist_ok=True)
    fd = os.open(image, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_tree(root, fd)
    finally:
        os.close(fd)
    mount_fs(str(image), target, "erofs", MS_RDONLY)
    try:
        yield target
    finally:
        umount(target)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees())
def test_the_kernel_sees_every_entry_as_written(tmp_path, root):
    with mounted(root, tmp_path) as target:
        assert directory_facts(str(target)) == node_facts(root)


@needs("fsck.erofs", "dump.erofs")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees())
def test_fsck_and_dump_find_nothing_wrong(tmp_path, root):
    image = tmp_path / "image.erofs"
    fd = os.open(image, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_tree(root, fd)
    finally:
        os.close(fd)
    for argv in (["fsck.erofs", str(image)], ["dump.erofs", "-s", str(image)]):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "<E>" not in done.stdout + done.stderr


def test_big_directories_can_be_searched(tmp_path):
    root = new_directory()
    for n in range(5000):
        name = b"%d-" % (n * 7919 % 5000) + bytes([n % 250 + 1]).replace(b"/", b"+") * (n % 90)
        root.children[name] = Node(fmt=stat.S_IFREG, mode=0o644, content=BytesContent(b"%d" % n))
    with mounted(root, tmp_path) as target:
        for name, node in root.children.items():
            with open(os.fsencode(target) + b"/" + name, "rb") as file:
                assert file.read() == node.content.data
        assert not os.path.exists(os.fsencode(target) + b"/absent")


def test_i3_layers_survive_to_the_kernel(tmp_path):
    odd = bytes(b for b in range(1, 256) if b != 0x2F)
    layers = [
        t.pax([(b"path", odd), (b"uid", b"4294967294"), (b"mtime", b"-1.25"), (b"SCHILY.xattr.user.x", b"v" * 60_000)])
        + t.file(b"x", b"body") + t.header(b"zero", b"3") + t.header(b"big", b"4", device=(259, 70000)),
        *(t.file(b"n%d" % n, b"%d" % n) for n in range(120)),
        t.gnu_sparse(b"sparse", [(0, b"a"), (39_000_000, b"z")], 40_000_000),
    ]  # fmt: skip
    stacks = [t.blob_of(data) for data in layers]
    blobs = [stack.__enter__() for stack in stacks]
    try:
        root = apply_layers(blobs, Limits())
        with mounted(root, tmp_path) as target:
            facts = directory_facts(str(target))
            assert facts == node_facts(root)
            assert len(facts) == 1 + 3 + 120 + 1
            info = os.lstat(os.fsencode(target) + b"/" + odd)
            assert (info.st_uid, info.st_mtime_ns) == (4294967294, -1_250_000_000)
            assert (tmp_path / "image.erofs").stat().st_size < 4_000_000
    finally:
        for stack in stacks:
            stack.__exit__(None, None, None)


def test_a_directory_becomes_an_image_entry_by_entry(tmp_path):
    top = tmp_path / "top"
    (top / "d").mkdir(parents=True)
    (top / "d" / "f").write_text("data")
    os.link(top / "d" / "f", top / "hard")
    os.symlink("d/f", top / "sym")
    os.mkfifo(top / "fifo")
    os.mknod(top / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(top / "sock", stat.S_IFSOCK | 0o600)
    os.setxattr(top / "d", "user.a", b"1")
    os.chmod(top / "hard", 0o4755)
    os.chown(top / "d", 7, 8)
    with open(top / "sparse", "wb") as file:
        file.truncate(30_000_000)
        file.seek(20_000_000)
        file.write(b"middle")
    with open(os.fsencode(top) + b"/\xff\n", "wb"):
        pass
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        root = scan_directory(top, fd)
        with mounted(root, tmp_path) as target:
            assert directory_facts(str(target)) == directory_facts(str(top))
            assert (tmp_path / "image.erofs").stat().st_size < 1_000_000
    finally:
        os.close(fd)


def test_other_file_systems_below_a_directory_come_out_empty_and_named(tmp_path):
    (tmp_path / "top" / "inner").mkdir(parents=True)
    mount_fs("tmpfs", tmp_path / "top" / "inner", "tmpfs", 0)
    notes: list[str] = []
    try:
        (tmp_path / "top" / "inner" / "secret").write_text("x")
        fd = os.open(tmp_path / "top", os.O_RDONLY | os.O_DIRECTORY)
        try:
            root = scan_directory(tmp_path / "top", fd, note=notes.append)
        finally:
            os.close(fd)
    finally:
        umount(tmp_path / "top" / "inner")
    assert root.children[b"inner"].children == {}
    assert notes == ["inner is another file system: kept as an empty directory"]


@needs("mkfs.erofs")
def test_the_reader_reads_what_mkfs_makes(tmp_path):
    top = tmp_path / "top"
    (top / "d").mkdir(parents=True)
    (top / "d" / "f").write_bytes(b"data" * 3000)
    (top / "small").write_bytes(b"tail-packed")
    os.symlink("d/f", top / "sym")
    for name in ("a", "b", "c"):  # shared attributes
        (top / name).write_text(name)
        os.setxattr(top / name, "user.same", b"value")
    image = tmp_path / "mkfs.erofs"
    subprocess.run(["mkfs.erofs", "--quiet", str(image), str(top)], check=True, timeout=30, capture_output=True)
    fd = os.open(image, os.O_RDONLY)
    try:
        ours = {path: (*facts[-2:], facts[7]) for path, facts in image_facts(fd).items()}
        assert ErofsReader(fd).lookup(b"d/f").size == 12000
    finally:
        os.close(fd)
    theirs = {path: (*facts[-2:], facts[7]) for path, facts in directory_facts(str(top)).items()}
    assert ours == theirs
