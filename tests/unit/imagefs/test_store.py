"""The store: names, digests, prefixes, removal, collection, verification, leftovers, other versions."""

from __future__ import annotations

import fcntl
import os
import threading
from dataclasses import replace

import pytest
from dsec_imagefs import ImageConfig, ImageError, ImageStore
from dsec_imagefs.image import normal_name
from dsec_imagefs.mountinfo import parse_mountinfo
from dsec_imagefs.objects import files_of

from tests.kit import tarbytes as t
from tests.kit.ocilayout import Layout
from tests.unit.imagefs.test_sources import LAYERS


@pytest.fixture
def store(tmp_path):
    return ImageStore(tmp_path / "store")


@pytest.fixture
def tree(tmp_path):
    path = tmp_path / "tree"
    (path / "etc").mkdir(parents=True)
    (path / "etc" / "f").write_text("one")
    return path


def change(tree, text: str) -> None:
    (tree / "etc" / "f").write_text(text)


def blobs(store) -> set[str]:
    return {p.name for p in (store.root / "blobs").iterdir()}


def blobs_of(store, image) -> set[str]:
    return {layer.blob.digest for layer in store.layers(image)}


def test_an_image_is_found_by_every_kind_of_reference(store, tree):
    image = store.import_image(f"dir:{tree}", "demo")
    digest = image.digest
    for ref in ("demo", "demo:latest", digest, digest[:20], digest.removeprefix("sha256:")[:6]):
        assert store.resolve(ref) == image
    assert store.ls() == [image]
    assert image.names == ("demo:latest",)
    assert image.files == 3
    sizes = [store.objects.blob(blob).stat().st_size for blob in blobs_of(store, image)]
    assert image.size_bytes == sum(sizes) + store.objects.path(image.rootfs.removeprefix("sha256:")).stat().st_size


def test_unknown_references_say_what_there_is(store, tree):
    with pytest.raises(ImageError, match="no image 'x'") as caught:
        store.resolve("x")
    assert caught.value.field == "ref"
    store.import_image(f"dir:{tree}", "demo")
    with pytest.raises(ImageError) as caught:
        store.resolve("demo:2")
    assert "demo:latest" in caught.value.hint
    for ref in ("", "../../etc/passwd", "sha256:" + "0" * 64, "a b", "*"):
        with pytest.raises(ImageError, match="no image"):
            store.resolve(ref)


def test_the_same_source_again_is_the_same_image(store, tree):
    one = store.import_image(f"dir:{tree}", "a")
    two = store.import_image(f"dir:{tree}", "b")
    assert one.digest == two.digest
    assert two.names == ("a:latest", "b:latest")
    assert len(blobs(store)) == 1


def test_a_name_moves_and_gc_takes_what_lost_its_name(store, tree):
    old = store.import_image(f"dir:{tree}", "demo")
    gone = {f"sha256:{blob}" for blob in blobs_of(store, old)}
    change(tree, "two")
    new = store.import_image(f"dir:{tree}", "demo")
    assert store.resolve("demo").digest == new.digest
    assert store.resolve(old.digest).names == ()
    collected = store.gc()
    assert collected.images == (old.digest,)
    assert set(collected.blobs) == gone
    assert collected.freed_bytes > 0
    assert store.ls() == [new]


def test_images_that_differ_in_configuration_share_a_root(store, tmp_path):
    layout = Layout(tmp_path / "l")
    layout.image(LAYERS, tag="a")
    one = store.import_image(f"oci:{tmp_path}/l", "configured")
    files = store.root / "tmp" / "copy"
    files.mkdir()
    manifest = store.manifest(one.digest)
    for digest in files_of(manifest, store.layers(one)).objects:
        (files / digest).write_bytes(b"not looked at: it is there already")
    other = store.publish(replace(manifest, config=ImageConfig()), store.layers(one), files, "plain")
    assert other.digest != one.digest
    assert other.rootfs == one.rootfs
    assert blobs(store) == blobs_of(store, one)
    store.rm("configured")
    assert blobs(store) == blobs_of(store, other)
    store.verify("plain")
    store.rm("plain")
    assert blobs(store) == set()
    assert list((store.root / "objects").iterdir()) == []


def test_rm_takes_one_name_and_with_the_last_the_image(store, tree):
    image = store.import_image(f"dir:{tree}", "a")
    store.tag("a", "b:1")
    assert store.rm("a") == ("a:latest",)
    assert store.resolve("b:1").digest == image.digest
    assert store.rm("b:1") == ("b:1", image.digest)
    assert store.ls() == []
    assert blobs(store) == set()
    with pytest.raises(ImageError) as caught:
        store.rm("b:1")
    assert caught.value.code == "not_found"


def test_rm_by_digest_takes_all_names(store, tree):
    image = store.import_image(f"dir:{tree}", "a")
    store.tag("a", "b")
    assert store.rm(image.digest) == ("a:latest", "b:latest", image.digest)
    assert store.ls() == []


def test_what_is_used_is_neither_removed_nor_collected(store, tree):
    image = store.import_image(f"dir:{tree}")
    store.users.add(image.rootfs.removeprefix("sha256:"), "sb-1", image.digest)
    assert store.gc().images == ()
    with pytest.raises(ImageError, match="sb-1") as caught:
        store.rm(image.digest)
    assert caught.value.code == "in_use"
    store.users.remove("sb-1", image.digest)
    assert store.gc().images == (image.digest,)


def test_force_removes_what_is_used(store, tree):
    image = store.import_image(f"dir:{tree}", "a")
    store.users.add(image.rootfs.removeprefix("sha256:"), "sb-1", image.digest)
    store.rm("a", force=True)
    assert store.ls() == []
    assert blobs(store) == set()


def test_verify_notices_one_changed_bit(store, tree):
    image = store.import_image(f"dir:{tree}", "a")
    assert store.verify("a") == image
    (layer,) = store.layers(image)
    documents = (layer.meta.digest, layer.index.digest, image.rootfs.removeprefix("sha256:"))
    for path in (store.objects.blob(layer.blob.digest), *(store.objects.path(digest) for digest in documents)):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(ImageError, match=path.name) as caught:
            store.verify("a")
        assert caught.value.code == "corrupt"
        path.write_bytes(whole)
    assert store.verify("a") == image


def test_a_missing_root_is_noticed_by_inspect(store, tree):
    image = store.import_image(f"dir:{tree}", "a")
    store.objects.path(image.rootfs.removeprefix("sha256:")).unlink()
    with pytest.raises(ImageError, match="missing"):
        store.inspect("a")


def test_opening_sweeps_what_the_dead_left_and_spares_the_living(store):
    dead, living = store.root / "tmp" / "dead", store.root / "tmp" / "living"
    for path in (dead, living):
        (path / "root" / "sub").mkdir(parents=True)
    (store.root / "tmp" / "stray").write_text("x")
    fd = os.open(living / "owner.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        ImageStore(store.root)
        assert [p.name for p in (store.root / "tmp").iterdir()] == ["living"]
    finally:
        os.close(fd)
    assert store.gc().leftovers == 1


def test_a_store_of_another_version_is_refused(store):
    (store.root / "format").write_text("9\n")
    with pytest.raises(ImageError, match="another version") as caught:
        ImageStore(store.root)
    assert caught.value.code == "bad_store"


def test_imports_of_one_image_at_once_agree(store, tree):
    results, errors = [], []

    def work(number: int) -> None:
        try:
            results.append(store.import_image(f"dir:{tree}", f"n{number}").digest)
        except ImageError as err:
            errors.append(err)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert len(results) == 6
    assert len(set(results)) == 1
    assert store.resolve("n0").names == tuple(f"n{n}:latest" for n in range(6))
    assert len(blobs(store)) == 1
    assert list((store.root / "tmp").iterdir()) == []


def test_progress_tells_the_stages(store, tree):
    seen = []
    store.import_image(f"dir:{tree}", "a", progress=lambda stage, done, total: seen.append((stage, done, total)))
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == ["layer", "merge", "publish"]
    assert [(d, t) for s, d, t in seen if s == "publish"][-1] == (1, 1)


@pytest.mark.parametrize("name", ["", "-x", "a b", "a:b:c", "../x", "a//b", "x/", "sha256:" + "0" * 64, "é", "a" * 200])
def test_names_that_are_none_are_refused_before_anything_happens(store, tree, name):
    with pytest.raises(ImageError) as caught:
        store.import_image(f"dir:{tree}", name)
    assert (caught.value.code, caught.value.field) == ("bad_name", "name")
    assert store.ls() == []


def test_names_get_a_tag():
    assert normal_name("reg.io/a/b") == "reg.io/a/b:latest"
    assert normal_name("a:1.2-x") == "a:1.2-x"


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b'{"version": 9}', b"cut"])
def test_a_damaged_record_is_named(store, tree, damage):
    image = store.import_image(f"dir:{tree}", "a")
    path = store.root / "images" / f"{image.digest.removeprefix('sha256:')}.json"
    path.write_bytes(path.read_bytes()[:-5] if damage == b"cut" else damage)
    with pytest.raises(ImageError, match=path.name) as caught:
        store.resolve("a")
    assert caught.value.code in ("corrupt", "unsupported")


def test_a_record_of_another_image_is_not_believed(store, tree):
    one = store.import_image(f"dir:{tree}", "a")
    change(tree, "two")
    two = store.import_image(f"dir:{tree}", "b")
    paths = [store.root / "images" / f"{image.digest.removeprefix('sha256:')}.json" for image in (one, two)]
    paths[0].write_bytes(paths[1].read_bytes())
    with pytest.raises(ImageError, match="holds the image") as caught:
        store.resolve("a")
    assert caught.value.code == "corrupt"


def test_a_layer_that_is_damaged_shows_in_the_listing_and_fails_by_name(store, tree):
    image = store.import_image(f"dir:{tree}", "a")
    layer = image.layers[0].removeprefix("sha256:")
    store.objects.path(layer).write_bytes(b"{}")
    fresh = ImageStore(store.root)
    assert [one.names for one in fresh.ls()] == [("a:latest",)]
    with pytest.raises(ImageError, match=layer) as caught:
        fresh.verify("a")
    assert caught.value.code == "corrupt"
    fresh.rm("a")
    assert fresh.import_image(f"dir:{tree}", "a") == fresh.verify("a")


def test_a_layer_that_two_images_share_is_made_once_and_outlives_one_of_them(store, tmp_path):
    base, top = LAYERS[0], t.file(b"etc/d", b"4") + t.END
    for name, tars in (("one", LAYERS), ("two", [base, top])):
        Layout(tmp_path / name).image(tars)
    one = store.import_image(f"oci:{tmp_path}/one", "one")
    two = store.import_image(f"oci:{tmp_path}/two", "two")
    assert one.layers[0] == two.layers[0]
    assert one.layers[1] != two.layers[1]
    assert len(blobs(store)) == 3
    store.rm("one")
    assert blobs(store) == blobs_of(store, two)
    store.verify("two")
    assert store.import_image(f"oci:{tmp_path}/one", "one").digest == one.digest


def test_a_layer_whose_files_are_gone_is_made_again(store, tmp_path):
    Layout(tmp_path / "l").image(LAYERS)
    image = store.import_image(f"oci:{tmp_path}/l", "one")
    for path in (store.root / "blobs").iterdir():
        path.unlink()
    assert store.import_image(f"oci:{tmp_path}/l", "one").digest == image.digest
    store.verify("one")


def test_mountinfo_is_unescaped():
    line = b"36 35 98:0 / /mnt/a\\040b rw shared:1 master:2 - erofs /x\\134y ro\n1 2 0:1 /r /p rw - tmpfs none rw\n"
    one, two = parse_mountinfo(line)
    assert (one.target, one.source, one.fs_type, one.shared) == ("/mnt/a b", "/x\\y", "erofs", True)
    assert (two.target, two.root, two.shared) == ("/p", "/r", False)


def test_a_root_can_be_looked_into_without_a_mount(store, tree):
    store.import_image(f"dir:{tree}", "a")
    with store.open_root("a") as root:
        assert root.read(root.lookup(b"etc/f")) == b"one"


def test_a_damaged_name_is_an_error_that_names_its_file(store, tree):
    store.import_image(f"dir:{tree}", "a")
    path = store.root / "refs" / "a%3Alatest"
    for text in ("", "{}", '{"name": "a:latest", "digest": "sha256:../x"}'):
        path.write_text(text)
        with pytest.raises(ImageError) as caught:
            store.resolve("a")
        assert caught.value.code == "corrupt"


@pytest.mark.parametrize("kind", ["dir", "oci", "docker-archive"])
def test_sources_that_are_not_there_are_refused(store, tmp_path, kind):
    with pytest.raises(ImageError, match="can't open") as caught:
        store.import_image(f"{kind}:{tmp_path}/nothing", "a")
    assert (caught.value.code, caught.value.field) == ("bad_source", "source")
    assert list((store.root / "tmp").iterdir()) == []


def test_a_directory_that_is_no_layout_says_what_to_do(store, tree):
    with pytest.raises(ImageError, match=r"neither index\.json nor") as caught:
        store.import_image(f"oci:{tree}", "a")
    assert "dir:" in caught.value.hint
