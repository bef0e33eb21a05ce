"""The compiled programs under the real kernel. Few on purpose: each run loads one filter, and one only."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
from dsec_policies.abilities import HostAbilities
from dsec_policies.compile import compile_policy
from dsec_policies.model import Policy
from dsec_policies.syscalls_x86_64 import NUMBERS

from tests.kit.abilities import needs
from tests.kit.cbpf import verdict

pytestmark = needs("filters", "x86_64")
CHILD = Path(__file__).with_name("under_filter.py")
HIGH = 0xDEADBEEF << 32
INT_0X80 = -80

#: (name, args): each is harmless when it is not refused; ids that can't exist keep it so.
CALLS = [
    ("getpid", []),
    ("unshare", [0x400]),
    ("unshare", [0x10000000]),
    ("setns", [-1, 0]),
    ("mount", ["none", "/nowhere", "tmpfs", 0, 0]),
    ("ptrace", [3, 999999, 0, 0]),
    ("process_vm_readv", [999999, 0, 0, 0, 0, 0]),
    ("personality", [0xFFFFFFFF]),
    ("personality", [0x400000]),
    ("keyctl", [0, -3, 0]),
    ("bpf", [99, 0, 0]),
    ("io_uring_setup", [1, 0]),
    ("userfaultfd", [1]),
    ("seccomp", [2, 0, "\x00"]),
    ("prctl", [22, 2, 0, 0, 0]),
    ("prctl", [3, 0, 0, 0, 0]),
    ("socket", [1, 1, 0]),
    ("socket", [2, 1, 6]),
    ("socket", [2, 1, 262]),
    ("socket", [2, 5, 132]),
    ("socket", [16, 3, 9]),
    ("socket", [17, 3, 0]),
    ("socket", [38, 5, 0]),
    ("socket", [40, 1, 0]),
    ("ioctl", [0, 0xC0C0586D, 0]),
    ("ioctl", [0, HIGH | 0xC0C0586D, 0]),
    ("ioctl", [0, HIGH | 0x5412, "x"]),
    ("setsockopt", [-1, 1, 26, 0, 0]),
]


def answers(program: bytes, calls: list[tuple[str, list[object]]]) -> tuple[list[int], int]:
    """The errnos of `calls` under `program`, and the child's exit status."""
    rows = [(name, NUMBERS.get(name, INT_0X80), args) for name, args in calls]
    done = subprocess.run(
        [sys.executable, "-S", str(CHILD), json.dumps(rows)],
        input=program,
        capture_output=True,
        timeout=30,
        check=False,
    )
    return [json.loads(line)["errno"] for line in done.stdout.splitlines()], done.returncode


def program_of(profile: str) -> bytes:
    return compile_policy(Policy(profile=profile), HostAbilities.assumed()).seccomp


@pytest.mark.parametrize("profile", ["default", "debug"])
def test_the_kernel_answers_as_the_interpreter_does(profile: str) -> None:
    program = program_of(profile)
    got, status = answers(program, CALLS)
    assert status == 0
    expected = [verdict(program, name, *(arg if isinstance(arg, int) else 1 for arg in args)) for name, args in CALLS]
    wrong = [
        (call, wanted, errno.errorcode.get(code, code))
        for call, wanted, code in zip(CALLS, expected, got, strict=True)
        if wanted != "allow" and code != getattr(errno, wanted)
    ]
    assert not wrong
    allowed = {(name, args[0] if args else 0) for (name, args), code in zip(CALLS, got, strict=True) if code == 0}
    assert {("getpid", 0), ("unshare", 0x400), ("socket", 1), ("socket", 2), ("prctl", 3)} <= allowed


def test_without_the_filter_the_same_calls_get_further() -> None:
    """The positive twin: these refusals are the filter's, not the machine's."""
    got, status = answers(b"", CALLS)
    assert status == 0
    bare = {f"{name} {args}": code for (name, args), code in zip(CALLS, got, strict=True)}
    # ENOTTY or EBADF: the ioctl reached a driver. ESRCH: the tracer looked for its process.
    assert bare[f"ioctl {[0, HIGH | 0xC0C0586D, 0]}"] in {errno.ENOTTY, errno.EBADF, errno.EINVAL}
    assert bare["ptrace [3, 999999, 0, 0]"] == errno.ESRCH
    assert bare["personality [4194304]"] == 0
    assert bare["prctl [22, 2, 0, 0, 0]"] == errno.EFAULT
    assert bare["setsockopt [-1, 1, 26, 0, 0]"] == errno.EBADF


def test_int_0x80_kills() -> None:
    got, status = answers(program_of("default"), [("getpid", []), ("int 0x80", [])])
    assert got == [0]
    assert status == -31, "SIGSYS: the i386 table is another architecture"
    assert answers(b"", [("int 0x80", [])]) == ([0], 0), "the kernel itself offers that table"
