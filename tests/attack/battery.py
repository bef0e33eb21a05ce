"""Attacks that are one system call each, as data: what is tried, who must refuse it how, and what happens without.

`layer` is proved by the runs: "seccomp" cases are refused alike when the host's root has the filter and nothing else;
the others are not refused by the filter, so what refuses them inside is the layer that is named.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from dsec_policies.syscalls_x86_64 import NUMBERS

SECCOMP, USERNS, SYSCTL, CAPABILITIES = "seccomp", "user namespace", "user.max_*_namespaces", "capabilities"
NEWUSER, NEWNET, NEWNS = 0x1000_0000, 0x4000_0000, 0x2_0000
HIGH = 0xDEADBEEF << 32
#: Replaced by a writable directory of the place that the attack runs in.
WORK = "{work}"
KILLED = 1000


@dataclass(frozen=True, kw_only=True)
class Attack:
    """`denied`: errno inside (1000 + signal when killed). `bare`: errnos that show that it got further without."""

    name: str
    argv: tuple[str, ...]
    layer: str
    denied: int
    bare: tuple[int, ...] = (0,)


def call(name: str, *args: int | str) -> tuple[str, ...]:
    """A raw system call by name."""
    return ("sys", str(NUMBERS[name]), *map(str, args))


def refused(name: str, argv: tuple[str, ...], *bare: int, by: str = SECCOMP, denied: int = errno.EPERM) -> Attack:
    """An attack that is answered EPERM unless said otherwise."""
    return Attack(name=name, argv=argv, layer=by, denied=denied, bare=bare or (0,))


def ioctl(name: str, number: int, *bare: int) -> Attack:
    """An ioctl on a file of the attacker's own."""
    return refused(name, ("ioctl", f"{WORK}/file", str(number)), *bare)


SYSTEM_CALLS = (
    refused("mount a tmpfs", call("mount", "@none", "@/mnt", "@tmpfs", 0, 0)),
    refused("umount", call("umount2", "@/mnt", 2)),
    refused(
        "mount a cgroup hierarchy for its release_agent", call("mount", "@none", "@/mnt", "@cgroup", 0, "@freezer")
    ),
    refused("fsopen", call("fsopen", "@tmpfs", 0)),
    refused("fspick", call("fspick", -100, "@/", 0)),
    refused("open_tree", call("open_tree", -100, "@/", 1)),
    refused("mount_setattr", call("mount_setattr", -100, "@/", 0, "#32", 32)),
    refused("move_mount", call("move_mount", -1, "@", -1, "@", 0), errno.EBADF, errno.ENOENT),
    refused("setns", call("setns", -1, 0), errno.EBADF),
    refused("unshare a user namespace", call("unshare", NEWUSER)),
    refused("unshare a mount namespace", call("unshare", NEWNS)),
    refused("unshare with the upper half set", call("unshare", HIGH | NEWNS), errno.EINVAL),
    refused("clone a user namespace", ("clone", str(NEWUSER))),
    refused("clone a network namespace", ("clone", str(NEWNET))),
    refused("clone3 a user namespace", ("clone3", str(NEWUSER)), by=SYSCTL, denied=errno.ENOSPC),
    refused("clone3 a user and a network namespace", ("clone3", str(NEWUSER | NEWNET)), by=SYSCTL, denied=errno.ENOSPC),
    refused("clone3 a network namespace", ("clone3", str(NEWNET)), by=CAPABILITIES),
    refused("ptrace", call("ptrace", 0, 0, 0, 0)),
    refused("read another's memory", call("process_vm_readv", 999999, 0, 0, 0, 0, 0), errno.ESRCH, 0),
    refused("kcmp", call("kcmp", 999999, 999999, 0, 0, 0), errno.ESRCH),
    refused("bpf", call("bpf", 99, 0, 0), errno.EINVAL),
    refused("io_uring", call("io_uring_setup", 4, "#120"), denied=errno.ENOSYS),
    refused("userfaultfd", call("userfaultfd", 0)),
    refused("keyctl", call("keyctl", 0, -3, 1)),
    refused("add_key", call("add_key", "@user", "@attack", "@secret", 6, -2)),
    refused("request_key", call("request_key", "@user", "@attack-none", 0, 0), 126),
    refused("pidfd_getfd", call("pidfd_getfd", -1, 0, 0), errno.EBADF),
    refused("open by handle (shocker)", ("shocker", "/"), 0, errno.EOPNOTSUPP, errno.ESTALE),
    refused("delete_module", call("delete_module", "@no-such-module", 0), errno.ENOENT, errno.EPERM, errno.ENOSYS),
    refused("reboot with a bad magic", call("reboot", 0, 0, 0, 0), errno.EINVAL),
    refused("swapon", call("swapon", "@/nowhere", 0), errno.ENOENT),
    refused("syslog", call("syslog", 10, 0, 0)),
    refused("acct", call("acct", "@/nowhere"), errno.ENOENT),
    refused("settimeofday", call("settimeofday", 0, 0)),
    refused("sethostname", call("sethostname", "@evil", 4)),
    refused("fanotify_init", call("fanotify_init", 0, 0)),
    refused("personality READ_IMPLIES_EXEC", call("personality", 0x400000)),
    refused("modify_ldt", call("modify_ldt", 0, "#64", 64)),
    refused("ask for a seccomp filter", call("seccomp", 2, 0, "#4"), denied=errno.EINVAL),
    refused("limits of PID 1, which later execs inherit", call("prlimit64", 1, 7, 0, 0)),
    refused("limits of PID 1 by the upper half", call("prlimit64", HIGH | 1, 7, 0, 0)),
    refused("io_uring by the upper half", call("io_uring_setup", HIGH | 4, "#120"), denied=errno.ENOSYS),
    Attack(name="int 0x80", argv=("int80",), layer=SECCOMP, denied=KILLED + 31),
)

SOCKETS = (
    refused("AF_PACKET", call("socket", 17, 3, 0x300)),
    refused("AF_XDP", call("socket", 44, 3, 0), 0, errno.EAFNOSUPPORT),
    refused("AF_ALG", call("socket", 38, 5, 0), 0, errno.EAFNOSUPPORT, denied=errno.EAFNOSUPPORT),
    refused("raw IPv4", call("socket", 2, 3, 1)),
    refused("raw IPv6", call("socket", 10, 3, 58)),
    refused("MPTCP (landlock-lsm/linux #54)", call("socket", 2, 1, 262), denied=errno.EPROTONOSUPPORT),
    refused("MPTCP with the upper half set", call("socket", 2, 1, HIGH | 262), denied=errno.EPROTONOSUPPORT),
    refused("netlink audit", call("socket", 16, 3, 9), denied=errno.EINVAL),
    refused("netlink netfilter", call("socket", 16, 3, 12), denied=errno.EPROTONOSUPPORT),
    refused("netlink generic", call("socket", 16, 3, 16), denied=errno.EPROTONOSUPPORT),
    refused("attach a filter to a socket", call("setsockopt", -1, 1, 26, 0, 0), errno.EBADF),
    refused("attach a reuseport program", call("setsockopt", -1, HIGH | 1, HIGH | 51, 0, 0), errno.EBADF),
)

IOCTLS = (
    ioctl("TIOCSTI", 0x5412, errno.ENOTTY),
    ioctl("TIOCSTI with the upper half set (CVE-2019-10063)", HIGH | 0x5412, errno.ENOTTY),
    ioctl("TIOCLINUX", 0x541C, errno.ENOTTY),
    ioctl("XFS_IOC_SWAPEXT", 0xC0C0586D, errno.ENOTTY),
    ioctl("XFS_IOC_SWAPEXT with the upper half set", HIGH | 0xC0C0586D, errno.ENOTTY),
    ioctl("XFS_IOC_EXCHANGE_RANGE", 0x40285881, errno.ENOTTY),
    ioctl("FS_IOC_SETFLAGS", 0x40086602, 0, errno.ENOTTY, errno.EOPNOTSUPP),
    ioctl("EXT4_IOC_MOVE_EXT", 0xC028660F, errno.EBADF, errno.ENOTTY, errno.EINVAL),
    ioctl("BTRFS_IOC_SUBVOL_CREATE", 0x5000940E, errno.ENOTTY, errno.EINVAL, errno.ENOTDIR),
)

OTHERS = (
    refused("mknod of a block device", call("mknod", f"@{WORK}/block", 0o060600, 0xFE00), by=USERNS),
    refused("a higher priority", call("setpriority", 0, 0, -20), by=CAPABILITIES, denied=errno.EACCES),
    refused("a lower oom score", ("lower_oom",), 0, errno.EACCES, by=CAPABILITIES, denied=errno.EACCES),
    refused("drop into another's ids", call("setresuid", 70000, 70000, 70000), by=USERNS, denied=errno.EINVAL),
)

ALL = (*SYSTEM_CALLS, *SOCKETS, *IOCTLS, *OTHERS)

#: What must go on working for people to work: (argv, errnos).
ORDINARY = (
    (call("socket", 1, 1, 0), 0),
    (call("socket", 2, 1, 6), 0),
    (call("socket", 2, 2, 17), 0),
    (call("socket", 16, 3, 0), 0),
    (call("unshare", 0x400), 0),
    (call("chroot", "@/"), 0),
    (call("mknod", f"@{WORK}/pipe", 0o010600, 0), 0),
    (call("chown", f"@{WORK}/pipe", 1000, 1000), 0),
    (call("setresuid", 1000, 1000, 1000), 0),
    (call("prlimit64", 0, 7, 0, "#16"), 0),
    (call("memfd_create", "@x", 0), 0),
    (call("inotify_init1", 0), 0),
    (("clone3", "0"), 0),
    (("jit",), 0),
    (("listen", "80"), 0),
    (("listen", "8080"), 0),
)


def command(attacks: tuple[tuple[str, ...], ...], work: str) -> list[str]:
    """One `attack many` for all of them."""
    words: list[str] = ["many"]
    for argv in attacks:
        words += [*(word.replace(WORK, work) for word in argv), "--"]
    return words[:-1]


def outcomes(answers: dict[str, int], count: int) -> list[int]:
    """The errno of each, or 1000 + the signal that killed it."""
    found = []
    for number in range(count):
        killed = answers.get(f"{number}.signal")
        found.append(KILLED + killed if killed else answers[f"{number}.errno"])
    return found
