"""Sources by their strings, and archives read through the store: formats, digests, refusals."""

from __future__ import annotations

import gzip
import json
import os

import pytest
import zstandard
from dsec_imagefs import ImageError, ImageStore, Limits
from dsec_imagefs.sources.archive import ArchiveSource
from dsec_imagefs.sources.debootstrap import DebootstrapSource
from dsec_imagefs.sources.directory import DirectorySource
from dsec_imagefs.sources.engine import EngineSource
from dsec_imagefs.sources.parse import parse_source
from dsec_imagefs.sources.registry import RegistrySource

from tests.kit import tarbytes as t
from tests.kit.ocilayout import Layout, digest_of, docker_archive

LAYERS = [
    t.directory(b"etc") + t.file(b"etc/a", b"1") + t.file(b"etc/b", b"2") + t.END,
    t.file(b"etc/.wh.a") + t.file(b"etc/c", b"3" * 100_000) + t.END,
]


@pytest.fixture
def store(tmp_path):
    return ImageStore(tmp_path / "store")


def names_of(store: ImageStore, ref: str) -> dict[bytes, bytes]:
    with store.open_root(ref) as reader:
        return {path: reader.read(inode) for path, inode in reader.walk() if inode.fmt == 0o100000}


EXPECTED = {b"etc/b": b"2", b"etc/c": b"3" * 100_000}


@pytest.mark.parametrize("how", ["gzip", "zstd", "plain"])
def test_an_oci_layout_becomes_an_image(store, tmp_path, how):
    Layout(tmp_path / "l").image(LAYERS, tag="v1", how=how)
    image = store.import_image(f"oci:{tmp_path}/l:v1", "demo:1")
    assert names_of(store, "demo:1") == EXPECTED
    assert image.config.env == ("PATH=/bin", "X=1")
    assert (image.config.cwd, image.config.user, image.config.entrypoint) == ("/work", "1000:1000", ("/init",))
    assert (image.config.cmd, image.config.labels, image.config.stop_signal) == (("serve",), {"a": "b"}, "SIGINT")
    assert image.created == "2024-01-02T03:04:05Z"
    assert image.diff_ids == tuple(digest_of(layer) for layer in LAYERS)
    assert len(image.layers) == len(LAYERS)
    assert image.names == ("demo:1",)


def test_a_docker_archive_becomes_the_same_root(store, tmp_path):
    (tmp_path / "d.tar").write_bytes(docker_archive([*LAYERS, LAYERS[1]], ["demo:1"]))
    Layout(tmp_path / "l").image(LAYERS)
    ours = store.import_image(f"docker-archive:{tmp_path}/d.tar", "docker")
    assert ours.rootfs == store.import_image(f"oci:{tmp_path}/l", "oci").rootfs
    with gzip.open(tmp_path / "d.tar.gz", "wb") as packed:
        packed.write((tmp_path / "d.tar").read_bytes())
    assert store.import_image(f"{tmp_path}/d.tar.gz").digest == ours.digest


def test_images_in_one_archive_are_chosen_by_name(store, tmp_path):
    layout = Layout(tmp_path / "l")
    layout.image(LAYERS[:1], tag="one")
    layout.image(LAYERS, tag="two")
    assert names_of(store, store.import_image(f"oci:{tmp_path}/l:two").digest) == EXPECTED
    with pytest.raises(ImageError, match="no single image") as caught:
        store.import_image(f"oci:{tmp_path}/l")
    assert "one, two" in caught.value.hint
    with pytest.raises(ImageError, match="no tag 'three'"):
        store.import_image(f"oci:{tmp_path}/l:three")


def test_an_index_of_platforms_gives_this_machine_its_own(store, tmp_path):
    layout = Layout(tmp_path / "l")
    mine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    other = "s390x"
    rows = [
        layout.image(LAYERS[:1]) | {"platform": {"os": "linux", "architecture": other}},
        layout.image(LAYERS) | {"platform": {"os": "linux", "architecture": mine}},
        layout.image(LAYERS[:1]) | {"platform": {"os": "unknown", "architecture": "unknown"}},
    ]
    index = json.dumps({"schemaVersion": 2, "manifests": rows}).encode()
    layout.manifests = [layout.descriptor(index, "application/vnd.oci.image.index.v1+json")]
    layout.write_index()
    assert names_of(store, store.import_image(f"oci:{tmp_path}/l").digest) == EXPECTED


def corrupt(path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("how", ["gzip", "zstd", "plain"])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "missing"])
def test_damaged_layers_are_errors_and_leave_nothing(store, tmp_path, how, damage):
    layout = Layout(tmp_path / "l")
    row = layout.image(LAYERS, how=how)
    manifest = json.loads((layout.path / "blobs" / row["digest"].replace(":", "/")).read_bytes())
    blob = layout.path / "blobs" / manifest["layers"][1]["digest"].replace(":", "/")
    if damage == "missing":
        blob.unlink()
    else:
        changes = {
            "flip": lambda b: b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 0xFF]) + b[len(b) // 2 + 1 :],
            "cut": lambda b: b[:-20],
            "grow": lambda b: b + bytes(512),
        }
        corrupt(blob, changes[damage])
    with pytest.raises(ImageError) as caught:
        store.import_image(f"oci:{tmp_path}/l", "demo")
    assert caught.value.code == "bad_image"
    assert caught.value.field == "source"
    assert store.ls() == []
    assert list((store.root / "tmp").iterdir()) == []
    assert [*(store.root / "blobs").iterdir(), *(store.root / "objects").iterdir()] == []


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (gzip.compress(LAYERS[0])[:-9], "cut short|decompressed"),
        (zstandard.compress(LAYERS[0])[:-3], "cut short|decompressed"),
        (LAYERS[0][:700], "cut short"),
        (b"BZh91AY", "bzip2"),
        (b"\xfd7zXZ\0rest", "xz"),
    ],
)
def test_truncated_and_odd_layers_without_digests_are_errors(store, tmp_path, layer, match):
    """A Docker archive's stored bytes have no digest of their own, so the decoder itself must notice."""
    archive = docker_archive([layer], ["x:1"])
    with pytest.raises(ImageError, match=match):
        (tmp_path / "d.tar").write_bytes(archive)
        store.import_image(f"docker-archive:{tmp_path}/d.tar")


def test_a_device_that_overlayfs_hides_is_named(store, tmp_path):
    layer = t.directory(b"d") + t.header(b"d/zero", b"3") + t.header(b"null", b"3", device=(1, 3)) + t.END
    (tmp_path / "d.tar").write_bytes(docker_archive([layer], ["x:1"]))
    notes = store.import_image(f"docker-archive:{tmp_path}/d.tar", "x").notes
    assert notes == ("d/zero: a device 0:0 is kept, but overlayfs hides it from containers",)


def test_gzip_of_several_members_and_zstd_of_several_frames(store, tmp_path):
    half = len(LAYERS[0]) // 1024 * 512
    skippable = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"hello"
    layout = Layout(tmp_path / "l")
    for how, stored in (
        ("gzip", gzip.compress(LAYERS[0][:half]) + gzip.compress(LAYERS[0][half:]) + bytes(100)),
        ("zstd", skippable + zstandard.compress(LAYERS[0][:half]) + skippable + zstandard.compress(LAYERS[0][half:])),
    ):
        kind = "application/vnd.oci.image.layer.v1.tar+" + how
        layout.image(LAYERS[:1], tag=how, layers=[layout.descriptor(stored, kind)])
        image = store.import_image(f"oci:{tmp_path}/l:{how}")
        assert names_of(store, image.digest) == {b"etc/a": b"1", b"etc/b": b"2"}


def test_a_bomb_stops_at_the_limit(store, tmp_path):
    Layout(tmp_path / "l").image([t.file(b"zeros", bytes(40 << 20)) + t.END], how="zstd")
    with pytest.raises(ImageError) as caught:
        store.import_image(f"oci:{tmp_path}/l", limits=Limits(max_unpacked_bytes=16 << 20))
    assert caught.value.code == "too_large"


def test_artifacts_that_are_no_images_are_refused(store, tmp_path):
    layout = Layout(tmp_path / "l")
    layout.image(LAYERS, layers=[layout.descriptor(b"{}", "application/vnd.in-toto+json")])
    with pytest.raises(ImageError, match="in-toto"):
        store.import_image(f"oci:{tmp_path}/l")


def test_digests_in_documents_cannot_name_other_paths(store, tmp_path):
    layout = Layout(tmp_path / "l")
    layout.manifests = [{"digest": "sha256:../../../../etc/passwd", "size": 1, "mediaType": "x"}]
    layout.write_index()
    with pytest.raises(ImageError, match="no proper digest"):
        store.import_image(f"oci:{tmp_path}/l")


def test_a_layout_cannot_point_into_the_host_by_links(store, tmp_path):
    layout = Layout(tmp_path / "l")
    row = layout.image(LAYERS)
    blob = layout.path / "blobs" / row["digest"].replace(":", "/")
    blob.rename(tmp_path / "outside")
    blob.symlink_to(tmp_path / "outside")
    with pytest.raises(ImageError, match="is missing"):
        store.import_image(f"oci:{tmp_path}/l")


def test_source_strings(tmp_path):
    colon = tmp_path / "a:b"
    colon.mkdir()
    (tmp_path / "t.tar").write_bytes(b"x")
    assert parse_source(f"oci:{colon}") == ArchiveSource(kind="oci", path=str(colon))
    assert parse_source(f"oci:{colon}:v1") == ArchiveSource(kind="oci", path=str(colon), ref="v1")
    assert parse_source(f"docker-archive:{tmp_path}/t.tar:reg:5000/n:1") == ArchiveSource(
        kind="docker-archive", path=f"{tmp_path}/t.tar", ref="reg:5000/n:1"
    )
    assert parse_source(str(colon)) == DirectorySource(path=str(colon))
    assert parse_source("docker://reg:5000/a/b:1") == RegistrySource(ref="reg:5000/a/b:1")
    assert parse_source("docker-daemon:debian:12") == EngineSource(ref="debian:12")
    found = parse_source("debootstrap:bookworm?include=g++,git,git")
    assert found == DebootstrapSource(suite="bookworm", include=("g++", "git"))
    assert found.label == "debootstrap:bookworm?include=g++,git"


@pytest.mark.parametrize(
    "text",
    [
        "", "no/such/path", "debootstrap:", "debootstrap:Book worm", "debootstrap:x?include=a;b", "debootstrap:sid?x=1",
        "debootstrap:bookworm?mirror=ftp://x", "debootstrap:bookworm?include=-oDebug", "docker://user:pw@reg/x",
        "docker://", "docker://--all", "docker-daemon:-x",
    ],
)  # fmt: skip
def test_wrong_sources_are_refused_naming_the_field(text):
    with pytest.raises(ImageError) as caught:
        parse_source(text)
    assert caught.value.code == "bad_source"
    assert caught.value.field == "source"
    assert "pw" not in str(caught.value)


def test_cache_keys_tell_builds_apart():
    one = parse_source("debootstrap:bookworm?include=a1,b1")
    assert one.cache_key == parse_source("debootstrap:bookworm?include=b1,a1").cache_key
    others = ["debootstrap:trixie?include=a1,b1", "debootstrap:bookworm", "debootstrap:bookworm?mirror=http://h/d"]
    assert len({one.cache_key, *(parse_source(text).cache_key for text in others)}) == 4
