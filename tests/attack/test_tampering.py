"""The sandbox's own programs against its PID 1, against each other, and against what is outside.

PID 1 (dsec-init) is not dumpable, holds capabilities that no exec has, and keeps a memory map that belongs to the
host's user namespace; the default profile denies ptrace to all by the filter.
"""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.attack.marks import IN_SANDBOX
from tests.kit.attacker import run_bare

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.kit.sandbox import Box, Machine

pytestmark = IN_SANDBOX
#: What root inside gets for every way into PID 1; EACCES by /proc's ptrace check, EPERM by ptrace itself.
DENIED = {errno.EPERM, errno.EACCES}
WAYS = ("mem", "environ", "maps", "exe", "root", "cwd", "ns/mnt", "syscall", "auxv")
FATAL = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV, signal.SIGHUP, signal.SIGQUIT)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def debug(machine: Machine, image: str) -> AsyncIterator[Box]:
    """A sandbox in which ptrace works."""
    async with machine.sandbox(image, {"profile": "debug"}) as running:
        yield running


@pytest.mark.parametrize("profile", ["default", "debug"])
@pytest.mark.parametrize("user", ["", "1000"])
async def test_pid_1_is_out_of_reach(box: Box, debug: Box, profile: str, user: str) -> None:
    target = box if profile == "default" else debug
    got = await target.attack("tamper", 1, user=user)
    # A directory of descriptors may be opened; reading it is what is denied to others.
    opened = {way: got[f"open_{way}"] for way in WAYS if got[f"open_{way}"] not in DENIED}
    assert not opened
    assert got["attach"] == got["seize"] == errno.EPERM
    assert got["pidfd_getfd"] == errno.EPERM
    assert got["oom_score_adj"] in DENIED


@pytest.mark.parametrize("user", ["", "1000"])
async def test_pid_1_can_not_be_signalled_to_death(box: Box, user: str) -> None:
    """Layer: the pid namespace (signals from inside reach PID 1 only if it wants them), and ids."""
    await box.attack("kill", 1, *(int(number) for number in FATAL), user=user)
    assert (await box.attack("ids"))["uid"] == 0


async def test_twin_an_ordinary_program_is_within_reach(debug: Box) -> None:
    """The same calls on one's own child under `debug`: what protects PID 1 is PID 1's doing."""
    script = "attack sleep 20 & target=$!; sleep 0.2; attack tamper $target; kill -9 $target"
    lines = dict(line.rsplit(" ", 1) for line in (await debug.shell(script)).splitlines() if " " in line)
    assert lines["open_mem"] == lines["open_environ"] == lines["open_exe"] == "0"
    assert lines["attach"] == "0"


async def test_the_default_profile_denies_tracing_by_the_filter(box: Box) -> None:
    script = "attack sleep 20 & target=$!; sleep 0.2; attack tamper $target; kill -9 $target"
    lines = dict(line.rsplit(" ", 1) for line in (await box.shell(script)).splitlines() if " " in line)
    assert lines["attach"] == lines["seize"] == lines["process_vm_readv"] == str(errno.EPERM)


async def test_dsec_init_can_not_be_overwritten(box: Box, tmp_path: Path) -> None:
    """CVE-2019-5736. Layer: PID 1 is not dumpable, and its file is a sealed memfd that nothing inside can open."""
    hashed = hashlib.sha256(Path(f"/proc/{box.pid}/exe").read_bytes()).hexdigest()
    got = await box.attack("overwrite", 1000, "/proc/1/exe", "/proc/self/exe")
    assert got["/proc/1/exe"] in DENIED
    assert got["/proc/self/exe"] == errno.ETXTBSY
    assert got["successes"] == 0
    assert hashlib.sha256(Path(f"/proc/{box.pid}/exe").read_bytes()).hexdigest() == hashed


def test_twin_a_program_file_that_nobody_runs_is_overwritten(attacker: Path, tmp_path: Path) -> None:
    victim = tmp_path / "runtime"
    victim.write_bytes(attacker.read_bytes())
    assert run_bare(attacker, "overwrite", 1, victim)["successes"] == 1


async def test_no_descriptor_leaks_into_an_exec(box: Box) -> None:
    """CVE-2024-21626, first half. Layer: close_range before execve."""
    assert await box.attack("fds") == {"extra": 0, "cwd_is_absolute": 1}


def test_twin_descriptors_do_leak_without_it(attacker: Path) -> None:
    fd = os.open("/", os.O_RDONLY)
    os.set_inheritable(fd, True)
    try:
        done = subprocess.run([str(attacker), "fds"], close_fds=False, capture_output=True, check=True)
    finally:
        os.close(fd)
    assert b"extra 0" not in done.stdout


@pytest.mark.parametrize("number", [3, 4, 5, 7, 8, 9, 10, 64, 251])
async def test_a_magic_link_is_no_working_directory(box: Box, number: int) -> None:
    """CVE-2024-21626, second half: WORKDIR /proc/self/fd/N. Layer: openat2 with RESOLVE_NO_MAGICLINKS."""
    outcome = await box.run("/usr/bin/attack", "fds", cwd=f"/proc/self/fd/{number}")
    assert outcome.exit_code is None
    assert outcome.start_error is not None
    assert outcome.start_error.code.startswith("cwd_")


async def test_processes_outside_do_not_exist_inside(box: Box) -> None:
    """Layer: the pid namespace."""
    shown = (await box.shell("cd /proc; echo [0-9]*")).split()
    assert str(os.getpid()) not in shown or int(max(shown, key=int)) < 1000
    assert len(shown) < 10
    got = await box.attack("kill", os.getpid() + 100_000, 9)
    assert got == {"9": errno.ESRCH}


@pytest.mark.parametrize(("policy", "euid"), [({}, 1000), ({"no_new_privs": False}, 0)])
async def test_set_uid_programs(machine: Machine, image: str, policy: dict[str, object], euid: int) -> None:
    """Layer: no_new_privs. The twin is the policy that does without it, where root inside is still nobody outside."""
    async with machine.sandbox(image, policy) as box:
        outcome = await box.run("/usr/bin/attack-setuid", "ids", user="1000")
        assert outcome.stdout.decode().split() == ["uid", "1000", "euid", str(euid)]


async def test_root_inside_is_nobody_outside(box: Box) -> None:
    """Layer: the user namespace, with a range of its own for each sandbox."""
    rows = Path(f"/proc/{box.pid}/uid_map").read_text().split()
    assert rows[0] == "0"
    assert int(rows[1]) >= 65536
    assert rows[2] == "65536"
