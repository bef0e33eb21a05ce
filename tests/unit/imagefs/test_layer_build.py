"""Layers: what is written for a tar or a tree, that it is what the manifest says, and nothing else."""

from __future__ import annotations

import hashlib
import os
import stat

import pytest
from dsec_imagefs.errors import ImageError
from dsec_imagefs.layer import ImageManifest, Index, Layer, build_layer, compose_image, decode_block
from dsec_imagefs.layer.marks import ASIDE, IMPLICIT, LINK, OPAQUE, PATH, REPLACES, WHITEOUT
from dsec_imagefs.layer.tree_of import read_metadata
from dsec_imagefs.layer.wire import read_block
from dsec_imagefs.sources.base import Limits
from dsec_imagefs.tree import BytesContent, Node, new_directory
from hypothesis import HealthCheck, given, settings

from tests.kit import tarbytes as t
from tests.kit.layers import build, merge, merged_facts
from tests.kit.trees import image_facts, node_facts
from tests.unit.imagefs.strategies import trees

MIB = 1 << 20


def one(data: bytes, out, **options) -> Layer:
    return build([data], out, **options)[0]


def digest_of(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def meta_facts(layer: Layer, out) -> dict[bytes, tuple[int, dict[bytes, bytes]]]:
    """Path -> format and attributes, of the layer's own metadata."""
    fd = os.open(out / layer.meta.digest, os.O_RDONLY)
    try:
        blobs = {layer.blob.digest: lambda _offset, count: bytes(count)}
        return {path: (facts[0], dict(facts[7])) for path, facts in image_facts(fd, blobs).items()}
    finally:
        os.close(fd)


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_every_object_is_named_by_its_digest_and_listed(tmp_path, encoding):
    layer = one(t.file(b"a", b"text " * 30_000) + t.file(b"b", os.urandom(5000)), tmp_path, encoding=encoding)
    files = {path.name for path in tmp_path.iterdir()}
    listed = {layer.meta.digest, layer.blob.digest, layer.index.digest, layer.wire.digest, layer.id}
    assert files == listed
    assert len(listed) == (4 if encoding == "raw" else 5)
    for path in tmp_path.iterdir():
        assert digest_of(path) == path.name
    for part in (layer.meta, layer.blob, layer.index, layer.wire):
        assert (tmp_path / part.digest).stat().st_size == part.size
    assert Layer.parse((tmp_path / layer.id).read_bytes()) == layer


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_blocks_come_back_from_the_wire_and_are_the_blob(tmp_path, encoding):
    body = b"text " * 60_000 + os.urandom(200_000) + bytes(400_000) + b"end"
    layer = one(t.file(b"a", body) + t.file(b"b", b"x"), tmp_path, encoding=encoding, block_bytes=1 << 16)
    index = Index.parse((tmp_path / layer.index.digest).read_bytes())
    blob, wire = (tmp_path / layer.blob.digest).read_bytes(), (tmp_path / layer.wire.digest).read_bytes()
    assert blob.startswith(body)
    assert (index.blob_size, index.wire_size, index.encoding) == (len(blob), len(wire), encoding)
    raw = []
    for number in range(index.count):
        _, offset, length = index.block(number)
        raw.append(read_block(index, number, wire[offset : offset + length]))
    assert b"".join(raw) == blob
    zeros = [number for number in range(index.count) if index.is_zero(number)]
    assert len(zeros) >= 4
    assert decode_block(index, zeros[0], b"") == bytes(1 << 16)


def test_every_file_starts_on_a_block_and_is_padded_with_zeros(tmp_path):
    layer = one(t.file(b"a", b"1" * 4097) + t.file(b"empty") + t.file(b"b", b"2"), tmp_path)
    blob = (tmp_path / layer.blob.digest).read_bytes()
    assert blob == b"1" * 4097 + bytes(4095) + b"2" + bytes(4095)


@pytest.mark.parametrize("block_bytes", [1 << 16, 1 << 20, 4 << 20])
def test_blobs_larger_than_the_buffers_are_whole(tmp_path, block_bytes):
    body = os.urandom(MIB) * 21 + b"tail"
    layer = one(t.file(b"a", b"first") + t.file(b"big", body), tmp_path, block_bytes=block_bytes)
    index = Index.parse((tmp_path / layer.index.digest).read_bytes())
    blob = (tmp_path / layer.blob.digest).read_bytes()
    assert blob[4096 : 4096 + len(body)] == body
    assert all(index.verify(n, blob[n * block_bytes : (n + 1) * block_bytes]) for n in range(index.count))
    assert not index.verify(0, blob[1 : block_bytes + 1])


@pytest.mark.parametrize("data", [b"", t.END, bytes(512)])
def test_a_layer_of_nothing_is_a_layer_without_a_blob(tmp_path, data):
    layer = one(data, tmp_path)
    assert (layer.blob.size, layer.wire.size, layer.entries) == (0, 0, 0)
    assert layer.blob.digest == hashlib.sha256().hexdigest()
    assert not (tmp_path / layer.blob.digest).exists()
    assert Index.parse((tmp_path / layer.index.digest).read_bytes()).count == 0
    assert set(merged_facts(merge([layer], tmp_path), tmp_path)) == {b""}


def test_equal_layers_are_equal_bytes_whatever_was_built_before(tmp_path):
    data = t.directory(b"d") + t.file(b"d/f", b"1" * 5000) + t.hardlink(b"g", b"d/f") + t.file(b"d/.wh.x")
    first = one(data, tmp_path)
    (tmp_path / "other").mkdir()
    assert one(data, tmp_path / "other") == first
    assert one(data, tmp_path) == first  # over what is there
    assert one(data + t.file(b"h"), tmp_path).id != first.id


def test_the_layers_own_facts_are_private_attributes(tmp_path):
    data = (
        t.file(b"p/f", b"1") + t.file(b"p/.wh.gone") + t.directory(b"o") + t.file(b"o/.wh..wh..opq")
        + t.file(b"o/.wh.r") + t.file(b"o/r", b"2") + t.hardlink(b"h", b"lower/file") + t.header(b"null0", b"3")
    )  # fmt: skip
    facts = meta_facts(one(data, tmp_path), tmp_path)
    assert facts[b"p"] == (stat.S_IFDIR, {IMPLICIT: b""})
    assert facts[b"p/f"] == (stat.S_IFREG, {})
    assert facts[b"p/gone"] == (stat.S_IFCHR, {WHITEOUT: b"1"})
    assert facts[b"o"] == (stat.S_IFDIR, {OPAQUE: b"2"})
    assert facts[b"o/r"] == (stat.S_IFREG, {REPLACES: b"3"})
    assert facts[b"h"] == (stat.S_IFREG, {LINK: b"lower/file"})
    assert facts[b"null0"] == (stat.S_IFCHR, {})
    assert not any(b"overlay" in name for _, xattrs in facts.values() for name in xattrs)


def test_entries_without_a_place_lie_aside_with_their_path(tmp_path):
    data = t.symlink(b"lib", b"usr") + t.file(b"lib/x", b"1") + t.file(b"twice", b"a") + t.file(b"twice", b"b")
    facts = meta_facts(one(data, tmp_path), tmp_path)
    aside = sorted(xattrs[PATH] for path, (_, xattrs) in facts.items() if path.startswith(ASIDE + b"/"))
    assert aside == [b"lib/x", b"twice"]
    assert facts[b"lib"][0] == stat.S_IFLNK


def test_no_mark_is_in_a_merged_image_and_none_can_be_forged(tmp_path):
    notes: list[str] = []
    forged = t.pax([(b"SCHILY.xattr.trusted.dsec.whiteout", b"1"), (b"SCHILY.xattr.user.a", b"1")])
    lower = t.directory(b"d") + t.file(b"d/f", b"1")
    layers = build(
        [lower, forged + t.header(b"d", b"3") + t.file(b"p/q/f"), t.file(b"p/.wh.q")], tmp_path, note=notes.append
    )
    assert notes == ["d: attributes trusted.dsec.whiteout left out, the name space is this store's own"]
    assert layers[1].notes == tuple(notes)
    facts = merged_facts(merge(layers, tmp_path), tmp_path)
    assert facts[b"d"][0] == stat.S_IFCHR  # the device that was asked for, hiding nothing by a mark
    assert {name for fact in facts.values() for name, _ in fact[7]} == {b"user.a"}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees())
def test_a_tree_is_a_layer_of_its_own(tmp_path, root):
    layer = build_layer(root, tmp_path)
    assert merged_facts(merge([layer], tmp_path), tmp_path) == node_facts(root)


def test_a_tree_may_have_names_that_mean_something_in_archives(tmp_path):
    root = new_directory()
    for name in (b".wh.a", b".wh..wh..opq", ASIDE, b".wh..wh.plnk"):
        folder = root.children[name] = new_directory()
        folder.children[b"f"] = Node(fmt=stat.S_IFREG, mode=0o644, content=BytesContent(name))
        folder.children[b"g"] = folder.children[b"f"]
    layer = build_layer(root, tmp_path)
    assert merged_facts(merge([layer], tmp_path), tmp_path) == node_facts(root)


@pytest.mark.parametrize(
    ("data", "options", "code"),
    [
        (t.file(b"ok", b"1" * 9000) + t.file(b"cut", b"2" * 9000)[:4000], {}, "bad_image"),
        (t.file(b"ok", b"1") + t.header(b"x", b"Q"), {}, "bad_image"),
        (t.file(b"ok", b"1") + t.file(b"d/.wh."), {}, "bad_image"),
        (t.file(b"a") + t.file(b"b"), {"limits": Limits(max_files=1)}, "too_large"),
        (t.file(b"a", b"1" * 200), {"limits": Limits(max_unpacked_bytes=100)}, "too_large"),
        (t.file(b"a", b"1"), {"block_bytes": 100_000}, "unsupported"),
        (t.pax([(b"path", b"d/" + b"n" * 300)]) + t.file(b"x", b"1"), {}, "unsupported"),  # no file system takes it
        (t.file(b"ok", b"1") + t.gnu_sparse(b"s", [], 1 << 63), {}, "unsupported"),
    ],
)
def test_a_failed_build_leaves_nothing(tmp_path, data, options, code):
    with pytest.raises(ImageError) as caught:
        one(data, tmp_path, **options)
    assert caught.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_metadata_of_another_layer_or_damaged_is_refused(tmp_path):
    a, b = build([t.file(b"a", b"1"), t.file(b"b", b"2")], tmp_path)
    data = (tmp_path / a.meta.digest).read_bytes()
    with pytest.raises(ImageError, match="another blob") as caught:
        read_metadata(data, b.blob, "layer")
    assert caught.value.code == "corrupt"
    (tmp_path / a.meta.digest).write_bytes(data[:-1] + b"\1")
    with pytest.raises(ImageError, match="does not match its digest"):
        merge([a], tmp_path)


def test_progress_ends_at_the_end(tmp_path):
    seen: list[tuple[str, int, int]] = []
    data = t.file(b"a", os.urandom(9 * MIB))
    one(data, tmp_path, progress=lambda *report: seen.append(report))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("layer", 9 * MIB, len(data))


def test_an_image_is_the_same_wherever_it_is_composed(tmp_path):
    layers = build([t.file(b"a", b"1"), t.file(b".wh.a") + t.file(b"b", b"2")], tmp_path)
    stack = [(layer, tmp_path / layer.meta.digest) for layer in layers]
    (tmp_path / "elsewhere").mkdir()
    here, there = compose_image(stack, tmp_path, source="x"), compose_image(stack, tmp_path / "elsewhere", source="y")
    assert (here.digest, here.merged) == (there.digest, there.merged)
    assert digest_of(tmp_path / here.merged.digest) == here.merged.digest
    assert ImageManifest.parse(here.render()) == here
    assert compose_image(stack[::-1], tmp_path).digest != here.digest
