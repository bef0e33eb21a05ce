"""Layers applied as the OCI image specification says: cases I1-I3 and the bugs of other tools."""

from __future__ import annotations

import stat
from contextlib import ExitStack

import pytest
from dsec_imagefs.errors import ImageError
from dsec_imagefs.sources.base import Limits
from dsec_imagefs.tree import Node

from tests.kit import tarbytes as t
from tests.kit.archives import apply_layers
from tests.kit.trees import node_facts


def merged(*layers: bytes, limits: Limits | None = None, note=None) -> Node:
    with ExitStack() as stack:
        blobs = [stack.enter_context(t.blob_of(data, f"layer {n}")) for n, data in enumerate(layers, start=1)]
        root = apply_layers(blobs, limits or Limits(), note)
        node_facts(root)  # every body can be read while the blobs are open
        for _, node in walk(root):
            if node.fmt == stat.S_IFREG:
                data = bytearray(node.content.size)
                node.content.open().readinto(memoryview(data), 0)
                node.target = bytes(data)  # a place to keep the body once the blobs are gone
        return root


def walk(root: Node):
    todo = [(b"", root)]
    while todo:
        path, node = todo.pop()
        yield path, node
        todo.extend((path + b"/" + name, child) for name, child in node.children.items())


def paths(root: Node) -> dict[bytes, bytes]:
    """Path -> body or link target, directories as b"/"."""
    return {path[1:]: b"/" if node.is_dir else node.target for path, node in walk(root) if path}


def at(root: Node, path: bytes) -> Node:
    for name in path.split(b"/"):
        root = root.children[name]
    return root


def test_whiteouts_hide_lower_layers_only_wherever_they_stand():
    lower = t.directory(b"d") + t.file(b"d/f", b"old") + t.file(b"d/g", b"old")
    for upper in (
        t.file(b"d/.wh.f") + t.file(b"d/f", b"new") + t.file(b"d/.wh.g"),
        t.file(b"d/f", b"new") + t.file(b"d/.wh.g") + t.file(b"d/.wh.f"),
    ):
        assert paths(merged(lower, upper)) == {b"d": b"/", b"d/f": b"new"}


def test_a_whiteout_may_be_a_hard_link():
    lower = t.directory(b"d") + t.file(b"d/f", b"1") + t.file(b"d/g", b"2") + t.file(b"keep", b"3")
    upper = t.hardlink(b"d/.wh.g", b"keep") + t.symlink(b"d/.wh.f", b"nowhere")
    assert paths(merged(lower, upper)) == {b"d": b"/", b"keep": b"3"}


def test_a_whiteout_of_a_directory_takes_all_below_and_a_new_one_starts_empty():
    lower = t.directory(b"d") + t.directory(b"d/e") + t.file(b"d/e/f", b"1")
    assert paths(merged(lower, t.file(b".wh.d"))) == {}
    assert paths(merged(lower, t.file(b".wh.d") + t.directory(b"d"))) == {b"d": b"/"}


def test_opaque_hides_what_is_below_and_keeps_what_comes_with_it():
    lower = t.directory(b"d") + t.file(b"d/f", b"old") + t.file(b"d/g", b"old")
    upper = t.file(b"d/f", b"new") + t.file(b"d/.wh..wh..opq") + t.file(b"d/.wh.g") + t.file(b"d/h", b"new")
    assert paths(merged(lower, upper)) == {b"d": b"/", b"d/f": b"new", b"d/h": b"new"}
    assert paths(merged(lower, t.file(b".wh..wh..opq") + t.file(b"x", b"1"))) == {b"x": b"1"}


@pytest.mark.parametrize("explicit", [True, False])
def test_opaque_over_a_lower_symlink_hides_the_link_not_its_target(explicit):
    lower = t.directory(b"real") + t.file(b"real/f", b"kept") + t.symlink(b"d", b"real")
    upper = (t.directory(b"d", mode=0o700) if explicit else b"") + t.file(b"d/.wh..wh..opq") + t.file(b"d/n", b"1")
    root = merged(lower, upper)
    assert paths(root) == {b"real": b"/", b"real/f": b"kept", b"d": b"/", b"d/n": b"1"}
    assert at(root, b"d").mode == (0o700 if explicit else 0o755)


def test_a_directory_over_a_lower_symlink_replaces_it_and_its_whiteouts_touch_nothing_else():
    lower = t.directory(b"real") + t.file(b"real/f", b"kept") + t.symlink(b"d", b"real")
    assert paths(merged(lower, t.directory(b"d") + t.file(b"d/.wh.f")))[b"real/f"] == b"kept"


def test_implicit_parents_do_not_override_and_are_modest():
    lower = t.directory(b"root", mode=0o700, uid=5) + t.directory(b"opt", mode=0o711)
    root = merged(lower, t.file(b"root/a/b/f", b"1") + t.file(b"opt/x", b"2"))
    assert (at(root, b"root").mode, at(root, b"root").uid, at(root, b"opt").mode) == (0o700, 5, 0o711)
    made = at(root, b"root/a/b")
    assert (made.mode, made.uid, made.mtime_s) == (0o755, 0, 0)


def test_a_directory_entry_changes_attributes_and_keeps_the_content():
    root = merged(
        t.directory(b"d", mode=0o755) + t.file(b"d/f", b"1"), t.directory(b"d", mode=0o1777, uid=9, mtime=77)
    )  # fmt: skip
    assert (at(root, b"d").mode, at(root, b"d").uid, at(root, b"d").mtime_s) == (0o1777, 9, 77)
    assert at(root, b"d/f").target == b"1"


def test_kinds_replace_each_other():
    lower = t.directory(b"a") + t.file(b"a/x", b"1") + t.file(b"b", b"2") + t.symlink(b"c", b"b")
    upper = t.file(b"a", b"file") + t.directory(b"b") + t.file(b"c", b"file")
    assert paths(merged(lower, upper)) == {b"a": b"file", b"b": b"/", b"c": b"file"}


def test_links_in_parents_are_followed_inside_the_root():
    lower = t.directory(b"usr") + t.directory(b"usr/lib") + t.symlink(b"lib", b"usr/lib")
    more = t.symlink(b"abs", b"/../../usr/lib") + t.symlink(b"usr/up", b"../../../usr")
    upper = t.file(b"lib/x", b"1") + t.file(b"abs/y", b"2") + t.file(b"usr/up/lib/z", b"3") + t.file(b"lib/.wh.gone")
    root = merged(lower + more + t.file(b"usr/lib/gone", b"0"), upper)
    assert {p: v for p, v in paths(root).items() if p.startswith(b"usr/lib/")} == {
        b"usr/lib/x": b"1", b"usr/lib/y": b"2", b"usr/lib/z": b"3"
    }  # fmt: skip
    assert at(root, b"lib").is_symlink


def test_a_dangling_parent_link_makes_its_target():
    assert paths(merged(t.symlink(b"run", b"/var/run") + t.file(b"run/pid", b"1")))[b"var/run/pid"] == b"1"


def test_link_loops_and_files_as_parents_are_errors():
    loop = t.symlink(b"a", b"b") + t.symlink(b"b", b"a")
    with pytest.raises(ImageError, match="too many symbolic links"):
        merged(loop, t.file(b"a/x"))
    with pytest.raises(ImageError, match="not a directory"):
        merged(t.file(b"f", b"1"), t.file(b"f/x"))


def test_names_cannot_leave_the_root():
    assert paths(merged(t.file(b"../../x", b"1") + t.file(b"/y", b"2") + t.file(b"d/../../../z", b"3"))) == {
        b"x": b"1", b"y": b"2", b"z": b"3"
    }  # fmt: skip


@pytest.mark.parametrize("name", [b"/", b"./", b".", b"//"])
def test_an_entry_for_the_root_sets_its_attributes(name):
    root = merged(t.file(b"a", b"1") + t.directory(name, mode=0o711, uid=3))
    assert (root.mode, root.uid, set(root.children)) == (0o711, 3, {b"a"})


def test_a_root_that_is_a_file_is_an_error():
    with pytest.raises(ImageError, match="root"):
        merged(t.symlink(b"./", b"elsewhere"))


def test_hard_links_share_an_inode_across_layers():
    root = merged(t.file(b"a", b"1") + t.hardlink(b"b", b"a"), t.hardlink(b"d/c", b"/b"))
    assert at(root, b"a") is at(root, b"b") is at(root, b"d/c")


def test_a_hard_link_to_itself_is_the_file():
    assert paths(merged(t.file(b"foo", b"1") + t.hardlink(b"foo", b"foo"))) == {b"foo": b"1"}
    with pytest.raises(ImageError, match="hard link to itself"):
        merged(t.hardlink(b"foo", b"foo"))


def test_hard_links_to_nothing_or_to_directories_are_errors():
    with pytest.raises(ImageError, match="hard link to gone"):
        merged(t.file(b"a") + t.hardlink(b"b", b"gone"))
    with pytest.raises(ImageError, match="to the directory d"):
        merged(t.directory(b"d") + t.hardlink(b"b", b"d"))


def test_hard_linked_symlinks_stay_links():
    root = merged(t.symlink(b"s", b"t") + t.hardlink(b"s2", b"s"))
    assert at(root, b"s2").is_symlink
    assert at(root, b"s2") is at(root, b"s")


def test_replacing_one_hard_link_leaves_the_other():
    root = merged(t.file(b"a", b"old") + t.hardlink(b"b", b"a"), t.file(b"a", b"new"))
    assert paths(root) == {b"a": b"new", b"b": b"old"}


def test_aufs_leftovers_are_not_files_but_its_pool_is_linked():
    layer = (
        t.directory(b".wh..wh.plnk") + t.file(b".wh..wh.plnk/7.1", b"pooled") + t.directory(b".wh..wh.orph")
        + t.file(b".wh..wh.aufs") + t.hardlink(b"a", b".wh..wh.plnk/7.1") + t.hardlink(b"b", b".wh..wh.plnk/7.1")
    )  # fmt: skip
    root = merged(layer)
    assert paths(root) == {b"a": b"pooled", b"b": b"pooled"}
    assert at(root, b"a") is at(root, b"b")


@pytest.mark.parametrize("name", [b".wh.", b"d/.wh..", b"d/.wh..."])
def test_whiteouts_of_no_name_are_errors(name):
    with pytest.raises(ImageError, match="hides no name"):
        merged(t.directory(b"d") + t.file(name))


def test_a_name_like_a_whiteout_below_a_whiteout_is_an_error():
    with pytest.raises(ImageError, match="below a whiteout"):
        merged(t.directory(b".wh.d") + t.file(b".wh.d/f"))


def test_devices_of_number_zero_in_a_lower_layer_are_kept():
    root = merged(t.header(b"null0", b"3", mode=0o600), t.file(b"x"))
    assert (at(root, b"null0").fmt, at(root, b"null0").device) == (stat.S_IFCHR, (0, 0))


def test_150_layers_with_any_name_uid_time_and_attribute():
    odd = bytes(b for b in range(1, 256) if b != 0x2F)
    layers = []
    for n in range(150):
        records = [(b"uid", b"4294967294"), (b"mtime", b"-%d.5" % n), (b"path", b"d/%03d" % n + odd)]
        layers.append(t.pax([*records, (b"SCHILY.xattr.user.x", b"v" * 64_000)]) + t.file(b"x", b"%d" % n))
    layers.append(t.pax([(b"path", b"d/.wh.000" + odd)]) + t.file(b"w"))
    root = merged(*layers)
    assert len(at(root, b"d").children) == 149
    node = at(root, b"d").children[b"149" + odd]
    assert (node.target, node.uid, node.mtime_s, node.mtime_ns) == (b"149", 4294967294, -150, 500_000_000)
    assert node.xattrs == {b"user.x": b"v" * 64_000}


def test_sparse_members_keep_content_and_holes_through_a_merge():
    pieces = [(0, b"a" * 10), (5_000_000, b"z" * 10)]
    root = merged(t.gnu_sparse(b"g", pieces, 6_000_000) + t.pax_sparse(b"p", pieces, 6_000_000))
    assert at(root, b"g").target == at(root, b"p").target
    assert at(root, b"g").target[5_000_000:5_000_010] == b"z" * 10
    assert at(root, b"g").content.extents == ((0, 10), (5_000_000, 10))


def test_attributes_erofs_cannot_hold_are_named_not_lost_silently():
    notes = []
    root = merged(t.pax([(b"SCHILY.xattr.com.apple.x", b"1")]) + t.file(b"f"), note=notes.append)
    assert at(root, b"f").xattrs == {}
    assert notes == ["f: attributes com.apple.x left out, EROFS can't hold them"]


def test_limits_are_kept():
    with pytest.raises(ImageError, match="more than 2 entries") as caught:
        merged(t.file(b"a") + t.file(b"b") + t.file(b"c"), limits=Limits(max_files=2))
    assert caught.value.code == "too_large"
    with pytest.raises(ImageError, match="more than 100 bytes"):
        merged(t.file(b"a", b"x" * 101), limits=Limits(max_unpacked_bytes=100))


def test_errors_name_layer_and_entry():
    with pytest.raises(ImageError) as caught:
        merged(t.file(b"ok"), t.hardlink(b"dir/b", b"gone"))
    assert "layer 2" in caught.value.message
    assert "dir/b" in caught.value.message
