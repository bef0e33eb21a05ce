"""Which system calls the built-in profiles allow, and the argument rules of the few that are half allowed.

Data only. A call that no list names answers ENOSYS, so that a C library that is newer than this list takes its
fallback path; a call that is known and dangerous answers EPERM, as it would for a user without privileges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: "allow" or the name of an errno.
Verdict = Literal["allow", "EPERM", "ENOSYS", "EINVAL", "EAFNOSUPPORT", "EPROTONOSUPPORT", "EOPNOTSUPP", "ENOPROTOOPT"]

LOW_32 = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One test of an argument: ``(low32(arg) & mask) == value``, or ``!= 0`` when ``any_bit`` is set.

    Only the low 32 bits count, because the kernel takes these arguments as int: a filter that compares 64 bits is
    passed by setting the upper half (CVE-2019-10063, CVE-2019-7303).
    """

    arg: int
    value: int = 0
    mask: int = LOW_32
    any_bit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When every test of ``when`` holds, ``verdict`` is the answer; the first rule that holds wins."""

    when: tuple[Match, ...]
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedCall:
    """A system call whose answer depends on its arguments; ``otherwise`` is the answer when no rule holds."""

    rules: tuple[Rule, ...]
    otherwise: Verdict


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# -- allowed whatever the arguments --------------------------------------------------------------------------------

FILES = _words("""
    access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
    fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fremovexattr
    fsetxattr fstat fstatfs fsync ftruncate getcwd getdents getdents64 getxattr getxattrat inotify_add_watch
    inotify_init inotify_init1 inotify_rm_watch lchown lgetxattr link linkat listxattr listxattrat llistxattr
    lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat name_to_handle_at newfstatat open openat openat2
    pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv removexattr
    removexattrat rename renameat renameat2 rmdir sendfile setxattr setxattrat splice stat statfs statx symlink
    symlinkat sync sync_file_range syncfs tee truncate umask unlink unlinkat utime utimensat utimes futimesat vmsplice
    write writev chroot
""")
WAITING = _words("""
    alarm clock_getres clock_gettime clock_nanosleep epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait
    epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 futex futex_requeue futex_wait futex_waitv futex_wake
    getitimer gettimeofday io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit nanosleep pause poll
    ppoll pselect6 restart_syscall select setitimer time timer_create timer_delete timer_getoverrun timer_gettime
    timer_settime timerfd_create timerfd_gettime timerfd_settime adjtimex clock_adjtime
""")
MEMORY = _words("""
    brk cachestat madvise map_shadow_stack membarrier memfd_create mincore mlock mlock2 mlockall mmap mprotect mremap
    mseal msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect process_madvise process_mrelease
    remap_file_pages rseq
""")
PROCESSES = _words("""
    arch_prctl capget capset clone3 execve execveat exit exit_group fork vfork get_robust_list set_robust_list
    getcpu getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid
    getrlimit getrusage getsid gettid getuid ioprio_get ioprio_set kill landlock_add_rule landlock_create_ruleset
    landlock_restrict_self pidfd_open pidfd_send_signal rt_sigaction rt_sigpending rt_sigprocmask
    rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
    sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield set_tid_address setfsgid setfsuid
    setgid setgroups setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid sigaltstack
    signalfd signalfd4 sysinfo tgkill times tkill uname wait4 waitid
""")
TALKING = _words("""
    accept accept4 bind connect getpeername getsockname getsockopt listen mq_getsetattr mq_notify mq_open
    mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd pipe pipe2 recvfrom recvmmsg recvmsg semctl
    semget semop semtimedop sendmmsg sendmsg sendto shmat shmctl shmdt shmget shutdown
""")
ALLOWED = FILES | WAITING | MEMORY | PROCESSES | TALKING

# -- known and refused ---------------------------------------------------------------------------------------------

TRACING = _words("ptrace process_vm_readv process_vm_writev kcmp")
REFUSED = TRACING | _words("""
    acct add_key bpf clock_settime delete_module fanotify_init fanotify_mark finit_module fsconfig fsmount fsopen fspick
    get_mempolicy init_module ioperm iopl kexec_file_load kexec_load keyctl lookup_dcookie mbind migrate_pages
    modify_ldt mount mount_setattr move_mount move_pages nfsservctl open_by_handle_at open_tree open_tree_attr
    perf_event_open pidfd_getfd pivot_root quotactl quotactl_fd reboot request_key set_mempolicy
    set_mempolicy_home_node setdomainname sethostname setns settimeofday swapoff swapon syslog umount2 userfaultfd
    vhangup
""")
#: Named only so that the table says it out loud: the answer is that of an unknown call.
ABSENT = _words("io_uring_setup io_uring_enter io_uring_register file_setattr file_getattr")
#: A program may not stack filters of its own: libseccomp users take EINVAL as "not built into this kernel".
NOT_BUILT_IN = _words("seccomp")

# -- clone, unshare, personality, prctl ----------------------------------------------------------------------------

#: CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET, include/uapi/linux/sched.h.
CLONE_NEW = 0x7E02_0000
CLONE_NEWTIME = 0x80

CLONE = GuardedCall(
    rules=(Rule(when=(Match(arg=0, mask=CLONE_NEW, any_bit=True),), verdict="EPERM", why="new namespaces"),),
    otherwise="allow",
)
UNSHARE = GuardedCall(
    rules=(
        Rule(when=(Match(arg=0, mask=CLONE_NEW | CLONE_NEWTIME, any_bit=True),), verdict="EPERM", why="new namespaces"),
    ),
    otherwise="allow",
)

PERSONALITIES = (0x0, 0x8, 0x2_0000, 0x2_0008, 0xFFFF_FFFF)
ADDR_NO_RANDOMIZE = 0x4_0000


def personality(values: tuple[int, ...]) -> GuardedCall:
    """Returns the rules that let exactly ``values`` through."""
    rules = tuple(Rule(when=(Match(arg=0, value=value),), verdict="allow", why="harmless") for value in values)
    return GuardedCall(rules=rules, otherwise="EPERM")


PR_SET_SECCOMP = 22
PRCTL = GuardedCall(
    rules=(Rule(when=(Match(arg=0, value=PR_SET_SECCOMP),), verdict="EINVAL", why="own seccomp filters"),),
    otherwise="allow",
)

#: The kernel asks only for the same uids here, not for the target's capabilities as for priority and affinity, and
#: every later exec inherits what dsec-init is given: no descriptors, a second of CPU time.
INIT_PID = 1
PRLIMIT = GuardedCall(
    rules=(Rule(when=(Match(arg=0, value=INIT_PID),), verdict="EPERM", why="limits of dsec-init"),), otherwise="allow"
)

# -- sockets -------------------------------------------------------------------------------------------------------

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, AF_PACKET, AF_XDP = 1, 2, 10, 16, 17, 44
NETLINK_ROUTE, NETLINK_AUDIT = 0, 9
SOCK_TYPE_MASK = 0xF
SOCK_STREAM, SOCK_DGRAM, SOCK_RAW = 1, 2, 3
#: IP, ICMP, TCP, UDP, ICMPv6, UDP-Lite. Missing on purpose: SCTP 132, MPTCP 262, DCCP 33, L2TP 115.
IP_PROTOCOLS = (0, 1, 6, 17, 58, 136)


def _ip_rules(family: int) -> tuple[Rule, ...]:
    inet = Match(arg=0, value=family)
    raw = Match(arg=1, mask=SOCK_TYPE_MASK, value=SOCK_RAW)
    allowed = tuple(
        Rule(
            when=(inet, Match(arg=1, mask=SOCK_TYPE_MASK, value=kind), Match(arg=2, value=protocol)),
            verdict="allow",
            why="ordinary TCP, UDP and ping",
        )
        for kind in (SOCK_STREAM, SOCK_DGRAM)
        for protocol in IP_PROTOCOLS
    )
    return (
        *allowed,
        Rule(when=(inet, raw), verdict="EPERM", why="raw sockets pass every connect hook"),
        Rule(when=(inet,), verdict="EPROTONOSUPPORT", why="MPTCP, SCTP and the like evade TCP rules"),
    )


SOCKET = GuardedCall(
    rules=(
        Rule(when=(Match(arg=0, value=AF_UNIX),), verdict="allow", why="local sockets"),
        *_ip_rules(AF_INET),
        *_ip_rules(AF_INET6),
        Rule(
            when=(Match(arg=0, value=AF_NETLINK), Match(arg=2, value=NETLINK_ROUTE)),
            verdict="allow",
            why="getifaddrs and ip(8) read the interfaces",
        ),
        Rule(
            when=(Match(arg=0, value=AF_NETLINK), Match(arg=2, value=NETLINK_AUDIT)),
            verdict="EINVAL",
            why="libaudit takes it as a kernel without audit",
        ),
        Rule(when=(Match(arg=0, value=AF_NETLINK),), verdict="EPROTONOSUPPORT", why="other netlink families"),
        Rule(when=(Match(arg=0, value=AF_PACKET),), verdict="EPERM", why="frames pass every address hook"),
        Rule(when=(Match(arg=0, value=AF_XDP),), verdict="EPERM", why="frames pass every address hook"),
    ),
    otherwise="EAFNOSUPPORT",
)
SOCKETPAIR = GuardedCall(
    rules=(Rule(when=(Match(arg=0, value=AF_UNIX),), verdict="allow", why="local sockets"),), otherwise="EOPNOTSUPP"
)

SOL_SOCKET, SOL_TCP = 1, 6
SO_ATTACH = {
    "SO_ATTACH_FILTER": 26,
    "SO_ATTACH_BPF": 50,
    "SO_ATTACH_REUSEPORT_CBPF": 51,
    "SO_ATTACH_REUSEPORT_EBPF": 52,
}
TCP_ULP = 31
SETSOCKOPT = GuardedCall(
    rules=(
        *(
            Rule(
                when=(Match(arg=1, value=SOL_SOCKET), Match(arg=2, value=option)),
                verdict="EPERM",
                why=f"{name} makes the kernel compile a program; thousands of them wedge some kernels",
            )
            for name, option in SO_ATTACH.items()
        ),
        Rule(
            when=(Match(arg=1, value=SOL_TCP), Match(arg=2, value=TCP_ULP)),
            verdict="ENOPROTOOPT",
            why="loads protocol modules (kTLS, SMC) on demand",
        ),
    ),
    otherwise="allow",
)

# -- ioctl ---------------------------------------------------------------------------------------------------------

#: _IOC_TYPE: the letter that a driver puts into bits 8..15 of its numbers.
IOCTL_FAMILY = 0xFF00


def family(letter: int) -> Match:
    """Returns the test for every ioctl with ``letter`` as its type."""
    return Match(arg=1, mask=IOCTL_FAMILY, value=letter << 8)


def _ioctl(number: int, verdict: Verdict, why: str) -> Rule:
    return Rule(when=(Match(arg=1, value=number),), verdict=verdict, why=why)


IOCTL = GuardedCall(
    rules=(
        _ioctl(0x801C_581F, "allow", "FS_IOC_FSGETXATTR only reads"),
        Rule(
            when=(family(ord("X")),),
            verdict="EPERM",
            why="XFS_IOC_SWAPEXT 0xc0c0586d swaps contents behind mtime and path; freeze, shutdown, trim, FSSETXATTR",
        ),
        _ioctl(0x8008_6601, "allow", "FS_IOC_GETFLAGS only reads"),
        _ioctl(0xC020_660B, "allow", "FS_IOC_FIEMAP only reads"),
        Rule(when=(family(ord("f")),), verdict="EPERM", why="ext4: flags, MOVE_EXT, SWAP_BOOT, verity, encryption"),
        _ioctl(0x4004_9409, "allow", "FICLONE: cp --reflink, needs a writable target"),
        _ioctl(0x4020_940D, "allow", "FICLONERANGE: as FICLONE"),
        Rule(when=(family(0x94),), verdict="EPERM", why="btrfs: subvolumes escape qgroup limits"),
        _ioctl(0x5412, "EPERM", "TIOCSTI types into another's terminal"),
        _ioctl(0x541C, "EPERM", "TIOCLINUX pastes into another's console"),
        _ioctl(0x541D, "EPERM", "TIOCCONS takes the console's output"),
        _ioctl(0x5423, "EPERM", "TIOCSETD loads line discipline modules"),
    ),
    otherwise="allow",
)

GUARDED: dict[str, GuardedCall] = {
    "clone": CLONE,
    "unshare": UNSHARE,
    "personality": personality(PERSONALITIES),
    "prctl": PRCTL,
    "prlimit64": PRLIMIT,
    "socket": SOCKET,
    "socketpair": SOCKETPAIR,
    "setsockopt": SETSOCKOPT,
    "ioctl": IOCTL,
}
