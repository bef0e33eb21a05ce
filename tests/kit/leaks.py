"""A census of what our code could leave behind on this machine. Only things with our prefix are counted."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "dsec-"


def _fds() -> frozenset[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        kind = target.split(":")[0]
        # event loops and pytest's own capture come and go with the session; the count of sockets and pipes is checked
        if kind in ("socket", "pipe") or target.startswith("anon_inode:[pidfd"):
            found.add(f"fd {name} {kind}")
    return frozenset(found)


def _children() -> frozenset[str]:
    found = set()
    try:
        pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    except OSError:
        return frozenset()
    for pid in pids:
        try:
            found.add(f"child {pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
        except OSError:
            continue
    return frozenset(found)


def _mounts() -> frozenset[str]:
    rows = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return frozenset(f"mount {row[4]}" for row in rows if PREFIX in row[4] or "/dsec" in row[4])


def _cgroups() -> frozenset[str]:
    found = set()
    root = Path("/sys/fs/cgroup")
    for top in (root, *(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())):
        for path in top.glob(f"{PREFIX}*"):
            found.add(f"cgroup {path}")
    return frozenset(found)


def _netns() -> frozenset[str]:
    names = Path("/run/netns").glob(f"{PREFIX}*") if Path("/run/netns").is_dir() else ()
    return frozenset(f"netns {path}" for path in names)


def _links() -> frozenset[str]:
    return frozenset(f"link {name}" for name in os.listdir("/sys/class/net") if name.startswith(("dsec", "ds-")))


def _nft() -> frozenset[str]:
    if not shutil.which("nft") or os.geteuid() != 0:
        return frozenset()
    done = subprocess.run(["nft", "list", "tables"], capture_output=True, timeout=20, check=False, text=True)
    return frozenset(f"nft {line}" for line in done.stdout.splitlines() if "dsec" in line)


@dataclass(frozen=True)
class Census:
    """What was there at one moment."""

    things: frozenset[str]

    @classmethod
    def take(cls) -> Census:
        """Count now."""
        return cls(_fds() | _children() | _mounts() | _cgroups() | _netns() | _links() | _nft())

    def wait_same(self, *, timeout_s: float) -> list[str]:
        """What is there now and was not then, after giving dying things timeout_s to go."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = sorted(Census.take().things - self.things)
            if not left or time.monotonic() > deadline:
                return left
            gc.collect()  # only now: in a process that has run a thousand tests it takes half a second
            time.sleep(0.1)


@contextmanager
def clean_after(*, timeout_s: float = 10.0) -> Iterator[None]:
    """For what serves a whole file and makes things when it likes (pools, the image's mount): checked at its end."""
    before = Census.take()
    yield
    left = before.wait_same(timeout_s=timeout_s)
    assert not left, "left behind: " + "; ".join(left)
