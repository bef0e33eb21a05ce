"""The index, the wire, the manifests and the metadata of layers as a stranger may have written them."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import replace

import pytest
import zstandard
from dsec_imagefs.erofs import ondisk
from dsec_imagefs.erofs.reader import ErofsReader
from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import ImageConfig
from dsec_imagefs.layer import ImageManifest, Index, Layer, Part, Wire, decode_block
from dsec_imagefs.layer.index import zero_digest
from dsec_imagefs.layer.tree_of import read_metadata
from dsec_imagefs.layer.wire import read_block
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit import tarbytes as t
from tests.kit.layers import build, memory_file

KIB = 1024
HEX = "ab" * 32
PART = Part(digest=HEX, size=4096)
LAYER = Layer(meta=PART, blob=PART, index=PART, wire=Wire(digest=HEX, size=4096, encoding="raw"), notes=("n",))
IMAGE = ImageManifest(layers=(HEX,), merged=PART, config=ImageConfig(env=("A=\udc80",), labels={"l": "v"}))


def raw_index(sizes: list[int], *, encoding: str = "zstd", blob_size: int | None = None) -> Index:
    offset, blocks = 0, []
    for number, size in enumerate(sizes):
        blocks.append((hashlib.sha256(b"%d" % number).digest(), offset, size))
        offset += size
    size = len(sizes) * 64 * KIB if blob_size is None else blob_size
    return Index.of(blocks, block_bytes=64 * KIB, blob_size=size, encoding=encoding)


def test_an_index_says_where_each_byte_is():
    index = raw_index([10, 20, 30], blob_size=130 * KIB)
    assert [index.block_of(offset) for offset in (0, 64 * KIB - 1, 64 * KIB, 130 * KIB - 1)] == [0, 0, 1, 2]
    assert [index.raw_length(number) for number in range(3)] == [64 * KIB, 64 * KIB, 2 * KIB]
    assert [index.block(number)[1:] for number in range(3)] == [(0, 10), (10, 20), (30, 30)]
    assert (index.wire_size, index.count) == (60, 3)
    assert Index.parse(index.render()) == index
    for outside in (-1, 130 * KIB):
        with pytest.raises(ValueError, match="a blob of"):
            index.block_of(outside)
    for outside in (-1, 3):
        with pytest.raises(ValueError, match="of 3"):
            index.block(outside)


@pytest.mark.parametrize(
    ("blocks", "blob_size", "encoding"),
    [
        ([(bytes(32), 0, 0)], 64 * KIB, "zstd"),  # no wire bytes, and not the digest of zeros
        ([(bytes(32), 1, 9)], 64 * KIB, "zstd"),  # a gap
        ([(bytes(32), 0, 9), (bytes(32), 8, 9)], 128 * KIB, "zstd"),  # an overlap
        ([(bytes(32), 0, 1 << 20)], 64 * KIB, "zstd"),  # more than any encoding takes
        ([(bytes(32), 0, 9)], 64 * KIB, "raw"),  # raw bytes of another length
        ([(bytes(32), 64 * KIB, 64 * KIB)], 64 * KIB, "raw"),  # elsewhere
        ([(bytes(32), 0, 9)], 64 * KIB + 1, "zstd"),  # a block too few
        ([], 1, "raw"),
    ],
)
def test_an_index_that_cannot_be_is_refused(blocks, blob_size, encoding):
    with pytest.raises(ImageError) as caught:
        Index.of(blocks, block_bytes=64 * KIB, blob_size=blob_size, encoding=encoding)
    assert caught.value.code == "corrupt"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=120).map(lambda tail: raw_index([9, 9]).render()[:32] + tail))
def test_any_bytes_are_an_index_or_an_error(raw):
    try:
        index = Index.parse(raw)
    except ImageError:
        return
    assert index.render() == raw


def test_a_zero_block_needs_no_bytes_and_a_last_block_may_be_short():
    zeros = (zero_digest(64 * KIB), 0, 0)
    last = (hashlib.sha256(b"end").digest(), 64 * KIB, 3)
    index = Index.of([zeros, last], block_bytes=64 * KIB, blob_size=64 * KIB + 3, encoding="raw")
    assert index.is_zero(0)
    assert read_block(index, 0, b"") == bytes(64 * KIB)
    assert read_block(index, 1, b"end") == b"end"
    for wrong in (b"enD", b"en", b"end.", b""):
        with pytest.raises(ImageError) as caught:
            read_block(index, 1, wrong)
        assert caught.value.code == "corrupt"


def zstd_index(wire: bytes, raw: bytes) -> Index:
    block = (hashlib.sha256(raw).digest(), 0, len(wire))
    return Index.of([block], block_bytes=64 * KIB, blob_size=len(raw), encoding="zstd")


def test_a_frame_is_unpacked_no_further_than_its_block():
    raw = b"abc" * 9000
    good = zstandard.compress(raw)
    assert read_block(zstd_index(good, raw), 0, good) == raw
    bomb = zstandard.compress(bytes(512 << 20))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(raw)
    for wire in (bomb, unsized, b"no frame at all", good[:-9]):
        with pytest.raises(ImageError) as caught:
            decode_block(zstd_index(wire, raw), 0, wire)
        assert caught.value.code == "corrupt"


def test_a_block_of_other_bytes_is_refused():
    raw, other = b"abc" * 9000, b"abd" * 9000
    wire = zstandard.compress(other)
    with pytest.raises(ImageError, match="does not match its digest"):
        read_block(zstd_index(wire, raw), 0, wire)


@pytest.mark.parametrize("manifest", [LAYER, IMAGE])
def test_manifests_are_canonical_and_come_back(manifest):
    raw = manifest.render()
    assert type(manifest).parse(raw) == manifest
    assert raw == json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":")).encode()


def test_identities_are_of_what_matters():
    assert LAYER.id == hashlib.sha256(LAYER.render()).hexdigest()
    assert replace(LAYER, entries=5).id != LAYER.id
    for same in (replace(IMAGE, created="2026"), replace(IMAGE, source="s"), replace(IMAGE, notes=("n",))):
        assert same.digest == IMAGE.digest
    for other in (replace(IMAGE, layers=()), replace(IMAGE, config=ImageConfig(cwd="/x"))):
        assert other.digest != IMAGE.digest


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("meta", "digest"), HEX.upper()), (("meta", "digest"), "sha256:" + HEX), (("meta", "digest"), "../../etc"),
        (("blob", "size"), -1), (("blob", "size"), True), (("blob", "size"), "1"), (("blob", "size"), 1.5),
        (("wire", "encoding"), "lz4"), (("wire",), []), (("index",), None), (("notes",), "n"), (("entries",), None),
        (("version",), 2), (("more",), 1),
    ],
)  # fmt: skip
def test_a_layer_manifest_that_cannot_be_is_refused(path, value):
    document = json.loads(LAYER.render())
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ImageError) as caught:
        Layer.parse(json.dumps(document).encode())
    assert caught.value.code in ("corrupt", "unsupported")


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"null", b"\xff", b'{"version":1}', b"1" * 5000])
def test_what_is_no_manifest_is_refused(raw):
    for kind in (Layer, ImageManifest):
        with pytest.raises(ImageError):
            kind.parse(raw)


@pytest.mark.parametrize(("key", "value"), [("layers", ["x"]), ("layers", HEX), ("config", {}), ("merged", HEX)])
def test_an_image_manifest_that_cannot_be_is_refused(key, value):
    document = json.loads(IMAGE.render()) | {key: value}
    with pytest.raises(ImageError) as caught:
        ImageManifest.parse(json.dumps(document).encode())
    assert caught.value.code == "corrupt"


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A layer with every kind of mark, and its metadata."""
    out = tmp_path_factory.mktemp("honest")
    tar = (
        t.pax([(b"SCHILY.xattr.user.a", b"1" * 40)]) + t.file(b"p/f", b"1" * 9000) + t.file(b"p/.wh.g")
        + t.pax([(b"SCHILY.xattr.user.a", b"1" * 40)]) + t.directory(b"o") + t.file(b"o/.wh..wh..opq")
        + t.hardlink(b"h", b"p/f") + t.symlink(b"s", b"o") + t.file(b"s/x", b"2") + t.header(b"c", b"3")
        + t.gnu_sparse(b"sp", [(0, b"a"), (1_000_000, b"z")], 2_000_000) + t.file(b".wh..wh.plnk/1", b"3")
        + b"".join(t.file(b"many/%040d" % n) for n in range(150))
    )  # fmt: skip
    layer = build([tar], out)[0]
    return layer, (out / layer.meta.digest).read_bytes()


# Superblock and device table, the inodes after them, and anywhere.
offsets = st.integers(1024, 1300) | st.integers(4096, 4096 + 64 * 40) | st.integers(0, 9 * 4096 - 1)
changes = st.lists(
    st.tuples(offsets, st.integers(0, 255) | st.sampled_from([0, 1, 0x7F, 0xFF])), min_size=1, max_size=4
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes)
def test_metadata_with_changed_bytes_is_read_or_refused(honest, where):
    layer, meta = honest
    changed = bytearray(meta)
    for at, value in where:
        changed[at] = value
    try:
        entries = read_metadata(bytes(changed), layer.blob, "layer")
    except ImageError:
        return
    assert len(entries.entries) <= 200  # nothing is met twice


@pytest.mark.parametrize("cut", [0, 100, 1100, 4096, 8192])
def test_cut_metadata_is_refused(honest, cut):
    layer, meta = honest
    with pytest.raises(ImageError) as caught:
        read_metadata(meta[:cut], layer.blob, "layer")
    assert caught.value.code == "corrupt"


@pytest.mark.parametrize("number", [1 << 20, 1 << 59, 1 << 62, (1 << 64) - 1])
def test_an_inode_number_beyond_the_end_is_refused(honest, number):
    layer, meta = honest
    with memory_file() as fd:
        os.write(fd, meta)
        nid = ErofsReader(fd).lookup(b"p").nid
        changed = meta.replace(struct.pack("<Q", nid), struct.pack("<Q", number))
        assert changed != meta
        with pytest.raises(ImageError) as caught:
            read_metadata(changed, layer.blob, "layer")
        assert caught.value.code == "corrupt"
        os.pwrite(fd, changed, 0)
        with pytest.raises(ImageError) as caught:
            ErofsReader(fd).lookup(b"p")
        assert caught.value.code == "corrupt"


def test_directories_that_share_their_blocks_are_refused(tmp_path):
    """Twenty empty directories that claim the blocks of one large: little on disk, and much in memory."""
    tar = b"".join(t.directory(b"e%d" % n) for n in range(20))
    tar += b"".join(t.pax([(b"path", b"large/%0200d" % n)]) + t.file(b"x") for n in range(2000))
    layer = build([tar], tmp_path)[0]
    meta = bytearray((tmp_path / layer.meta.digest).read_bytes())
    assert len(read_metadata(bytes(meta), layer.blob, "layer").entries) == 2020
    with memory_file() as fd:
        os.write(fd, meta)
        image = ErofsReader(fd)
        large = image.lookup(b"large")
        blocks = large.size // ondisk.BLOCK * ondisk.BLOCK
        for number in range(20):
            at = image.lookup(b"e%d" % number).body_at - ondisk.INODE_EXTENDED.size
            struct.pack_into("<H", meta, at, 1 | ondisk.EROFS_INODE_FLAT_PLAIN << 1)
            struct.pack_into("<QI", meta, at + 8, blocks, large.u)
    with pytest.raises(ImageError, match="overlap") as caught:
        read_metadata(bytes(meta), layer.blob, "layer")
    assert caught.value.code == "corrupt"


def test_random_bytes_are_no_metadata(honest):
    with pytest.raises(ImageError):
        read_metadata(os.urandom(16 * KIB), honest[0].blob, "layer")
