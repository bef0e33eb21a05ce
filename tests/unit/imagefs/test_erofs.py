"""The EROFS writer and reader against each other, and the writer's refusals."""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager

import pytest
from dsec_imagefs.erofs import ondisk, xattr
from dsec_imagefs.erofs.layout import plan_layout
from dsec_imagefs.erofs.reader import ErofsReader
from dsec_imagefs.errors import ImageError
from dsec_imagefs.tree import BytesContent, Node, new_directory
from hypothesis import given, settings

from tests.kit.trees import image_facts, node_facts, write_tree
from tests.unit.imagefs.strategies import trees


@contextmanager
def memory_file():
    fd = os.memfd_create("image")
    try:
        yield fd
    finally:
        os.close(fd)


def file(data: bytes = b"x", **fields) -> Node:
    return Node(fmt=stat.S_IFREG, mode=0o644, content=BytesContent(data), **fields)


def tree_of(**children: Node) -> Node:
    root = new_directory()
    root.children = {name.encode(): node for name, node in children.items()}
    return root


@settings(max_examples=60, deadline=None)
@given(trees())
def test_what_was_written_is_read(root):
    with memory_file() as fd:
        write_tree(root, fd)
        assert image_facts(fd) == node_facts(root)


@settings(max_examples=20, deadline=None)
@given(trees())
def test_equal_trees_make_equal_images(root):
    with memory_file() as one, memory_file() as two:
        first = write_tree(root, one)
        # another order of insertion is the same tree
        root.children = dict(reversed(list(root.children.items())))
        assert write_tree(root, two).digest == first.digest


def test_crc32c_is_castagnoli():
    assert ondisk.crc32c_raw(b"123456789") ^ 0xFFFFFFFF == 0xE3069283  # the check value of RFC 3720's CRC


def test_a_directory_of_many_blocks_is_whole():
    root = new_directory()
    root.children = {b"n%05d" % i + b"x" * (i % 200): file(b"") for i in range(3000)}
    with memory_file() as fd:
        write_tree(root, fd)
        assert image_facts(fd) == node_facts(root)


def test_a_terabyte_hole_takes_no_blocks():
    node = file()
    node.content = HugeSparse()
    layout = plan_layout(tree_of(big=node))
    assert layout.size_bytes < 64 << 20


class HugeSparse:
    size = 1 << 40
    extents = ((1 << 39, 4096),)

    def open(self):
        raise AssertionError("planning must not read")


def test_a_changed_byte_in_the_superblock_is_noticed():
    with memory_file() as fd:
        write_tree(tree_of(a=file()), fd)
        os.pwrite(fd, b"\x55", ondisk.EROFS_SUPER_OFFSET + 16)
        with pytest.raises(ImageError, match="checksum") as caught:
            ErofsReader(fd)
        assert caught.value.code == "corrupt"


def test_a_cut_image_is_noticed():
    with memory_file() as fd:
        written = write_tree(tree_of(a=file(b"y" * 9000)), fd)
        os.ftruncate(fd, written.size_bytes - 4096)
        with pytest.raises(ImageError, match="shorter"):
            ErofsReader(fd)


@pytest.mark.parametrize(
    ("node", "match"),
    [
        (file(xattrs={b"user.x": b"v" * 65_536}), "65535"),
        (file(xattrs={b"user.%d" % i: b"v" * 65_000 for i in range(5)}), "all together"),
        (file(uid=4294967295), "4294967294"),
        (file(mtime_s=1 << 63), "time"),
        (Node(fmt=stat.S_IFLNK, mode=0o777, target=b""), "link target"),
        (Node(fmt=stat.S_IFLNK, mode=0o777, target=b"t" * 4096), "link target"),
        (Node(fmt=stat.S_IFCHR, mode=0o600, device=(4096, 0)), "out of range"),
    ],
)
def test_what_erofs_cannot_hold_is_refused_by_path(node, match):
    with pytest.raises(ImageError, match=match) as caught:
        plan_layout(tree_of(sub=tree_of(odd=node)))
    assert caught.value.code == "unsupported"
    assert "/sub/odd" in caught.value.message


def test_long_names_are_refused():
    root = new_directory()
    root.children[b"n" * 256] = file()
    with pytest.raises(ImageError, match="255"):
        plan_layout(root)


def test_64_kb_xattrs_and_the_highest_uid_are_kept():
    root = tree_of(a=file(xattrs={b"user.big": b"v" * 65_535, b"security.capability": b"c" * 20}, uid=4294967294))
    with memory_file() as fd:
        write_tree(root, fd)
        assert image_facts(fd) == node_facts(root)


def test_equal_attributes_are_stored_once_and_as_many_as_there_are():
    many = {b"user.%03d" % n: b"value %d" % n for n in range(300)}  # an inode can refer to 255 shared ones
    big = {b"user.big": b"v" * 60_000}
    root = tree_of(**{f"n{n}": file(xattrs=many | big) for n in range(8)}, alone=file(xattrs={b"user.one": b"1"}))
    with memory_file() as fd:
        assert write_tree(root, fd).size_bytes < 200_000
        assert image_facts(fd) == node_facts(root)


def test_acl_names_stand_for_themselves():
    assert xattr.split_name(b"system.posix_acl_access") == (2, b"")
    assert xattr.split_name(b"system.posix_acl_accessory") is None
    assert xattr.split_name(b"com.apple.quarantine") is None


@pytest.mark.parametrize("device", [(0, 0), (1, 3), (259, 70000), (4095, (1 << 20) - 1)])
def test_device_numbers_survive(device):
    assert ondisk.decode_device(ondisk.encode_device(*device)) == device


def test_writing_notices_a_shrinking_source():
    class Shrunk(BytesContent):
        def open(self):
            raise ImageError("bad_source", "a ended 5 bytes early")

    with memory_file() as fd, pytest.raises(ImageError, match="early"):
        write_tree(tree_of(a=Node(fmt=stat.S_IFREG, mode=0o644, content=Shrunk(b"12345"))), fd)
