"""Stores of the first format (a whole EROFS file an image) become stores of layers when they are opened."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest
from dsec_imagefs import ImageConfig, ImageError, ImageStore
from dsec_imagefs.sources.debootstrap import DebootstrapSource
from dsec_imagefs.tree import BytesContent, Node, new_directory

from tests.kit.trees import write_tree

CONFIG = ImageConfig(env=("A=1",), cmd=("/bin/sh",), labels={"l": "v"})
SPARSE = b"head" + bytes(512 * 1024) + b"tail"


def old_tree() -> Node:
    root = new_directory()
    etc = root.children[b"etc"] = Node(fmt=0o040000, mode=0o700, uid=5, gid=6, mtime_s=-7, mtime_ns=8)
    shared = Node(fmt=0o100000, mode=0o4755, content=BytesContent(b"x" * 9000), xattrs={b"user.a": b"b"})
    etc.children = {b"one": shared, b"two": shared, b"link": Node(fmt=0o120000, mode=0o777, target=b"one")}
    etc.children[b"sparse"] = Node(
        fmt=0o100000, mode=0o644, content=BytesContent(SPARSE, extents=((0, 4), (len(SPARSE) - 4, 4)))
    )
    etc.children[b"null"] = Node(fmt=0o020000, mode=0o666, device=(1, 3))
    return root


@pytest.fixture
def old_store(tmp_path):
    """A store as version 1 left it, with one named image, which is also a kept build."""
    root = tmp_path / "store"
    for part in ("blobs/sha256", "images", "refs", "users", "tmp", "cache/roots"):
        (root / part).mkdir(parents=True)
    (root / "format").write_text("1\n")
    fd = os.open(root / "new", os.O_RDWR | os.O_CREAT)
    try:
        written = write_tree(old_tree(), fd)
    finally:
        os.close(fd)
    record = {
        "version": 1, "digest": "sha256:" + "a" * 64, "rootfs": f"sha256:{written.digest}", "config": asdict(CONFIG),
        "source": "debootstrap:sid", "created": "", "imported": "2026-01-02T03:04:05+00:00", "size_bytes": 1,
        "files": written.inodes, "layers": [], "notes": ["a note"],
    }  # fmt: skip
    (root / "new").rename(root / "blobs" / "sha256" / f"{written.digest}.erofs")
    (root / "images" / f"{'a' * 64}.json").write_text(json.dumps(record))
    for name in ("deb:latest", "deb:12"):
        (root / "refs" / name.replace(":", "%3A")).write_text(json.dumps({"name": name, "digest": record["digest"]}))
    key = DebootstrapSource(suite="sid").cache_key
    (root / "cache" / "roots" / f"{key}.json").write_text(json.dumps(record))
    os.link(root / "blobs" / "sha256" / f"{written.digest}.erofs", root / "cache" / "roots" / f"{key}.erofs")
    return root


def check(store: ImageStore) -> None:
    image = store.verify("deb")
    assert image.names == ("deb:12", "deb:latest")
    assert (image.config, image.notes, image.source) == (CONFIG, ("a note",), "debootstrap:sid")
    assert image.imported == "2026-01-02T03:04:05+00:00"
    with store.open_root("deb") as root:
        facts = dict(root.walk())
        assert set(facts) == {b"", b"etc", b"etc/one", b"etc/two", b"etc/link", b"etc/sparse", b"etc/null"}
        etc, one = facts[b"etc"], facts[b"etc/one"]
        assert (etc.mode, etc.uid, etc.gid, etc.mtime_s, etc.mtime_ns) == (0o040700, 5, 6, -7, 8)
        assert (one.mode, one.nlink, one.nid) == (0o104755, 2, facts[b"etc/two"].nid)
        assert root.xattrs(one) == {b"user.a": b"b"}
        assert root.read(one) == b"x" * 9000
        assert root.read(facts[b"etc/sparse"]) == SPARSE
        assert root.read(facts[b"etc/link"]) == b"one"
        assert facts[b"etc/null"].device == (1, 3)
    assert image.size_bytes < len(SPARSE)  # the hole stays one


def test_images_names_and_kept_builds_survive(old_store):
    store = ImageStore(old_store)
    check(store)
    assert len(store.ls()) == 1
    assert (old_store / "format").read_text() == "2\n"
    assert list(old_store.rglob("*.erofs")) == []
    digest = store.resolve("deb").digest
    for name in ("deb:12", "deb:latest"):
        store.rm(name)
    assert store.ls() == []
    assert store.import_image("debootstrap:sid", "deb").digest == digest  # kept: nothing is built
    store.tag("deb", "deb:12")
    assert ImageStore(old_store).verify("deb").digest == digest


def test_a_conversion_that_died_is_done_again(old_store, monkeypatch):
    from dsec_imagefs import names

    def die(*_args):
        raise OSError("killed here")

    with monkeypatch.context() as broken:
        broken.setattr(names.Names, "write", die)
        with pytest.raises(OSError, match="killed here"):
            ImageStore(old_store)
    assert (old_store / "format").read_text() == "1\n"
    check(ImageStore(old_store))


def test_a_damaged_whole_image_is_an_error_and_stays(old_store):
    (path,) = (old_store / "blobs" / "sha256").glob("*.erofs")
    path.write_bytes(bytes(8192))
    with pytest.raises(ImageError) as caught:
        ImageStore(old_store)
    assert caught.value.code == "corrupt"
    assert path.exists()
    assert list((old_store / "tmp").iterdir()) == []
