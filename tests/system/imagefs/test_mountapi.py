"""Merged images on the kernel: many devices, refusals, paths longer than fsconfig takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dsec_imagefs import ImageStore, MountTable
from dsec_imagefs.composing import compose
from dsec_imagefs.errors import SyscallError
from dsec_imagefs.mountapi import MOUNT_ATTR_RDONLY, mount_erofs
from dsec_imagefs.mountinfo import read_mounts
from dsec_imagefs.syscalls import MNT_DETACH, umount

from tests.kit import tarbytes as t
from tests.kit.abilities import needs

pytestmark = needs("root", "erofs")
LAYERS = 300


@pytest.fixture
def place(tmp_path):
    yield tmp_path
    for one in reversed(read_mounts()):
        if one.target.startswith(f"{tmp_path}/"):
            umount(Path(one.target), MNT_DETACH)


def layer(store, path, tar: bytes, name: str) -> str:
    path.write_bytes(tar + t.END)
    store.import_image(f"tar:{path}", name)
    return name


def test_an_image_of_hundreds_of_layers_is_one_mount(place):
    store = ImageStore(place / "store")
    parts = [
        layer(store, place / "l.tar", t.file(b"d/f%d" % n, b"%d" % n) + t.file(b"top", b"%d" % n), f"l{n}")
        for n in range(LAYERS)
    ]
    image = compose(store, parts, "stack")
    table = MountTable(store, place / "mounts")
    root = table.acquire(image.digest, "a")
    assert sum(m.target == str(root) for m in read_mounts()) == 1
    assert (root / "top").read_text() == str(LAYERS - 1)
    assert {p.name: p.read_text() for p in (root / "d").iterdir()} == {f"f{n}": str(n) for n in range(LAYERS)}
    table.release(image.digest, "a")
    table.close()


def test_a_refusal_names_the_step_and_leaves_no_mount(place):
    image, target = place / "image", place / "mnt"
    image.write_bytes(bytes(8192))
    target.mkdir()
    with pytest.raises(SyscallError, match="fsconfig create") as caught:
        mount_erofs(str(image), target, flags=MOUNT_ATTR_RDONLY)
    assert caught.value.path == str(image)
    assert not os.path.ismount(target)


def test_paths_longer_than_fsconfig_takes_work(place):
    store = ImageStore(place / ("s" * 120) / ("t" * 120))
    (place / "tree").mkdir()
    (place / "tree" / "f").write_text("here")
    image = store.import_image(f"dir:{place / 'tree'}", "one")
    table = MountTable(store, place / "mounts")
    root = table.acquire(image.digest, "a")
    assert (root / "f").read_text() == "here"
    assert MountTable(store, place / "mounts").acquire(image.digest, "b") == root
    for user in ("a", "b"):
        table.release(image.digest, user)
    table.close()
