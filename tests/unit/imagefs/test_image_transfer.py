"""Images pushed to and pulled from a store: order, resumption, two pushers, and nothing believed unchecked."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import ImageConfig
from dsec_imagefs.layer.index import Index
from dsec_imagefs.layer.manifest import ImageManifest, Layer, Part, Wire
from dsec_imagefs.stores import transfer
from dsec_imagefs.stores.arrival import Arrival
from dsec_imagefs.stores.base import StoreError
from dsec_imagefs.stores.directory import MARKER, DirectoryStore
from dsec_imagefs.stores.patient import PatientStore
from dsec_imagefs.stores.retry import Backoff
from dsec_imagefs.stores.transfer import fetch_object, image_objects, pull_image, push_image

from tests.kit.memory_store import MemoryStore

QUICK = Backoff(attempts=3, base_s=0.0)


@dataclass
class Local:
    """An image of small made-up objects in a directory."""

    root: Path
    manifest: ImageManifest
    layers: tuple[Layer, ...]

    def find(self, digest: str) -> Path:
        return self.root / digest

    def push(self, store, **options):
        return push_image(store, self.manifest, self.layers, self.find, deadline=soon(), backoff=QUICK, **options)


def soon() -> float:
    return time.monotonic() + 30


def part(root: Path, data: bytes) -> Part:
    digest = hashlib.sha256(data).hexdigest()
    (root / digest).write_bytes(data)
    return Part(digest=digest, size=len(data))


def make_layer(root: Path, seed: int) -> Layer:
    data = bytes([seed]) * 70_000
    blocks = [(hashlib.sha256(data[at : at + 65536]).digest(), at, len(data[at : at + 65536])) for at in (0, 65536)]
    index = Index.of(blocks, block_bytes=65536, blob_size=len(data), encoding="raw")
    blob = part(root, data)
    layer = Layer(
        meta=part(root, b"meta %d" % seed), blob=blob, index=part(root, index.render()),
        wire=Wire(digest=blob.digest, size=blob.size, encoding="raw"), entries=seed,
    )  # fmt: skip
    (root / layer.id).write_bytes(layer.render())
    return layer


@pytest.fixture
def local(tmp_path) -> Local:
    root = tmp_path / "local"
    root.mkdir()
    layers = tuple(make_layer(root, seed) for seed in (1, 2, 3))
    manifest = ImageManifest(
        layers=tuple(layer.id for layer in layers), merged=part(root, b"merged"), config=ImageConfig(env=("A=b",))
    )
    return Local(root, manifest, layers)


@pytest.fixture
def here(tmp_path) -> Path:
    path = tmp_path / "objects"
    path.mkdir()
    return path


def test_what_is_pushed_can_be_pulled(local: Local, tmp_path, here: Path) -> None:
    store = DirectoryStore(root=tmp_path / "store")
    steps: list[tuple[int, int]] = []
    pushed = local.push(store, names=("a/b:1", "a/b:latest"), progress=lambda *step: steps.append(step))
    objects = image_objects(local.manifest, local.layers)
    assert (pushed.image, pushed.sent, pushed.present) == (local.manifest.digest, len(objects), 0)
    assert steps[-1] == (pushed.sent_bytes, pushed.sent_bytes)
    for ref in ("a/b:1", local.manifest.digest, "sha256:" + local.manifest.digest):
        pulled = pull_image(store, ref, here, deadline=soon(), backoff=QUICK)
        assert (pulled.image, pulled.manifest, pulled.layers) == (local.manifest.digest, local.manifest, local.layers)
    got = {path.name for path in here.iterdir()}
    assert got == {item.digest for item in objects if item.kind != "wire"}, "everything but the blobs"
    for name in got:
        assert hashlib.sha256((here / name).read_bytes()).hexdigest() == name


def test_what_names_something_comes_after_it(local: Local) -> None:
    store = MemoryStore()
    local.push(store, names=("n:1",))
    kinds = {item.digest: item.kind for item in image_objects(local.manifest, local.layers)}
    order = [kinds.get(line.removeprefix("put "), line) for line in store.log]
    assert order[-2:] == ["image", "ref n:1"]
    assert order[-5:-2] == ["layer"] * 3
    assert set(order[:-5]) == {"wire", "index", "meta", "merged"}


def test_a_broken_push_names_nothing_and_goes_on_where_it_ended(local: Local) -> None:
    store, asked = MemoryStore(), []

    def broken(digest: str) -> Path:
        asked.append(digest)
        if len(asked) > 4:
            raise ImageError("not_found", "the disk is gone")
        return local.find(digest)

    with pytest.raises(ImageError, match="disk is gone"):
        push_image(
            store, local.manifest, local.layers, broken, deadline=soon(), names=("n:1",), parallel=1, backoff=QUICK
        )
    assert (store.images, store.names, len(store.objects)) == ({}, {}, 4)
    pushed = local.push(store, names=("n:1",))
    assert pushed.present == 4
    assert store.names == {"n:1": local.manifest.digest}
    again = local.push(store)
    assert (again.sent, again.sent_bytes) == (0, 0)


def test_a_shared_layer_is_sent_once(local: Local) -> None:
    store = MemoryStore()
    local.push(store)
    own = make_layer(local.root, 9)
    other = replace(
        local.manifest, layers=(local.layers[0].id, local.layers[1].id, own.id), merged=part(local.root, b"m2")
    )
    pushed = push_image(
        store, other, (*local.layers[:2], own), local.find, deadline=soon(), names=("o:1",), backoff=QUICK
    )
    assert pushed.sent == 5, "blob, index, meta, manifest of one layer, and the merged image"


def test_an_object_the_store_has_need_not_be_here(local: Local) -> None:
    store = MemoryStore()
    local.push(store)
    for layer in local.layers:
        local.find(layer.wire.digest).unlink()
    assert local.push(store, names=("again:1",)).sent == 0


def test_two_pushers_of_one_image(local: Local, tmp_path) -> None:
    errors: list[BaseException] = []

    def push(name: str) -> None:
        try:
            local.push(DirectoryStore(root=tmp_path / "store"), names=(name,))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=push, args=(f"n:{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    store = DirectoryStore(root=tmp_path / "store")
    assert store.refs(deadline=soon()) == ("n:0", "n:1", "n:2", "n:3")
    for item in image_objects(local.manifest, local.layers):
        assert store.read(item.digest, 0, item.size, deadline=soon()) == local.find(item.digest).read_bytes()
    assert list((tmp_path / "store/tmp").iterdir()) == []


def test_a_file_of_another_digest_is_not_pushed(local: Local, tmp_path) -> None:
    victim = local.layers[1].wire.digest
    local.find(victim).write_bytes(b"other")
    for store in (MemoryStore(), DirectoryStore(root=tmp_path / "store")):
        with pytest.raises(StoreError) as caught:
            local.push(store, names=("n:1",))
        assert caught.value.code == "corrupt"
        assert victim in str(caught.value)
        assert store.refs(deadline=soon()) == ()
        assert not store.has(victim, deadline=soon())
    assert list((tmp_path / "store/tmp").iterdir()) == []


def test_layers_that_are_not_the_images(local: Local) -> None:
    with pytest.raises(StoreError, match="not the layers"):
        push_image(MemoryStore(), local.manifest, local.layers[:2], local.find, deadline=soon())


def test_names_and_manifests_are_asked_for_again(local: Local) -> None:
    inner = MemoryStore()
    local.push(inner, names=("n:1",))
    down = [2]

    class Weak(MemoryStore):
        def _get(self, rows, digest: str) -> bytes:
            if down[0]:
                down[0] -= 1
                raise StoreError("unavailable", "down", retryable=True)
            return super()._get(rows, digest)

    store = PatientStore(store=Weak(images=inner.images, names=inner.names), backoff=QUICK)
    assert store.get_image(local.manifest.digest, deadline=soon()) == local.manifest.render()
    down[0] = 3
    with pytest.raises(StoreError, match="down"):
        store.get_image(local.manifest.digest, deadline=soon())
    with pytest.raises(StoreError) as caught:
        store.get_trace(local.manifest.digest, deadline=soon())
    assert caught.value.code == "not_found"
    assert store.refs(deadline=soon()) == ("n:1",)
    assert store.get_ref("n:1", deadline=soon()) == local.manifest.digest


# --- a store that lies


def pull(store, ref: str, here: Path):
    return pull_image(store, ref, here, deadline=soon(), backoff=QUICK, parallel=1)


def test_a_manifest_of_another_image_is_refused(local: Local, here: Path) -> None:
    store = MemoryStore()
    local.push(store)
    store.images[local.manifest.digest] = replace(local.manifest, config=ImageConfig(env=("EVIL=1",))).render()
    with pytest.raises(StoreError) as caught:
        pull(store, local.manifest.digest, here)
    assert caught.value.code == "corrupt"
    assert list(here.iterdir()) == []


def test_changed_objects_are_refused_and_nothing_stays(local: Local, here: Path) -> None:
    store = MemoryStore()
    local.push(store, names=("n:1",))
    good = dict(store.objects)
    for item in image_objects(local.manifest, local.layers):
        if item.kind == "wire":
            continue
        store.objects = good | {item.digest: good[item.digest][:-1] + b"!"}
        for path in here.iterdir():
            path.unlink()
        with pytest.raises(StoreError) as caught:
            pull(store, "n:1", here)
        assert caught.value.code == "corrupt"
        assert item.digest in str(caught.value)
        assert not (here / item.digest).exists()
        assert not [path for path in here.iterdir() if path.name.startswith(".")]


def test_an_object_that_came_wrong_once_is_fetched_again(local: Local, here: Path) -> None:
    store = MemoryStore()
    local.push(store)
    store.faults.extend([lambda d: d[:-1] + b"!", lambda d: d])
    path = fetch_object(store, local.manifest.merged, here, deadline=soon(), backoff=QUICK)
    assert path.read_bytes() == b"merged"


def test_an_announced_size_is_not_believed(local: Local, here: Path, monkeypatch) -> None:
    store = MemoryStore()
    local.push(store)
    with pytest.raises(StoreError) as caught:
        fetch_object(store, Part(digest="ab" * 32, size=1 << 50), here, deadline=soon())
    assert caught.value.code == "too_large"
    monkeypatch.setattr(transfer, "MAX_DOCUMENT_BYTES", 10)
    with pytest.raises(StoreError) as caught:
        pull(store, local.manifest.digest, here)
    assert caught.value.code == "too_large"
    assert store.reads == []


# --- the directory


def test_an_empty_mount_point_is_no_store_without_the_object(tmp_path) -> None:
    store = DirectoryStore(root=tmp_path)
    with pytest.raises(StoreError) as caught:
        store.read("ab" * 32, 0, 1, deadline=soon())
    assert (caught.value.code, caught.value.retryable) == ("unavailable", True)
    assert "mounted" in str(caught.value)
    store.put_trace("ab" * 32, b"x", deadline=soon())
    with pytest.raises(StoreError) as caught:
        store.read("ab" * 32, 0, 1, deadline=soon())
    assert caught.value.code == "not_found"
    (tmp_path / MARKER).unlink()
    with pytest.raises(StoreError, match="mounted"):
        store.refs(deadline=soon())


def test_what_a_dead_pusher_left_is_swept_by_age(tmp_path) -> None:
    store = DirectoryStore(root=tmp_path)
    store.put_trace("ab" * 32, b"x", deadline=soon())
    old, new = tmp_path / "tmp/old", tmp_path / "tmp/new"
    old.write_bytes(b"x")
    new.write_bytes(b"x")
    os.utime(old, (1, 1))
    assert store.sweep() == 1
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["new"]


def test_an_object_cut_short_by_a_crash_is_pushed_again(tmp_path, local: Local) -> None:
    store = DirectoryStore(root=tmp_path / "store")
    local.push(store)
    wire = local.layers[0].wire
    torn = tmp_path / "store/objects" / wire.digest[:2] / wire.digest
    torn.write_bytes(b"")
    with pytest.raises(StoreError) as caught:
        store.read(wire.digest, 0, 10, deadline=soon())
    assert caught.value.code == "short"
    assert store.put(wire.digest, local.find(wire.digest), deadline=soon())
    assert store.read(wire.digest, 0, 10, deadline=soon()) == bytes([1]) * 10


def test_a_planted_link_is_not_followed(tmp_path) -> None:
    store = DirectoryStore(root=tmp_path / "store")
    store.put_trace("ab" * 32, b"x", deadline=soon())
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    link = tmp_path / "store/objects/cd"
    link.mkdir(parents=True)
    (link / ("cd" * 32)).symlink_to(secret)
    with pytest.raises(StoreError) as caught:
        store.read("cd" * 32, 0, 6, deadline=soon())
    assert caught.value.code == "denied"


def test_after_the_deadline_nothing_is_begun(tmp_path) -> None:
    store = DirectoryStore(root=tmp_path)
    with pytest.raises(StoreError) as caught:
        store.put_trace("ab" * 32, b"x", deadline=time.monotonic() - 1)
    assert caught.value.code == "deadline"
    assert list(tmp_path.iterdir()) == []


# --- a file on its way


@pytest.mark.parametrize("nameless", [True, False])
def test_a_file_appears_whole_or_not_at_all(tmp_path, nameless: bool, monkeypatch) -> None:
    if not nameless:
        original = os.open

        def without_tmpfile(path, flags, *rest, **more):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE here")
            return original(path, flags, *rest, **more)

        monkeypatch.setattr(os, "open", without_tmpfile)
    with Arrival(tmp_path / "good") as arrival:
        arrival.write(b"abc")
        arrival.write_at(b"X", 1)
        assert not (tmp_path / "good").exists()
        assert len(list(tmp_path.iterdir())) == (0 if nameless else 1)
    assert (tmp_path / "good").read_bytes() == b"aXc"
    with pytest.raises(ZeroDivisionError), Arrival(tmp_path / "bad") as arrival:
        arrival.write(b"abc")
        raise ZeroDivisionError
    with Arrival(tmp_path / "good") as arrival:
        arrival.write(b"aXc")  # another was first
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_a_collector_of_leftovers_can_not_take_what_arrives(tmp_path) -> None:
    with Arrival(tmp_path / "good") as arrival:
        arrival.write(b"abc")
        for stray in tmp_path.glob(".*.tmp"):
            stray.unlink()
    assert (tmp_path / "good").read_bytes() == b"abc"
