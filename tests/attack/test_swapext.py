"""XFS_IOC_SWAPEXT, the paper's case: contents of a protected file exchanged behind path, mtime and every mount flag.

Layer: seccomp, low 32 bits of the request, the whole 'X' family. In a sandbox overlayfs is a second one: it does not
pass the request on. Here the filter stands alone, on a real XFS.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from dsec_policies.abilities import HostAbilities
from dsec_policies.compile import compile_policy
from dsec_policies.model import Policy

from tests.kit.abilities import needs
from tests.kit.attacker import run_bare, run_filtered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [needs("root", "filters", "cc", "xfs", "mkfs.xfs")]
GOOD, EVIL = b"the real shell\n" * 4096, b"the evil shell\n" * 4096
NO_HIGH_BITS, HIGH_BITS = 0, 0xDEAD0000


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    image, target = tmp_path / "image", tmp_path / "mnt"
    target.mkdir()
    image.touch()
    os.truncate(image, 320 << 20)
    # reflink off: with it XFS refuses to swap files that a reverse map describes.
    mkfs = ["mkfs.xfs", "-q", "-m", "reflink=0,rmapbt=0", str(image)]
    subprocess.run(mkfs, check=True, timeout=30)
    subprocess.run(["mount", "-o", "loop", str(image), str(target)], check=True, timeout=30)
    try:
        (target / "bash").write_bytes(GOOD)
        (target / "evil").write_bytes(EVIL)
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True, timeout=30)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("high", [NO_HIGH_BITS, HIGH_BITS])
@pytest.mark.parametrize("profile", ["default", "debug"])
def test_swapext_is_denied_by_the_filter(xfs: Path, attacker: Path, high: int, profile: str) -> None:
    before = digest(xfs / "bash")
    program = compile_policy(Policy(profile=profile), HostAbilities.assumed()).seccomp
    answer = run_filtered(program, attacker, "swapext", xfs / "bash", xfs / "evil", high)
    assert answer == {"errno": errno.EPERM}
    assert digest(xfs / "bash") == before


@pytest.mark.parametrize("high", [NO_HIGH_BITS, HIGH_BITS])
def test_twin_without_the_filter_the_contents_swap(xfs: Path, attacker: Path, high: int) -> None:
    before = (xfs / "bash").stat()
    os.link(xfs / "bash", xfs / "elsewhere")
    answer = run_bare(attacker, "swapext", xfs / "elsewhere", xfs / "evil", high)
    assert answer == {"errno": 0}
    assert (xfs / "bash").read_bytes() == EVIL, "the kernel ignores the upper half of the request"
    assert (xfs / "bash").stat().st_mtime_ns == before.st_mtime_ns, "which is why mtime proves nothing"
