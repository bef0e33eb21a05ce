"""The demo, small: agents in real containers, the node daemon killed under them, a report, nothing left."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.kit.abilities import needs
from tests.kit.devstack import DevStack, image_store

pytestmark = pytest.mark.timeout(500)


@needs("root", "erofs", "cgroup", "filters", "debootstrap", "debian-packages")
def test_a_small_demo(tmp_path):
    store = image_store()
    stack = DevStack(tmp_path / "d")
    report = tmp_path / "report"
    flags = [
        "--images",
        str(store),
        "--report",
        str(report),
        "--groups",
        "1",
        "--size",
        "4",
        "--submissions",
        "25",
        "--json",
    ]
    done = stack.dsec("demo", "--data", str(stack.data), *flags, timeout=200)
    assert done.returncode == 0, done.stderr.decode() + stack.logs()
    summary = json.loads(done.stdout)["summary"]
    assert summary["rollouts"] == "4 in 1 groups"
    assert (summary["sandboxes lost"], summary["left over at the end"]) == ("0", "0")
    assert "node daemon killed" in summary
    assert summary["submissions judged"].startswith("25 in ")
    assert summary["verdicts astray"] == "0"
    page = (report / "index.html").read_text()
    assert "SIGKILL" in page
    assert stack.pids() == []
    assert not [path for path in Path("/sys/fs/cgroup").glob("*/dsec-*") if path.name.endswith(_suffix(stack))]


def _suffix(stack: DevStack) -> str:
    import hashlib

    return hashlib.sha256(os.fsencode(stack.data)).hexdigest()[:6]
