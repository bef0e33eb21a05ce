"""Images pulled from a shared store: metadata at once, data when it is read, through the blob server and the kernel."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from dsec_imagefs import ImageError, ImageStore, MountTable
from dsec_imagefs.blobd import BlobClient
from dsec_imagefs.composing import compose
from dsec_imagefs.lazy import LazyBlobs
from dsec_imagefs.mountinfo import read_mounts
from dsec_imagefs.prefetch import Prefetcher
from dsec_imagefs.remote import Remote
from dsec_imagefs.syscalls import MNT_DETACH, umount

from tests.kit import tarbytes as t
from tests.kit.abilities import needs
from tests.kit.ocilayout import Layout

pytestmark = needs("root", "erofs", "fuse")
BIG = bytes(range(256)) * (20 << 12)  # 20 MiB, no two neighbouring blocks of 64 KiB differ, none is zeros
LAYERS = [
    t.directory(b"etc") + t.file(b"etc/a", b"1") + t.file(b"big", BIG) + t.END,
    t.file(b"etc/.wh.a") + t.file(b"etc/c", b"3" * 100_000) + t.END,
]


@pytest.fixture
def place(tmp_path):
    yield tmp_path
    for root in (tmp_path / "node", tmp_path / "builder"):
        if root.exists():
            BlobClient(root).stop()
    for one in reversed(read_mounts()):
        if one.target.startswith(f"{tmp_path}/"):
            umount(Path(one.target), MNT_DETACH)


@pytest.fixture
def url(place):
    """A shared store that has the image `demo`."""
    (place / "shared").mkdir()
    url = f"dir:{place / 'shared'}"
    Layout(place / "l").image(LAYERS)
    builder = ImageStore(place / "builder")
    builder.import_image(f"oci:{place / 'l'}", "demo")
    Remote(store=builder, url=url).push("demo")
    return url


@pytest.fixture
def node(place):
    return ImageStore(place / "node")


@pytest.fixture
def table(node, place):
    table = MountTable(node, place / "mounts")
    yield table
    table.retain_only(set())
    table.close()


def fetched(store: ImageStore) -> int:
    rows = BlobClient(store.root).stats()["blobs"]
    return sum(row["present_bytes"] for row in (rows.values() if isinstance(rows, dict) else rows))


def test_a_pull_brings_metadata_and_reading_brings_data(url, node, table, place):
    image = Remote(store=node, url=url).pull("demo")
    assert image.digest == ImageStore(place / "builder").resolve("demo").digest
    assert image.names == ("demo:latest",)
    assert list((node.root / "blobs").iterdir()) == []
    root = table.acquire(image.digest, "a")
    assert sorted(p.name for p in (root / "etc").iterdir()) == ["c"]
    before = fetched(node)
    assert (root / "etc" / "c").read_bytes() == b"3" * 100_000
    few = fetched(node)
    assert before < few < 3 << 20
    assert (root / "big").read_bytes() == BIG
    whole = fetched(node)
    assert whole > len(BIG)
    assert table.acquire(image.digest, "b") == root  # the second user of the image: nothing is fetched
    assert (root / "big").read_bytes() == BIG
    assert fetched(node) == whole


def test_what_a_pull_knows_already_is_not_fetched_and_a_second_image_shares_it(url, node, place):
    builder = ImageStore(place / "builder")
    Layout(place / "l2").image([LAYERS[0], t.file(b"new", b"n") + t.END])
    builder.import_image(f"oci:{place / 'l2'}", "other")
    pushed = Remote(store=builder, url=url).push("other")
    assert pushed.present >= 4  # the shared layer's data, index, metadata and manifest
    remote = Remote(store=node, url=url)
    one, two = remote.pull("demo"), remote.pull("other")
    assert one.layers[0] == two.layers[0]
    assert remote.pull("demo").digest == one.digest
    assert remote.digest_of("demo") == one.digest
    assert remote.digest_of("nothing") is None
    with pytest.raises(ImageError) as caught:
        remote.pull("nothing")
    assert caught.value.code == "not_found"
    assert len(node.ls()) == 2


def test_a_layer_can_be_put_on_a_pulled_image(url, node, table, place):
    Remote(store=node, url=url).pull("demo")
    (place / "top.tar").write_bytes(t.file(b"etc/.wh.c") + t.file(b"top", b"here") + t.END)
    node.import_image(f"tar:{place / 'top.tar'}", "top")
    root = table.acquire(compose(node, ["demo", "top"], "both").digest, "a")
    assert (root / "top").read_text() == "here"
    assert list((root / "etc").iterdir()) == []
    assert (root / "big").read_bytes() == BIG


def test_the_server_killed_whole_gives_eio_and_the_next_user_a_good_mount(url, node, table):
    image = Remote(store=node, url=url).pull("demo")
    root = table.acquire(image.digest, "a")
    assert (root / "etc" / "c").read_bytes() == b"3" * 100_000
    status = BlobClient(node.root).status()
    pids = [value for key, value in status.items() if "pid" in key and isinstance(value, int)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with (root / "big").open("rb") as big, pytest.raises(OSError, match="Input/output"):
        big.seek(10 << 20)
        big.read()
    again = table.acquire(image.digest, "b")
    assert again == root
    assert (again / "big").read_bytes() == BIG


def test_unmounting_gives_the_data_up_and_collecting_removes_it(url, node, table):
    image = Remote(store=node, url=url).pull("demo")
    root = table.acquire(image.digest, "a")
    assert (root / "etc" / "c").read_bytes() == b"3" * 100_000
    node.rm("demo", force=True)
    assert (root / "big").read_bytes() == BIG  # still served: its mount holds it
    table.release(image.digest, "a")
    assert table.unmount_unused() == (image.rootfs,)
    assert node.gc().blobs != ()
    assert list((node.root / "blobs").iterdir()) == list((node.root / "origins").iterdir()) == []


def test_all_data_can_be_brought_at_once_and_then_needs_neither_server_nor_store(url, node, table, place):
    remote = Remote(store=node, url=url)
    image = remote.pull("demo")
    remote.fetch_whole(image)
    (place / "shared").rename(place / "away")
    node.verify("demo")
    root = table.acquire(image.digest, "a")
    assert (root / "big").read_bytes() == BIG
    assert not BlobClient(node.root).is_running()


def test_without_fuse_it_says_what_to_do(url, node, table, monkeypatch):
    image = Remote(store=node, url=url).pull("demo")
    monkeypatch.setattr("dsec_imagefs.lazy.fuse_problem", lambda: "/dev/fuse: No such file or directory")
    with pytest.raises(ImageError, match="/dev/fuse") as caught:
        table.acquire(image.digest, "a")
    assert "--whole" in caught.value.hint
    assert table.users(image.digest) == frozenset()
    for layer in node.layers(image):
        LazyBlobs(node).fetch_whole(layer)
    assert (table.acquire(image.digest, "a") / "big").read_bytes() == BIG


def test_what_one_machine_reads_first_another_has_before_it_reads(url, node, table, place):
    image = Remote(store=node, url=url).pull("demo")
    first = Prefetcher(node)
    root = table.acquire(image.digest, "a")
    first.record(image, seconds=60)
    with (root / "big").open("rb") as big:
        big.seek(7 << 20)
        assert big.read(4096) == BIG[7 << 20 : (7 << 20) + 4096]
    trace = first.collect(image)
    assert trace.accesses
    first.publish(trace, url)
    second = ImageStore(place / "second")
    try:
        image = Remote(store=second, url=url).pull("demo")
        (done,) = Prefetcher(second).replay([image], timeout_s=30)
        assert (done.traced, done.left, done.failed) == (True, 0, 0)
        assert 0 < fetched(second) < len(BIG) // 2
        other = MountTable(second, place / "second-mounts")
        root = other.acquire(image.digest, "a")
        (place / "shared").rename(place / "away")  # what was fetched ahead needs no store
        with (root / "big").open("rb") as big:
            big.seek(7 << 20)
            assert big.read(4096) == BIG[7 << 20 : (7 << 20) + 4096]
        other.release(image.digest, "a")
        other.close()
    finally:
        BlobClient(second.root).stop()


def test_an_image_whose_data_was_imported_here_has_nothing_to_record(url, place):
    builder = ImageStore(place / "builder")
    with pytest.raises(ImageError) as caught:
        Prefetcher(builder).record(builder.resolve("demo"), seconds=1)
    assert caught.value.code == "unsupported"
    (done,) = Prefetcher(builder).replay([builder.resolve("demo")], timeout_s=1)
    assert (done.traced, done.ranges) == (False, 0)
