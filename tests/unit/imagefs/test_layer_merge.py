"""Stacks of layers merged from their metadata: the same as their archives applied in order, and the right values."""

from __future__ import annotations

import shutil
import stat
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from dsec_imagefs.errors import ImageError
from dsec_imagefs.sources.base import Limits
from hypothesis import given, settings

from tests.kit import tarbytes as t
from tests.kit.archives import apply_layers
from tests.kit.layers import build, merge, merged_facts, outcome
from tests.kit.trees import Facts, node_facts
from tests.unit.imagefs.strategies import layer_stacks


@pytest.fixture(scope="module")
def fast_dir():
    """In memory where there is such a place: every object is synced, and this file makes thousands."""
    memory = Path("/dev/shm")
    top = Path(tempfile.mkdtemp(prefix="dsec-layers-", dir=memory if memory.is_dir() else None))
    yield top
    shutil.rmtree(top)


def by_archives(tars: list[bytes]) -> Facts | str:
    """What applying the archives one by one gives; see test_layers.py for what that must be."""
    with ExitStack() as stack:
        blobs = [stack.enter_context(t.blob_of(data, f"layer {n}")) for n, data in enumerate(tars, start=1)]
        try:
            return node_facts(apply_layers(blobs, Limits()))
        except ImageError as err:
            return err.code


@settings(max_examples=150, deadline=None)
@given(layer_stacks)
def test_merging_metadata_is_applying_the_archives(fast_dir, tars):
    assert outcome(tars, fast_dir) == by_archives(tars)


def facts_of(out: Path, *tars: bytes) -> Facts:
    layers = build(tars, out)
    return merged_facts(merge(layers, out), out)


def bodies(facts: Facts) -> dict[bytes, object]:
    """Path -> length of the body, link target, or the directory's b"/"."""
    shown: dict[bytes, object] = {}
    for path, fact in facts.items():
        if path:
            body = str(fact[10]).partition(":")[0]
            shown[path] = b"/" if fact[0] == stat.S_IFDIR else fact[9] or int(body or 0)
    return shown


# The order in which a layer's entries stand decides when links of lower layers are followed.
@pytest.mark.parametrize(
    ("upper", "expected"),
    [
        (t.file(b"lib/x", b"1"), {b"usr/lib/x": 1, b"lib": b"usr/lib"}),
        (t.directory(b"lib") + t.file(b"lib/x", b"1"), {b"lib": b"/", b"lib/x": 1}),
        (t.file(b"lib/x", b"1") + t.directory(b"lib"), {b"usr/lib/x": 1, b"lib": b"/"}),
        (t.file(b"lib/x", b"1") + t.file(b"usr/lib/x", b"22"), {b"usr/lib/x": 2, b"lib": b"usr/lib"}),
        (t.file(b"usr/lib/x", b"22") + t.file(b"lib/x", b"1"), {b"usr/lib/x": 1, b"lib": b"usr/lib"}),
        (t.file(b"lib/x", b"1") + t.symlink(b"lib", b"usr"), {b"usr/lib/x": 1, b"lib": b"usr"}),
        (t.symlink(b"lib", b"usr") + t.file(b"lib/x", b"1"), {b"usr/x": 1, b"lib": b"usr"}),
    ],
)
def test_links_of_lower_layers_are_followed_in_the_archives_order(tmp_path, upper, expected):
    lower = t.directory(b"usr") + t.directory(b"usr/lib") + t.symlink(b"lib", b"usr/lib")
    assert bodies(facts_of(tmp_path, lower, upper)) == {b"usr": b"/", b"usr/lib": b"/"} | expected


def test_an_implicit_parent_overrides_nothing_and_an_explicit_one_does(tmp_path):
    lower = t.directory(b"root", mode=0o700, uid=5, mtime=9) + t.directory(b"opt", mode=0o711)
    facts = facts_of(
        tmp_path, lower, t.file(b"root/f", b"1") + t.directory(b"opt", mode=0o1777) + t.file(b"new/f", b"2")
    )
    assert facts[b"root"][1:5] == (0o700, 5, 0, (9, 0))
    assert facts[b"opt"][1] == 0o1777
    assert facts[b"new"][1:5] == (0o755, 0, 0, (0, 0))


def test_a_hard_link_to_a_lower_layers_file_is_one_inode_with_it(tmp_path):
    facts = facts_of(tmp_path, t.file(b"a", b"1" * 5000) + t.symlink(b"d", b"/"), t.hardlink(b"e/b", b"d/a"))
    assert facts[b"a"] == facts[b"e/b"]
    assert facts[b"a"][5] == 2
    replaced = facts_of(tmp_path, t.file(b"a", b"1") + t.hardlink(b"b", b"a"), t.file(b"a", b"22"))
    assert (bodies(replaced), replaced[b"b"][5]) == ({b"a": 2, b"b": 1}, 1)


@pytest.mark.parametrize(
    "upper", [t.hardlink(b"b", b"gone"), t.file(b".wh.a") + t.hardlink(b"b", b"a"), t.hardlink(b"b", b"dir")]
)
def test_a_hard_link_to_nothing_names_layer_and_entry(tmp_path, upper):
    layers = build([t.file(b"a", b"1") + t.directory(b"dir"), upper], tmp_path)
    with pytest.raises(ImageError, match=r"layer 2 \([0-9a-f]{12}\): b: it is a hard link to") as caught:
        merge(layers, tmp_path)
    assert caught.value.code == "bad_image"


def test_sparse_members_take_no_room_for_their_holes(tmp_path):
    pieces = [(0, b"a" * 10), (9_000_000, b"z" * 10)]
    tar = (
        t.gnu_sparse(b"g", pieces, 10_000_000)
        + t.pax_sparse(b"p", pieces, 10_000_000)
        + t.gnu_sparse(b"e", [], 1 << 40)
    )
    layers = build([tar, t.file(b"x", b"1")], tmp_path)
    assert layers[0].blob.size < 100_000
    merged = merge([layers[0]], tmp_path)
    assert merged.devices == (layers[0].blob.digest,)
    small = build([t.gnu_sparse(b"g", pieces, 10_000_000) + t.pax_sparse(b"p", pieces, 10_000_000)], tmp_path)
    facts = merged_facts(merge(small, tmp_path), tmp_path)
    assert facts[b"g"][10] == facts[b"p"][10]
    assert str(facts[b"g"][10]).startswith("10000000:")


def test_a_layer_of_which_nothing_shows_is_no_device(tmp_path):
    layers = build([t.file(b"a", b"1"), t.file(b"a", b"2"), t.file(b"empty"), t.file(b"b", b"3")], tmp_path)
    merged = merge(layers, tmp_path)
    assert merged.devices == (layers[1].blob.digest, layers[3].blob.digest)


def test_layers_with_the_same_data_are_one_device(tmp_path):
    layers = build([t.file(b"a", b"1"), t.file(b"b", b"1"), t.file(b"a", b"1")], tmp_path)
    assert layers[0].id != layers[1].id
    assert layers[0].id == layers[2].id
    merged = merge(layers, tmp_path)
    assert merged.devices == (layers[0].blob.digest,)
    assert bodies(merged_facts(merged, tmp_path)) == {b"a": 1, b"b": 1}


def test_no_layers_are_an_empty_root(tmp_path):
    merged = merge([], tmp_path)
    assert (merged.devices, set(merged_facts(merged, tmp_path))) == ((), {b""})


def test_300_layers_are_300_devices_in_the_order_of_the_layers(tmp_path, fast_dir):
    layers = build([t.file(b"n%03d" % n, b"%d" % n) for n in range(300)], fast_dir)
    merged = merge(layers, fast_dir)
    assert merged.devices == tuple(layer.blob.digest for layer in layers)
    facts = merged_facts(merged, fast_dir)
    assert bodies(facts) == {b"n%03d" % n: len(str(n)) for n in range(300)}


def test_whiteouts_do_not_reach_into_their_own_layer_or_later_ones(tmp_path):
    lower = t.directory(b"d") + t.file(b"d/f", b"1") + t.file(b"d/g", b"1")
    upper = t.file(b"d/f", b"22") + t.file(b"d/.wh.f") + t.file(b"d/.wh.g")
    assert bodies(facts_of(tmp_path, lower, upper)) == {b"d": b"/", b"d/f": 2}
    assert bodies(facts_of(tmp_path, lower, upper, t.file(b"d/g", b"333"))) == {b"d": b"/", b"d/f": 2, b"d/g": 3}


def test_an_opaque_directory_hides_all_layers_below_and_keeps_its_own(tmp_path):
    tars = [
        t.file(b"d/a", b"1"),
        t.file(b"d/b", b"1"),
        t.file(b"d/.wh..wh..opq") + t.file(b"d/c", b"22"),
        t.file(b"d/e"),
    ]
    assert bodies(facts_of(tmp_path, *tars)) == {b"d": b"/", b"d/c": 2, b"d/e": 0}


def test_odd_layers_keep_owner_time_mode_and_attributes(tmp_path):
    owner = [(b"uid", b"4294967294"), (b"gid", b"2147483648")]
    tar = (
        t.pax([*owner, (b"mtime", b"-1.25"), (b"SCHILY.xattr.user.x", b"v" * 60_000)])
        + t.file(b"suid", b"1", mode=0o6755)
        + t.pax([(b"mtime", b"1700000000.5"), (b"SCHILY.xattr.security.capability", b"\1\0\0\2" + bytes(16))])
        + t.file(b"cap", b"2") + t.directory(b"tmp", mode=0o1777) + t.header(b"big", b"4", device=(259, 70_000))
        + t.header(b"zero", b"3") + t.symlink(b"l", b"t" * 99) + t.hardlink(b"l2", b"l")
    )  # fmt: skip
    facts = facts_of(tmp_path, tar, t.file(b"above"))
    assert facts[b"suid"][1:5] == (0o6755, 4294967294, 2147483648, (-2, 750_000_000))
    assert facts[b"suid"][7] == ((b"user.x", b"v" * 60_000),)
    assert facts[b"cap"][4] == (1_700_000_000, 500_000_000)
    assert facts[b"cap"][7] == ((b"security.capability", b"\1\0\0\2" + bytes(16)),)
    assert facts[b"tmp"][1] == 0o1777
    assert (facts[b"big"][8], facts[b"zero"][8], facts[b"zero"][0]) == ((259, 70_000), (0, 0), stat.S_IFCHR)
    assert facts[b"l2"] == facts[b"l"]
