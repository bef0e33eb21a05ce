"""Stacking the layers of images into a new one: upper hides lower, nothing of the data is touched."""

from __future__ import annotations

import io
import tarfile

import pytest
from dsec_imagefs import ImageConfig, ImageError, ImageStore
from dsec_imagefs.composing import compose

from tests.kit import tarbytes as t
from tests.kit.ocilayout import Layout
from tests.unit.imagefs.test_sources import EXPECTED, LAYERS, names_of


@pytest.fixture
def store(tmp_path):
    store = ImageStore(tmp_path / "store")
    Layout(tmp_path / "l").image(LAYERS, tag="base")
    store.import_image(f"oci:{tmp_path}/l:base", "base")
    (tmp_path / "tool.tar").write_bytes(t.file(b"etc/.wh.b") + t.file(b"opt/tool", b"new") + t.END)
    store.import_image(f"tar:{tmp_path}/tool.tar", "tool")
    return store


def blobs(store) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in (store.root / "blobs").iterdir()}


def test_a_layer_goes_on_top_of_an_image_without_touching_data(store):
    before = blobs(store)
    image = compose(store, ["base", "tool"], "both")
    assert names_of(store, "both") == {b"etc/c": EXPECTED[b"etc/c"], b"opt/tool": b"new"}
    assert image.layers == store.resolve("base").layers + store.resolve("tool").layers
    assert image.config == store.resolve("base").config
    assert blobs(store) == before
    assert names_of(store, compose(store, ["tool", "base"], None).digest) == EXPECTED | {b"opt/tool": b"new"}


def test_the_same_stack_is_the_same_image(store):
    one = compose(store, ["base", "tool"], "one")
    assert compose(store, ["base", "tool"], "two").digest == one.digest
    other = compose(store, ["base", "tool"], "three", config_of="tool")
    assert (other.digest != one.digest, other.rootfs, other.config) == (True, one.rootfs, ImageConfig())


def test_layers_stay_while_a_composed_image_needs_them(store):
    compose(store, ["base", "tool"], "both")
    store.rm("base")
    store.rm("tool")
    store.gc()
    store.verify("both")
    store.rm("both")
    assert blobs(store) == {}


def test_nothing_and_strangers_are_refused(store):
    for parts, code in (([], "bad_source"), (["base", "nothere"], "not_found")):
        with pytest.raises(ImageError) as caught:
            compose(store, parts, "x")
        assert caught.value.code == code
    with pytest.raises(ImageError) as caught:
        compose(store, ["base"], "a b")
    assert caught.value.field == "name"
    assert [image.names for image in store.ls()] == [("base:latest",), ("tool:latest",)]


@pytest.mark.parametrize("how", ["w", "w:gz"])
def test_a_plain_tar_is_a_layer(store, tmp_path, how):
    with tarfile.open(tmp_path / "l.tar", how) as tar:
        tar.addfile(tarfile.TarInfo("f"), io.BytesIO())
    image = store.import_image(f"tar:{tmp_path}/l.tar", "l")
    assert names_of(store, "l") == {b"f": b""}
    assert image.source == f"tar:{tmp_path}/l.tar"
