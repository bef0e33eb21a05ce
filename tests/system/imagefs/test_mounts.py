"""Mounted roots: one mount an image and host, users on disk, adoption after a death, loop devices as the second way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from dsec_imagefs import ImageError, ImageStore, MountTable
from dsec_imagefs.mountinfo import read_mounts
from dsec_imagefs.syscalls import MNT_DETACH, umount

from tests.kit.abilities import needs

pytestmark = needs("root", "erofs")


@pytest.fixture
def place(tmp_path):
    """A directory whose mounts are gone after the test, whatever became of it."""
    yield tmp_path
    for one in reversed(read_mounts()):
        if one.target.startswith(f"{tmp_path}/"):
            umount(Path(one.target), MNT_DETACH)


@pytest.fixture
def store(place):
    store = ImageStore(place / "store")
    for name in ("one", "two"):
        (place / name).mkdir()
        (place / name / "file").write_text(name)
        store.import_image(f"dir:{place / name}", name)
    return store


@pytest.fixture(params=["file", "loop"])
def table(request, store, place):
    if request.param == "loop" and not os.path.exists("/dev/loop-control"):
        pytest.skip("ability loop: no /dev/loop-control")
    table = MountTable(store, place / "mounts", force_loop=request.param == "loop")
    yield table
    for digest in (store.resolve(name).digest for name in ("one", "two")):
        for user in table.users(digest):
            table.release(digest, user)
    table.close()


def mounts_below(path) -> list[str]:
    return [m.target for m in read_mounts() if m.target.startswith(str(path))]


def test_users_share_one_mount(table, store, place):
    digest = store.resolve("one").digest
    root = table.acquire(digest, "a")
    assert (root / "file").read_text() == "one"
    assert table.acquire(digest, "b") == root
    assert table.acquire(digest, "b") == root
    assert sum(m.fs_type == "erofs" for m in read_mounts() if m.target == str(root)) == 1
    assert table.users(digest) == {"a", "b"}
    table.release(digest, "a")
    assert table.unmount_unused() == ()
    assert (root / "file").read_text() == "one"
    table.release(digest, "b")
    table.release(digest, "b")
    assert table.unmount_unused() == (store.resolve("one").rootfs,)
    assert not root.exists()


def test_the_root_is_read_only_and_nobody_else_may_look(table, store, place):
    root = table.acquire(store.resolve("one").digest, "a")
    with pytest.raises(OSError, match="Read-only"):
        (root / "new").write_text("x")
    assert (place / "mounts").stat().st_mode & 0o077 == 0
    (mount,) = [m for m in read_mounts() if m.target == str(root)]
    assert not mount.shared


def test_a_new_table_adopts_what_a_dead_one_left(table, store, place):
    root = table.acquire(store.resolve("one").digest, "sb-1")
    again = MountTable(ImageStore(store.root), place / "mounts")
    assert again.mounted() == {store.resolve("one").rootfs: root}
    assert again.acquire(store.resolve("one").digest, "sb-2") == root
    assert again.users(store.resolve("one").digest) == {"sb-1", "sb-2"}
    assert again.retain_only({"sb-2"}) == 1
    assert again.users(store.resolve("one").digest) == {"sb-2"}


def test_a_process_killed_while_it_holds_a_mount_loses_nothing(store, place):
    code = (
        "import os,sys,pathlib; from dsec_imagefs import *; s=ImageStore(pathlib.Path(sys.argv[1]));"
        "t=MountTable(s,pathlib.Path(sys.argv[2])); t.acquire(s.resolve('one').digest,'dead'); os.kill(os.getpid(),9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(store.root), str(place / "mounts")], timeout=30, check=False)
    assert done.returncode == -9
    table = MountTable(store, place / "mounts")
    (root,) = table.mounted().values()
    assert (root / "file").read_text() == "one"
    assert table.users(store.resolve("one").digest) == {"dead"}
    assert table.retain_only(set()) == 1
    table.close()
    assert mounts_below(place) == []


def test_mounted_and_used_images_are_safe_from_rm_and_gc(table, store, place):
    image = store.resolve("one")
    root = table.acquire(image.digest, "a")
    with pytest.raises(ImageError) as caught:
        store.rm("one")
    assert caught.value.code == "in_use"
    table.release(image.digest, "a")
    with pytest.raises(ImageError, match="a mount"):  # still mounted, by the kernel's word
        store.rm("one")
    table.acquire(image.digest, "a")
    store.rm("one", force=True)
    assert (root / "file").read_text() == "one"
    table.release(image.digest, "a")
    assert table.unmount_unused() == (image.rootfs,)
    shutil.copytree(place / "one", place / "one-again")
    store.import_image(f"dir:{place / 'one-again'}", "one")


def test_a_root_that_is_open_stays_until_it_is_not(table, store):
    image = store.resolve("two")
    root = table.acquire(image.digest, "a")
    with (root / "file").open() as held:
        table.release(image.digest, "a")
        assert table.unmount_unused() == ()
        assert held.read() == "two"
    assert table.unmount_unused() == (image.rootfs,)


def test_many_at_once_make_one_mount(table, store, place):
    digest = store.resolve("one").digest
    roots, errors = set(), []

    def work(number: int) -> None:
        try:
            roots.add(table.acquire(digest, f"u{number}"))
        except ImageError as err:
            errors.append(err)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    (root,) = roots
    assert sum(m.target == str(root) for m in read_mounts()) == 1
    assert len(table.users(digest)) == 12


def test_failures_name_the_call_and_leave_no_user(store, place):
    image = store.resolve("one")
    table = MountTable(store, place / "mounts")
    path = store.objects.path(image.rootfs.removeprefix("sha256:"))
    path.write_bytes(bytes(8192))
    with pytest.raises(ImageError, match=str(path)):
        table.acquire(image.digest, "a")
    assert table.users(image.digest) == frozenset()
    path.unlink()
    with pytest.raises(ImageError) as missing:
        table.acquire(image.digest, "a")
    assert missing.value.code == "not_found"
    assert table.users(image.digest) == frozenset()
    table.close()


@pytest.mark.parametrize("user", ["", ".x", "u" * 300])
def test_users_that_cannot_be_noted_are_refused(store, place, user):
    table = MountTable(store, place / "mounts")
    with pytest.raises(ImageError) as caught:
        table.acquire(store.resolve("one").digest, user)
    assert caught.value.field == "user"
    table.close()


def test_a_user_of_any_characters_is_kept(table, store):
    digest = store.resolve("one").digest
    table.acquire(digest, "sb-a/../b@c")
    assert table.users(digest) == {"sb-a/../b@c"}
    table.release(digest, "sb-a/../b@c")
    assert table.users(digest) == frozenset()


def test_one_user_keeps_only_the_images_it_names(table, store):
    one, two = store.resolve("one"), store.resolve("two")
    for image in (one, two):
        table.acquire(image.digest, "node-a")
    table.acquire(two.digest, "node-b")
    assert table.retain("node-a", {one.digest}) == 1
    assert table.users(one.digest) == {"node-a"}
    assert table.users(two.digest) == {"node-b"}
    assert table.retain("node-b", set()) == 1
    assert table.unmount_unused() == (two.rootfs,)
    assert store.gc().blobs == ()
    assert table.retain("node-a", set()) == 1


def test_two_tables_on_one_store_do_not_touch_each_other(table, store, place):
    """Two nodes of one machine may share the store; each has its own mounts and its own users."""
    image = store.resolve("one")
    other = MountTable(store, place / "other-mounts")
    table.acquire(image.digest, "a")
    root = other.acquire(image.digest, "b")
    assert (table.users(image.digest), other.users(image.digest)) == ({"a"}, {"b"})
    assert table.retain_only(set()) == 1
    assert table.unmount_unused() == (image.rootfs,)
    assert (root / "file").read_text() == "one"
    with pytest.raises(ImageError, match="used by b"):
        store.rm("one")
    other.release(image.digest, "b")
    other.close()
