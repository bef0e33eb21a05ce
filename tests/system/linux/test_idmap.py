"""User namespaces without processes, and mounts whose owners are shifted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nomad_dsec.linux.idmap import RANGE_SIZE, UidRange, clone_idmapped, open_userns
from nomad_dsec.linux.syscalls import MNT_DETACH, SyscallError, mount, move_mount, umount2
from tests.kit.abilities import needs

pytestmark = needs("root", "userns")
RANGE = UidRange(base=0x2000_0000)


def test_the_namespace_outlives_its_maker_and_has_the_map() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    fd = open_userns(RANGE.uid_map)
    try:
        shown = subprocess.run(
            ["nsenter", f"--user=/proc/self/fd/{fd}", "cat", "/proc/self/uid_map", "/proc/self/gid_map"],
            pass_fds=(fd,),
            capture_output=True,
            timeout=10,
            check=True,
        )
        assert shown.stdout.split() == [b"0", b"%d" % RANGE.base, b"%d" % RANGE_SIZE] * 2
    finally:
        os.close(fd)
    assert Path(f"/proc/self/task/{os.getpid()}/children").read_text() == children


def test_owners_are_shifted_in_the_clone_alone(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    mount("none", str(source), "tmpfs")
    try:
        (source / "file").write_text("x")
        os.chown(source / "file", 1000, 1000)
        userns = open_userns(RANGE.uid_map)
        try:
            clone = clone_idmapped(str(source), userns, read_only=True)
        finally:
            os.close(userns)
        try:
            move_mount(clone, str(target))
        finally:
            os.close(clone)
        try:
            assert (target / "file").stat().st_uid == RANGE.base + 1000
            assert (source / "file").stat().st_uid == 1000
            with pytest.raises(OSError, match="Read-only"):
                (target / "file").write_text("y")
        finally:
            umount2(str(target), MNT_DETACH)
    finally:
        umount2(str(source), MNT_DETACH)


def test_what_cannot_be_mapped_is_an_error_with_names() -> None:
    userns = open_userns(RANGE.uid_map)
    try:
        with pytest.raises(SyscallError) as refused:
            clone_idmapped("/proc", userns)
    finally:
        os.close(userns)
    assert refused.value.syscall == "mount_setattr"
    assert refused.value.filename == "/proc"


def test_a_range_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(OSError):
        open_userns(UidRange(base=0xFFFF_FFFF).uid_map)
