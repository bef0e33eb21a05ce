"""Runs a seccomp program as the kernel would, on made-up system calls: the independent reader of what we assemble."""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass, field

from dsec_policies.seccomp import AUDIT_ARCH, TABLES

ALLOW, KILL_PROCESS = 0x7FFF0000, 0x80000000


@dataclass
class Run:
    """The verdict of one run, the words of struct seccomp_data that it read, and how many instructions it took."""

    verdict: int
    read: set[int] = field(default_factory=set)
    steps: int = 0

    def __str__(self) -> str:
        if self.verdict == ALLOW:
            return "allow"
        if self.verdict == KILL_PROCESS:
            return "kill"
        assert self.verdict & 0xFFFF0000 == 0x00050000, hex(self.verdict)
        return errno.errorcode[self.verdict & 0xFFFF]


def run(program: bytes, nr: int, args: tuple[int, ...] = (), *, arch: int) -> Run:
    """Interprets `program` on one system call; asserts what the kernel's checker would refuse."""
    words = [int(arg) & 0xFFFF_FFFF_FFFF_FFFF for arg in (*args, *([0] * (6 - len(args))))]
    data = struct.pack("<IIQ6Q", nr & 0xFFFF_FFFF, arch, 0, *words)
    insns = list(struct.iter_unpack("<HBBI", program))
    at, acc, outcome = 0, 0, Run(verdict=0)
    while True:
        code, jt, jf, k = insns[at]
        outcome.steps += 1
        at += 1
        if code == 0x20:
            assert k % 4 == 0, "unaligned load"
            assert k < 64, "load beyond seccomp_data"
            acc = struct.unpack_from("<I", data, k)[0]
            outcome.read.add(k)
        elif code == 0x54:
            acc &= k
        elif code == 0x05:
            at += k
        elif code == 0x06:
            outcome.verdict = k
            return outcome
        else:
            taken = {0x15: acc == k, 0x25: acc > k, 0x35: acc >= k, 0x45: bool(acc & k)}[code]
            at += jt if taken else jf


def verdict(program: bytes, name: str, *args: int, arch: str = "x86_64") -> str:
    """ "allow", "kill" or the errno's name for system call `name`."""
    return str(run(program, TABLES[arch][name], args, arch=AUDIT_ARCH[arch]))
