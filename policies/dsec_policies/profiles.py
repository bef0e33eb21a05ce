"""The built-in profiles as data: what a sandbox may do before the user's policy adds to it. Nothing acts here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from dsec_policies import syscall_rules as rules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsec_policies.syscall_rules import GuardedCall, Verdict

KIB, MIB = 1024, 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SyscallProfile:
    """The answer to every system call: a verdict by name, rules by name for the guarded, ``unknown`` for the rest."""

    verdicts: Mapping[str, Verdict]
    guarded: Mapping[str, GuardedCall]
    unknown: Verdict = "ENOSYS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A node of /dev, bound from the host after its type was checked: ``major:minor`` of a character device."""

    name: str
    major: int
    minor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything that a profile fixes. Limits in ``rlimits`` are (soft, hard); bytes where the limit counts bytes."""

    name: str
    syscalls: SyscallProfile
    capabilities: frozenset[str]
    init_capabilities: frozenset[str]
    masked_paths: tuple[str, ...]
    read_only_paths: tuple[str, ...]
    rlimits: Mapping[str, tuple[int, int]]
    devices: tuple[Device, ...]
    landlock_scopes: tuple[str, ...]
    sysctls: Mapping[str, str]
    summary: str = field(default="")


def _syscalls(allowed: frozenset[str], refused: frozenset[str], guarded: Mapping[str, GuardedCall]) -> SyscallProfile:
    verdicts: dict[str, Verdict] = dict.fromkeys(sorted(allowed), "allow")
    verdicts |= dict.fromkeys(sorted(refused), "EPERM")
    verdicts |= dict.fromkeys(sorted(rules.ABSENT), "ENOSYS")
    verdicts |= dict.fromkeys(sorted(rules.NOT_BUILT_IN), "EINVAL")
    return SyscallProfile(verdicts=MappingProxyType(verdicts), guarded=MappingProxyType(dict(guarded)))


#: Docker's fourteen without mknod, net_raw, setpcap and audit_write: enough for apt, dpkg, su, chown and tar -p.
CAPABILITIES = frozenset(
    "chown dac_override fsetid fowner setgid setuid setfcap net_bind_service kill sys_chroot".split()
)
#: PID 1 holds more than any exec, so that ptrace's subset rule protects it: setpcap to cut the bounding set of each
#: exec, sys_resource to give an exec limits that differ from its own.
INIT_ONLY = frozenset({"setpcap", "sys_resource"})

#: Files are covered by /dev/null (verified 1:3), directories by an empty read-only tmpfs; absent ones are skipped.
MASKED_PATHS = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/config.gz",
    "/proc/interrupts",
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/keys",
    "/proc/kmsg",
    # Docker's list lacks the kpage files: they show the page table of the whole machine.
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/pagetypeinfo",
    "/proc/pressure",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/slabinfo",
    "/proc/sysrq-trigger",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
    "/sys/fs/bpf",
    "/sys/fs/cgroup",
    "/sys/fs/fuse",
    "/sys/kernel/btf",
    "/sys/kernel/debug",
    "/sys/kernel/security",
    "/sys/kernel/tracing",
)
READ_ONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/sys")

DEVICES = (
    Device(name="null", major=1, minor=3),
    Device(name="zero", major=1, minor=5),
    Device(name="full", major=1, minor=7),
    Device(name="random", major=1, minor=8),
    Device(name="urandom", major=1, minor=9),
    Device(name="tty", major=5, minor=0),
)

#: setrlimit(2) names without RLIMIT_.
RLIMITS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "NOFILE": (4096, 4096),
        "CORE": (0, 0),
        "MEMLOCK": (8 * MIB, 8 * MIB),
        "MSGQUEUE": (800 * KIB, 800 * KIB),
    }
)

#: Written inside the sandbox's own user namespace, before /proc/sys is sealed: clone3 can't be filtered by flags.
SYSCTLS: Mapping[str, str] = MappingProxyType(
    {f"user.max_{kind}_namespaces": "0" for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time")}
)

DEFAULT = Profile(
    name="default",
    syscalls=_syscalls(rules.ALLOWED, rules.REFUSED, rules.GUARDED),
    capabilities=CAPABILITIES,
    init_capabilities=CAPABILITIES | INIT_ONLY,
    masked_paths=MASKED_PATHS,
    read_only_paths=READ_ONLY_PATHS,
    rlimits=RLIMITS,
    devices=DEVICES,
    landlock_scopes=("abstract_unix_socket", "signal"),
    sysctls=SYSCTLS,
    summary="for untrusted code: no tracing, no namespaces, no own filters",
)
DEBUG = replace(
    DEFAULT,
    name="debug",
    syscalls=_syscalls(
        rules.ALLOWED | rules.TRACING,
        rules.REFUSED - rules.TRACING,
        {**rules.GUARDED, "personality": rules.personality((*rules.PERSONALITIES, rules.ADDR_NO_RANDOMIZE))},
    ),
    capabilities=CAPABILITIES | {"sys_ptrace"},
    init_capabilities=CAPABILITIES | INIT_ONLY | {"sys_ptrace"},
    summary="as default, and ptrace, process_vm_* and fixed addresses work: gdb, strace, sanitizers",
)

PROFILES: Mapping[str, Profile] = MappingProxyType({profile.name: profile for profile in (DEFAULT, DEBUG)})
