"""What the compiled filter answers, read by an interpreter of our own: the profiles' promises, call by call."""

import pytest
from dsec_policies.abilities import HostAbilities
from dsec_policies.compile import compile_policy
from dsec_policies.errors import FilterError
from dsec_policies.model import Policy
from dsec_policies.profiles import DEFAULT, PROFILES, SyscallProfile
from dsec_policies.seccomp import AUDIT_ARCH, TABLES, compile_seccomp
from dsec_policies.syscall_rules import GUARDED
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.cbpf import run, verdict

ARCHES = ("x86_64", "aarch64")
PROGRAMS = {(name, arch): compile_seccomp(PROFILES[name].syscalls, arch) for name in PROFILES for arch in ARCHES}
DEFAULT_X86 = PROGRAMS["default", "x86_64"]
DEBUG_X86 = PROGRAMS["debug", "x86_64"]
HIGH = 0xDEAD_BEEF << 32

SWAPEXT = 0xC0C0586D
FORBIDDEN_IOCTLS = {
    "XFS_IOC_SWAPEXT": SWAPEXT,
    "XFS_IOC_EXCHANGE_RANGE": 0x40285881,
    "XFS_IOC_COMMIT_RANGE": 0x40605883,
    "FS_IOC_FSSETXATTR": 0x401C5820,
    "FIFREEZE": 0xC0045877,
    "EXT4_IOC_SHUTDOWN": 0x8004587D,
    "FITRIM": 0xC0185879,
    "FS_IOC_SETFLAGS": 0x40086602,
    "EXT4_IOC_MOVE_EXT": 0xC028660F,
    "EXT4_IOC_SWAP_BOOT": 0x6611,
    "BTRFS_IOC_SUBVOL_CREATE": 0x5000940E,
    "BTRFS_IOC_SNAP_CREATE_V2": 0x50009417,
    "TIOCSTI": 0x5412,
    "TIOCLINUX": 0x541C,
    "TIOCCONS": 0x541D,
    "TIOCSETD": 0x5423,
}
HARMLESS_IOCTLS = {
    "TCGETS": 0x5401,
    "TIOCGWINSZ": 0x5413,
    "TIOCSWINSZ": 0x5414,
    "TIOCSCTTY": 0x540E,
    "FIONREAD": 0x541B,
    "FIONBIO": 0x5421,
    "FIOCLEX": 0x5451,
    "FS_IOC_GETFLAGS": 0x80086601,
    "FS_IOC_FSGETXATTR": 0x801C581F,
    "FS_IOC_FIEMAP": 0xC020660B,
    "FICLONE": 0x40049409,
    "SIOCGIFCONF": 0x8912,
}


@pytest.mark.parametrize(("name", "number"), FORBIDDEN_IOCTLS.items())
@pytest.mark.parametrize("high", [0, HIGH, 1 << 32, 0xFFFFFFFF << 32])
def test_forbidden_ioctls_whatever_the_upper_half(name: str, number: int, high: int) -> None:
    """CVE-2019-10063 and CVE-2019-7303: the kernel ignores the upper half, so must the filter."""
    assert verdict(DEFAULT_X86, "ioctl", 3, high | number) == "EPERM"


@pytest.mark.parametrize(("name", "number"), HARMLESS_IOCTLS.items())
def test_ordinary_ioctls_pass(name: str, number: int) -> None:
    assert verdict(DEFAULT_X86, "ioctl", 1, number) == "allow"
    assert verdict(DEFAULT_X86, "ioctl", 1, HIGH | number) == "allow"


@given(st.integers(0, 0xFF), st.integers(0, 3), st.integers(0, 0x3FFF), st.integers(0, 0xFFFFFFFF))
def test_the_whole_x_family_is_refused(command: int, direction: int, size: int, high: int) -> None:
    number = direction << 30 | size << 16 | ord("X") << 8 | command
    wanted = "allow" if number == 0x801C581F else "EPERM"
    assert verdict(DEFAULT_X86, "ioctl", 0, high << 32 | number) == wanted


SOCKETS = [
    ((1, 1, 0), "allow"),
    ((1, 5, 0), "allow"),
    ((2, 1, 0), "allow"),
    ((2, 1 | 0o2000000, 6), "allow"),
    ((2, 2 | 0o4000, 17), "allow"),
    ((2, 2, 1), "allow"),
    ((10, 1, 6), "allow"),
    ((10, 2, 58), "allow"),
    ((16, 3, 0), "allow"),
    ((2, 3, 1), "EPERM"),
    ((10, 3, 255), "EPERM"),
    ((2, 1, 262), "EPROTONOSUPPORT"),
    ((10, 1, 262), "EPROTONOSUPPORT"),
    ((2, 1, 132), "EPROTONOSUPPORT"),
    ((2, 5, 132), "EPROTONOSUPPORT"),
    ((2, 6, 33), "EPROTONOSUPPORT"),
    ((2, 2, 115), "EPROTONOSUPPORT"),
    ((16, 3, 9), "EINVAL"),
    ((16, 3, 12), "EPROTONOSUPPORT"),
    ((16, 3, 16), "EPROTONOSUPPORT"),
    ((17, 3, 0x300), "EPERM"),
    ((44, 3, 0), "EPERM"),
    ((38, 5, 0), "EAFNOSUPPORT"),
    ((40, 1, 0), "EAFNOSUPPORT"),
    ((30, 1, 0), "EAFNOSUPPORT"),
    ((0, 1, 0), "EAFNOSUPPORT"),
]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("args", "wanted"), SOCKETS)
def test_sockets(args: tuple[int, ...], wanted: str, arch: str) -> None:
    program = PROGRAMS["default", arch]
    assert verdict(program, "socket", *args, arch=arch) == wanted
    assert verdict(program, "socket", *(HIGH | arg for arg in args), arch=arch) == wanted


@pytest.mark.parametrize("option", [26, 50, 51, 52])
def test_no_program_reaches_the_kernel_through_a_socket(option: int) -> None:
    assert verdict(DEFAULT_X86, "setsockopt", 3, 1, option) == "EPERM"
    assert verdict(DEFAULT_X86, "setsockopt", 3, HIGH | 1, HIGH | option) == "EPERM"
    # The same number at another level is another option.
    assert verdict(DEFAULT_X86, "setsockopt", 3, 0, option) == "allow"


def test_ordinary_socket_options_pass() -> None:
    assert verdict(DEFAULT_X86, "setsockopt", 3, 1, 2) == "allow"
    assert verdict(DEFAULT_X86, "setsockopt", 3, 6, 1) == "allow"
    assert verdict(DEFAULT_X86, "setsockopt", 3, 6, 31) == "ENOPROTOOPT"


@pytest.mark.parametrize("bit", [17, 25, 26, 27, 28, 29, 30])
def test_no_new_namespaces(bit: int) -> None:
    assert verdict(DEFAULT_X86, "clone", 1 << bit | 17) == "EPERM"
    assert verdict(DEFAULT_X86, "clone", HIGH | 1 << bit) == "EPERM"
    assert verdict(DEFAULT_X86, "unshare", 1 << bit) == "EPERM"


def test_threads_forks_and_harmless_unshares_pass() -> None:
    assert verdict(DEFAULT_X86, "clone", 0x3D0F00) == "allow"
    assert verdict(DEFAULT_X86, "clone", 0x01200011) == "allow"
    assert verdict(DEFAULT_X86, "clone3", 0, 88) == "allow"
    assert verdict(DEFAULT_X86, "unshare", 0x400) == "allow"
    assert verdict(DEFAULT_X86, "unshare", 0x80) == "EPERM"


def test_own_filters_look_like_a_kernel_without_them() -> None:
    assert verdict(DEFAULT_X86, "seccomp", 1, 0, 0) == "EINVAL"
    assert verdict(DEFAULT_X86, "prctl", 22, 2, 0) == "EINVAL"
    assert verdict(DEFAULT_X86, "prctl", HIGH | 22, 2, 0) == "EINVAL"
    assert verdict(DEFAULT_X86, "prctl", 38, 1) == "allow"


def test_tracing_is_the_difference_between_the_profiles() -> None:
    for name in ("ptrace", "process_vm_readv", "process_vm_writev", "kcmp"):
        assert verdict(DEFAULT_X86, name) == "EPERM"
        assert verdict(DEBUG_X86, name) == "allow"
    assert verdict(DEFAULT_X86, "personality", 0x40000) == "EPERM"
    assert verdict(DEBUG_X86, "personality", 0x40000) == "allow"
    for program in (DEFAULT_X86, DEBUG_X86):
        assert verdict(program, "personality", 0xFFFFFFFF) == "allow"
        assert verdict(program, "personality", HIGH) == "allow"
        assert verdict(program, "personality", 0x400000) == "EPERM"
        assert verdict(program, "pidfd_getfd") == "EPERM"


EPERM_CALLS = """mount umount2 pivot_root move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr setns bpf
perf_event_open userfaultfd add_key request_key keyctl open_by_handle_at init_module finit_module delete_module
kexec_load reboot swapon swapoff syslog acct quotactl settimeofday clock_settime sethostname setdomainname
fanotify_init""".split()
ENOSYS_CALLS = "io_uring_setup io_uring_enter io_uring_register memfd_secret statmount file_setattr".split()
ORDINARY_CALLS = """read write openat close mmap futex execve clone3 wait4 exit_group epoll_pwait getrandom statx
copy_file_range chroot mknodat fchmodat2 landlock_create_ruleset pidfd_open process_madvise rseq sendmsg""".split()


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("profile", PROFILES)
def test_calls_by_name(profile: str, arch: str) -> None:
    program = PROGRAMS[profile, arch]
    wrong = {
        name: got
        for wanted, names in (("EPERM", EPERM_CALLS), ("ENOSYS", ENOSYS_CALLS), ("allow", ORDINARY_CALLS))
        for name in names
        if (got := verdict(program, name, arch=arch)) != wanted
    }
    assert not wrong


@pytest.mark.parametrize("number", [335, 400, 470, 511, 512, 547, 5000, 0x3FFFFFFF, 0x40000000, 0x40000001, 2**32 - 1])
def test_unknown_and_x32_numbers_do_not_exist(number: int) -> None:
    """ENOSYS, not EPERM: a newer C library then takes its older way."""
    assert str(run(DEFAULT_X86, number, arch=AUDIT_ARCH["x86_64"])) == "ENOSYS"


@pytest.mark.parametrize("arch", [0x40000003, 0, 0xC00000B7, 0xC000003F])
def test_another_architecture_s_table_kills(arch: int) -> None:
    for number in (0, 1, 20, 39, 102):
        assert str(run(DEFAULT_X86, number, arch=arch)) == "kill"


@pytest.mark.parametrize("key", PROGRAMS)
def test_every_number_gets_the_profile_s_verdict(key: tuple[str, str]) -> None:
    """The binary search finds for each number what the tables say, with no number between two answers."""
    profile, arch = key
    syscalls, names = PROFILES[profile].syscalls, {number: name for name, number in TABLES[arch].items()}
    for number in range(600):
        name = names.get(number, "")
        if name in syscalls.guarded:
            continue
        wanted = syscalls.verdicts.get(name, "ENOSYS")
        assert str(run(PROGRAMS[key], number, arch=AUDIT_ARCH[arch])) == wanted, name


@pytest.mark.parametrize("key", PROGRAMS)
def test_allowed_calls_cost_nothing(key: tuple[str, str]) -> None:
    """Reading only nr and arch lets the kernel answer from its bitmap; and the tree is shallow without it."""
    profile, arch = key
    for name, wanted in PROFILES[profile].syscalls.verdicts.items():
        if wanted == "allow" and name in TABLES[arch]:
            outcome = run(PROGRAMS[key], TABLES[arch][name], arch=AUDIT_ARCH[arch])
            assert outcome.read == {0, 4}, name
            assert outcome.steps <= 16, name


@pytest.mark.parametrize("key", PROGRAMS)
def test_programs_are_small(key: tuple[str, str]) -> None:
    assert len(PROGRAMS[key]) % 8 == 0
    assert len(PROGRAMS[key]) // 8 < 1024


@given(
    st.sampled_from(sorted(GUARDED)),
    st.tuples(*[st.integers(0, 2**64 - 1)] * 6),
    st.tuples(*[st.integers(0, 2**32 - 1)] * 6),
)
def test_upper_halves_never_matter(name: str, args: tuple[int, ...], highs: tuple[int, ...]) -> None:
    changed = tuple(high << 32 | arg & 0xFFFFFFFF for high, arg in zip(highs, args, strict=True))
    assert verdict(DEFAULT_X86, name, *args) == verdict(DEFAULT_X86, name, *changed)


def test_a_misspelt_call_is_a_bug_that_is_named() -> None:
    with pytest.raises(FilterError, match="opnat"):
        compile_seccomp(SyscallProfile(verdicts={"opnat": "allow"}, guarded={}))


def test_a_call_with_two_answers_is_a_bug_that_is_named() -> None:
    with pytest.raises(FilterError, match="ioctl"):
        compile_seccomp(SyscallProfile(verdicts={"ioctl": "allow"}, guarded=GUARDED))


def test_the_compiled_policy_holds_the_profile_s_program() -> None:
    compiled = compile_policy(Policy(), HostAbilities.assumed())
    assert compiled.seccomp == compile_seccomp(DEFAULT.syscalls, "x86_64")
