"""`dsec image` on layers and shared stores, without the rest of the product: from a tree to a mount elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dsec_imagefs.blobd import BlobClient
from dsec_imagefs.mountinfo import read_mounts
from dsec_imagefs.syscalls import MNT_DETACH, umount

from tests.kit.abilities import needs
from tests.kit.devstack import DevStack

pytestmark = needs("root", "erofs", "fuse")


@pytest.fixture
def place(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "base" / "etc").mkdir(parents=True)
    (tmp_path / "base" / "etc" / "a").write_bytes(b"a" * (3 << 20))
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "run").write_text("run")
    yield tmp_path
    BlobClient(tmp_path / "node").stop()
    for one in reversed(read_mounts()):
        if one.target.startswith(f"{tmp_path}/"):
            umount(Path(one.target), MNT_DETACH)


@pytest.fixture
def run(place):
    stack = DevStack(place / "d")

    def call(store: str, *argv: str, code: int = 0):
        done = stack.dsec("image", *argv, "--json", "--store", str(place / store))
        assert done.returncode == code, done.stderr.decode()
        return json.loads(done.stdout) if done.stdout else done.stderr.decode()

    return call


def test_from_two_trees_to_a_mount_on_another_machine(place, run):
    url = f"dir:{place / 'shared'}"
    run("builder", "build", f"dir:{place / 'base'}", "base")
    made = run("builder", "build", f"dir:{place / 'tool'}", "task", "--on", "base")
    assert len(made["layers"]) == 2
    assert run("builder", "compose", "again", "task")["layers"] == made["layers"]
    first = run("builder", "push", "task", "--to", url)
    assert first["digest"] == made["digest"]
    assert run("builder", "push", "task", "--to", url)["sent"] == 0

    assert run("node", "cache", code=2)  # no store yet, and looking makes none
    assert run("node", "pull", "task", "--from", url)["digest"] == made["digest"]
    assert run("node", "cache") == {"running": False, "blobs": []}
    root = Path(run("node", "mount", "task")["path"])
    assert (root / "run").read_text() == "run"
    rows = run("node", "inspect", "task")["layers"]
    assert [row["origin"] for row in rows] == [url, url]
    assert rows[0]["here_bytes"] < rows[0]["size_bytes"]  # of the base nothing was read
    assert "held" in run("node", "cache", "--stop", code=2)
    run("node", "mount", "task", "--release")
    assert not root.exists()
    assert run("node", "cache") == {"running": False, "blobs": []}  # nothing stands on it: its server went too

    run("node", "pull", "task", "--from", url, "--whole")
    run("node", "verify", "task")
    rows = run("node", "inspect", "task")["layers"]
    assert all(row["here_bytes"] == row["size_bytes"] for row in rows)


def test_prefetch_takes_a_list_and_a_deadline(place, run):
    url = f"dir:{place / 'shared'}"
    run("builder", "build", f"dir:{place / 'base'}", "one")
    run("builder", "push", "one", "--to", url)
    (place / "step").write_text("one  # of the coming step\n\n")
    (row,) = run("node", "prefetch", f"@{place / 'step'}", "--from", url, "--deadline", "30")
    assert (row["traced"], row["ranges"]) == (False, 0)  # nobody has recorded it yet
    (row,) = run("node", "prefetch", "one", "--whole", "--deadline", "30")
    assert (row["left"], row["failed"]) == (0, 0)
    (row,) = run("node", "cache")["blobs"]
    assert row["present_bytes"] == row["size"]
    assert "no image" in run("node", "prefetch", "nothing", code=2)
    assert "can't be read" in run("node", "prefetch", f"@{place / 'none'}", code=2)
