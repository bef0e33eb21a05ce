"""An import killed at any step leaves a clean store, and other processes can go on at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from dsec_imagefs import ImageError, ImageStore
from dsec_imagefs.objects import files_of
from dsec_imagefs.syscalls import mount_fs, umount

from tests.kit import tarbytes as t
from tests.kit.abilities import needs
from tests.kit.ocilayout import Layout
from tests.unit.imagefs.test_sources import EXPECTED, LAYERS, names_of

# The child dies by SIGKILL at its n-th step: at each call into the kernel that changes the store, and each progress
# report. sys.addaudithook sees open, rename, link, mkdir, unlink as the interpreter makes them.
CHILD = """
import os, pathlib, signal, sys
from dsec_imagefs import ImageError, ImageStore
from dsec_imagefs.objects import files_of
from dsec_imagefs.syscalls import mount_fs, umount
from tests.kit.abilities import needs
store = ImageStore(pathlib.Path(sys.argv[1]))
left = int(sys.argv[3])
def step(*_):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
def hook(event, args):
    if event in ("os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir") or (
        event == "open" and str(args[0]).startswith(sys.argv[1]) and args[2] & (os.O_WRONLY | os.O_RDWR)
    ):
        step()
sys.addaudithook(hook)
store.import_image("oci:" + sys.argv[2], "demo", progress=step)
print("done", left)
"""


# Runs CHILD in forks of its own, each to die one step later, and prints how each ended.
FORKS = """
import os, sys
root, layout, steps, code = sys.argv[1], sys.argv[2], int(sys.argv[3]), compile(sys.argv[4], "child", "exec")
import dsec_imagefs
for number in range(1, steps + 1):
    pid = os.fork()
    if pid == 0:
        sys.argv = ["child", f"{root}/s{number}", layout, str(number)]
        exec(code, {"__name__": "child"})
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def child(store, layout, steps: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", CHILD, str(store), str(layout), str(steps)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.timeout(300)
def test_killed_at_any_step_the_store_is_clean(tmp_path):
    Layout(tmp_path / "l").image(LAYERS)
    whole = child(tmp_path / "whole", tmp_path / "l", 1_000_000)
    assert whole.returncode == 0, whole.stderr
    steps = 1_000_000 - int(whole.stdout.split()[1])
    assert steps > 15
    numbers = range(1, steps + 1)
    # One interpreter that forks: starting one for each step took most of the time.
    argv = [sys.executable, "-c", FORKS, str(tmp_path), str(tmp_path / "l"), str(steps), CHILD]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == [-9] * steps, done.stderr
    for number in numbers:
        root = tmp_path / f"s{number}"
        check_clean(root)
        store = ImageStore(root)
        store.import_image(f"oci:{tmp_path}/l", "demo")  # nothing in the way of the next one
        assert names_of(store, "demo") == EXPECTED


def check_clean(root) -> None:
    """What a name or record points at is whole; after a collection nothing else is left."""
    store = ImageStore(root)
    assert [path.name for path in (root / "tmp").iterdir()] == []
    for image in store.ls():
        store.verify(image.digest)
        assert names_of(store, image.digest) == EXPECTED
    store.gc()
    objects, blobs = set(), set()
    for image in store.ls():
        needed = files_of(store.manifest(image.digest), store.layers(image))
        objects.update(needed.objects)
        blobs.update(needed.blobs)
    assert {path.name for path in (root / "objects").iterdir()} == objects
    assert {path.name for path in (root / "blobs").iterdir()} == blobs
    strays = [path for path in root.rglob("*.tmp") if path.name.startswith(".")]
    assert strays == []


def test_processes_import_the_same_image_at_once(tmp_path):
    Layout(tmp_path / "l").image(LAYERS)
    argv = [sys.executable, "-c", CHILD, str(tmp_path / "store"), str(tmp_path / "l"), "1000000"]
    running = [subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(4)]
    for one in running:
        _, errors = one.communicate(timeout=60)
        assert one.returncode == 0, errors
    store = ImageStore(tmp_path / "store")
    assert names_of(store, "demo") == EXPECTED
    assert len(store.ls()) == 1
    assert os.listdir(tmp_path / "store" / "tmp") == []


@needs("root")
@pytest.mark.parametrize("source", ["dir", "oci"])
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, source):
    (tmp_path / "small").mkdir()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "big").write_bytes(os.urandom(96 << 20))
    mount_fs("tmpfs", tmp_path / "small", "tmpfs", 0, "size=90m")
    try:
        store = ImageStore(tmp_path / "small" / "store")
        if source == "oci":
            Layout(tmp_path / "l").image([t.file(b"big", bytes(96 << 20)) + t.END])
        where = {"dir": f"dir:{tmp_path}/tree", "oci": f"oci:{tmp_path}/l"}[source]
        with pytest.raises(ImageError) as caught:
            store.import_image(where, "demo")
        assert caught.value.code == "no_space"
        assert store.ls() == []
        assert os.listdir(store.root / "tmp") == []
        assert os.listdir(store.root / "blobs") == os.listdir(store.root / "objects") == []
    finally:
        umount(tmp_path / "small")
