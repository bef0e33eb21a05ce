"""A real Debian root from this host's own archive, and the cache that makes the second one quick."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dsec_imagefs import ImageError, ImageStore, MountTable
from dsec_imagefs.mountinfo import read_mounts

from tests.kit.abilities import needs

pytestmark = needs("root", "erofs", "debootstrap", "debian-packages")

SOURCE = "debootstrap:bookworm?include=procps"


@pytest.mark.timeout(400)
def test_a_debian_root_is_made_once_and_then_remembered(tmp_path):
    store = ImageStore(tmp_path / "store")
    stages = []
    image = store.import_image(SOURCE, "debian", progress=lambda stage, *_: stages.append(stage))
    assert {"download", "install", "scan", "layer", "merge", "publish"} <= set(stages)
    assert image.files > 3000
    with store.open_root("debian") as reader:
        assert reader.read(reader.lookup(b"etc/resolv.conf")) == b""
        assert reader.read(reader.lookup(b"etc/hostname")) == b"localhost\n"
        paths = {path for path, _ in reader.walk()}
    assert b"usr/bin/ps" in paths
    assert not [path for path in paths if path.endswith(b".deb") or path.startswith(b"debootstrap")]
    assert not [m for m in read_mounts() if m.target.startswith(str(store.root))]
    assert os.listdir(store.root / "tmp") == []
    table = MountTable(store, tmp_path / "mounts")
    root = table.acquire(image.digest, "test")
    try:
        shown = subprocess.run(
            ["chroot", root, "dpkg-query", "-W", "procps"], capture_output=True, timeout=20, check=True
        )
        assert b"procps" in shown.stdout
    finally:
        table.release(image.digest, "test")
        table.close()
    store.rm("debian")
    del stages[:]
    again = store.import_image(SOURCE, "debian", progress=lambda stage, *_: stages.append(stage))
    assert again.digest == image.digest
    assert set(stages) == {"publish"}
    store.verify("debian")
    store.rm("debian")
    assert store.gc(cache=True).freed_bytes > image.size_bytes // 2


def test_an_unknown_suite_is_an_error_with_the_tools_words(tmp_path):
    store = ImageStore(tmp_path / "store")
    with pytest.raises(ImageError, match="No such script") as caught:
        store.import_image("debootstrap:nosuchsuite")
    assert caught.value.code == "tool_failed"
    assert os.listdir(store.root / "tmp") == []
    assert not [m for m in read_mounts() if m.target.startswith(str(store.root))]


CHILD = """
import os, pathlib, signal, sys
from dsec_imagefs import ImageStore
def report(stage, done, total):
    if stage == "download" and done == 3:
        os.kill(os.getpid(), signal.SIGKILL)
ImageStore(pathlib.Path(sys.argv[1])).import_image("debootstrap:bookworm", progress=report)
"""


def _living(marker: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in line and "debootstrap" in line:
            found.append(line)
    return found


def test_a_killed_build_takes_its_programs_along_and_is_swept(tmp_path):
    root = tmp_path / "store"
    done = subprocess.run([sys.executable, "-c", CHILD, str(root)], capture_output=True, timeout=50, check=False)
    assert done.returncode == -9, done.stderr
    for _ in range(100):
        if not _living(str(root)):
            break
        subprocess.run(["sleep", "0.1"], check=True)
    assert _living(str(root)) == []
    ImageStore(root)
    assert os.listdir(root / "tmp") == []
    assert not [m for m in read_mounts() if m.target.startswith(str(root))]
