"""Compiles a SyscallProfile to the one classic BPF program that a sandbox runs under. Pure.

Layout: the architecture first, then a balanced tree over ranges of numbers whose leaves are verdicts, then the
argument checks. Calls that are allowed whatever their arguments touch only ``nr`` and ``arch``, so the kernel's
constant-action bitmap (>= 5.11) answers them without running the program at all.
"""

from __future__ import annotations

import errno
from types import MappingProxyType
from typing import TYPE_CHECKING

from dsec_policies import bpf, syscalls_aarch64, syscalls_x86_64
from dsec_policies.errors import FilterError
from dsec_policies.syscall_rules import LOW_32, GuardedCall, Match, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsec_policies.profiles import SyscallProfile

# include/uapi/linux/seccomp.h
RET_ALLOW = 0x7FFF_0000
RET_ERRNO = 0x0005_0000
RET_KILL_PROCESS = 0x8000_0000

#: AUDIT_ARCH_ of include/uapi/linux/audit.h: ELF machine | 64 bit | little-endian.
AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
TABLES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "x86_64": syscalls_x86_64.NUMBERS,
        "aarch64": syscalls_aarch64.NUMBERS,
    }
)

# struct seccomp_data { int nr; u32 arch; u64 instruction_pointer; u64 args[6]; }
OFFSET_NR, OFFSET_ARCH, OFFSET_ARGS = 0, 4, 16


def compile_seccomp(profile: SyscallProfile, arch: str = "x86_64") -> bytes:
    """Returns ``profile`` as an array of struct sock_filter (8 bytes each) for ``arch``.

    A call made through another architecture's table (int 0x80 on x86_64) kills the process; an x32 number is an
    unknown number. Raises FilterError when the profile names a call that no architecture has, or two verdicts for one.
    """
    actions = _actions_by_number(profile, arch)
    program = bpf.Assembler()
    program.load(OFFSET_ARCH)
    program.branch(bpf.JEQ_K, AUDIT_ARCH[arch], if_false="foreign")
    program.load(OFFSET_NR)
    _emit_tree(program, _ranges(actions, profile.unknown))
    for name, guarded in profile.guarded.items():
        if name in TABLES[arch]:
            program.label(f"guard.{name}")
            _emit_guard(program, guarded)
    program.label("foreign")
    program.give(RET_KILL_PROCESS)
    return program.assemble()


def value_of(verdict: Verdict) -> int:
    """Returns the SECCOMP_RET_ value of a verdict."""
    return RET_ALLOW if verdict == "allow" else RET_ERRNO | getattr(errno, verdict)


def _actions_by_number(profile: SyscallProfile, arch: str) -> dict[int, str]:
    """Maps numbers to a verdict or to ``guard.<name>``; calls that only the other architecture has are left out."""
    table = TABLES[arch]
    named = [*profile.verdicts, *profile.guarded]
    if twice := set(profile.verdicts) & set(profile.guarded):
        raise FilterError(f"both a verdict and rules for {sorted(twice)}")
    if strangers := [name for name in named if all(name not in known for known in TABLES.values())]:
        raise FilterError(f"no architecture has {strangers}")
    actions: dict[int, str] = {table[name]: verdict for name, verdict in profile.verdicts.items() if name in table}
    return actions | {table[name]: f"guard.{name}" for name in profile.guarded if name in table}


def _ranges(actions: Mapping[int, str], unknown: str) -> list[tuple[int, str]]:
    """Returns (first number, action) for each run of equal actions; the last run has no end."""
    runs: list[tuple[int, str]] = []
    for number in range(max(actions) + 2):
        action = actions.get(number, unknown)
        if not runs or runs[-1][1] != action:
            runs.append((number, action))
    return runs


def _emit_tree(program: bpf.Assembler, runs: list[tuple[int, str]]) -> None:
    """Emits a binary search over ``runs``; the accumulator holds the system call's number."""
    if len(runs) == 1:
        action = runs[0][1]
        if action.startswith("guard."):
            program.jump(action)
        else:
            program.give(value_of(action))  # type: ignore[arg-type]
        return
    middle = len(runs) // 2
    upper = program.fresh_label("upper")
    program.branch(bpf.JGE_K, runs[middle][0], if_true=upper)
    _emit_tree(program, runs[:middle])
    program.label(upper)
    _emit_tree(program, runs[middle:])


def _emit_guard(program: bpf.Assembler, guarded: GuardedCall) -> None:
    """Emits the rules of one call in order, then its default; reloads an argument only when it must."""
    loaded: tuple[int, int] | None = None
    for rule in guarded.rules:
        following = program.fresh_label("rule")
        for match in rule.when:
            loaded = _emit_match(program, match, loaded, following)
        program.give(value_of(rule.verdict))
        program.label(following)
        if len(rule.when) > 1:
            # The next rule is reached from several tests, each of which left another value behind.
            loaded = None
    program.give(value_of(guarded.otherwise))


def _emit_match(
    program: bpf.Assembler, match: Match, loaded: tuple[int, int] | None, following: str
) -> tuple[int, int] | None:
    """Emits one test that goes to ``following`` when it fails; returns what the accumulator holds afterwards."""
    keep = LOW_32 if match.any_bit else match.mask
    if loaded != (match.arg, keep):
        # Both targets are little-endian: the low half of a 64-bit argument comes first.
        program.load(OFFSET_ARGS + 8 * match.arg)
        if keep != LOW_32:
            program.mask(keep)
    if match.any_bit:
        program.branch(bpf.JSET_K, match.mask, if_false=following)
    else:
        program.branch(bpf.JEQ_K, match.value, if_false=following)
    return (match.arg, keep)
