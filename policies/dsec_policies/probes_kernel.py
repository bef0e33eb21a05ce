"""Probes of what the kernel lets a process do to itself. Each runs in a child that ends right after it."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_policies import kernel_calls as kernel
from dsec_policies.btf import type_id_of
from dsec_policies.landlock import ABI_WITH_SCOPES, SCOPES, Ruleset
from dsec_policies.seccomp import RET_ALLOW

if TYPE_CHECKING:
    from collections.abc import Callable

LANDLOCK_CREATE_RULESET_VERSION = 1
RESOLVE_IN_ROOT = 0x10
SECCOMP_SET_MODE_FILTER = 1
FAN_CLASS_CONTENT, FAN_MARK_ADD, FAN_OPEN_PERM = 0x4, 0x1, 0x1_0000
BPF_PROG_LOAD = 5
BPF_PROG_TYPE_LSM, BPF_LSM_MAC = 29, 27
#: mov r0, 0 or 1; exit
BPF_RETURN = "<BBhiBBhi"


def seccomp_filter() -> tuple[str, int]:
    """Installs a filter of one instruction (seccomp(2), Linux 3.17)."""
    program = ctypes.create_string_buffer(struct.pack("<HBBI", 0x06, 0, 0, RET_ALLOW), 8)
    header = ctypes.create_string_buffer(struct.pack("<H6xQ", 1, kernel.address_of(program)), 16)
    kernel.call("prctl", kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    kernel.call("seccomp", SECCOMP_SET_MODE_FILTER, 0, header)
    return "a filter was installed", 0


def user_namespaces() -> tuple[str, int]:
    """Makes a user namespace and becomes its root (user_namespaces(7))."""
    uid = os.getuid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    if os.getuid() != 0:
        raise OSError(errno.EPERM, "the id map had no effect")
    return "made one", 0


def pid_namespaces() -> tuple[str, int]:
    """Makes a pid namespace and is pid 1 in it (pid_namespaces(7))."""
    kernel.unshare(kernel.CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        os._exit(0 if os.getpid() == 1 else 1)
    if os.waitpid(child, 0)[1] != 0:
        raise OSError(errno.EINVAL, "the first process was not pid 1")
    return "made one", 0


def net_namespaces() -> tuple[str, int]:
    """Makes a network namespace and sees only lo (network_namespaces(7))."""
    kernel.unshare(kernel.CLONE_NEWNET)
    names = [name for _, name in socket.if_nameindex()]
    if "lo" not in names:
        raise OSError(errno.ENODEV, f"a fresh namespace shows {names}")
    return "made one", 0


def landlock() -> tuple[str, int]:
    """Asks for the ABI (landlock_create_ruleset(2), Linux 5.13)."""
    abi = kernel.call("landlock_create_ruleset", 0, 0, LANDLOCK_CREATE_RULESET_VERSION)
    return f"ABI {abi}", abi


def landlock_scopes() -> tuple[str, int]:
    """Confines itself and finds an abstract socket from before out of reach (landlock(7), ABI 6)."""
    _, abi = landlock()
    if abi < ABI_WITH_SCOPES:
        raise OSError(errno.EOPNOTSUPP, f"ABI {abi}, scopes need {ABI_WITH_SCOPES}")
    name = f"\0dsec-probe-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(name)
        listener.listen(1)
        attr = Ruleset(scoped=sum(SCOPES.values())).pack()
        fd = kernel.call("landlock_create_ruleset", ctypes.create_string_buffer(attr, len(attr)), len(attr), 0)
        kernel.call("prctl", kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        kernel.call("landlock_restrict_self", fd, 0)
        try:
            client.connect(name)
        except PermissionError:
            return "an abstract socket outside was refused", 0
    raise OSError(errno.EINVAL, "a scoped process still reached an abstract socket outside")


def openat2() -> tuple[str, int]:
    """Opens ``..`` of a root and stays in it (openat2(2), Linux 5.6)."""
    how = ctypes.create_string_buffer(struct.pack("<QQQ", os.O_PATH | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT), 24)
    root = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    fd = kernel.call("openat2", root, b"../..", how, 24)
    if not os.path.sameopenfile(root, fd):
        raise OSError(errno.EXDEV, "'..' left the root")
    return "'..' stayed in the root", 0


def fanotify_permission() -> tuple[str, int]:
    """Marks an own file for permission events (fanotify(7), CONFIG_FANOTIFY_ACCESS_PERMISSIONS)."""
    fd = kernel.call("fanotify_init", FAN_CLASS_CONTENT, os.O_RDONLY)
    file = kernel.call("memfd_create", b"dsec-probe", 0)
    kernel.call("fanotify_mark", fd, FAN_MARK_ADD, FAN_OPEN_PERM, kernel.AT_FDCWD, f"/proc/self/fd/{file}".encode())
    return "a file was marked", 0


def apparmor() -> tuple[str, int]:
    """Asks the module whether it is switched on (apparmor(7))."""
    enabled = Path("/sys/module/apparmor/parameters/enabled")
    if not enabled.exists():
        raise OSError(errno.EOPNOTSUPP, "the kernel has no AppArmor")
    if enabled.read_text().strip() != "Y":
        raise OSError(errno.EOPNOTSUPP, "AppArmor is switched off (kernel parameter apparmor=1 security=apparmor)")
    return "enabled", 0


def bpf_lsm() -> tuple[str, int]:
    """Loads a program of two instructions for the file_open hook and does not attach it (bpf(2), Linux 5.7)."""
    btf = Path("/sys/kernel/btf/vmlinux")
    if not btf.exists():
        raise OSError(errno.EOPNOTSUPP, "the kernel shows no BTF")
    hook = type_id_of(btf.read_bytes(), "bpf_lsm_file_open")
    load_program(BPF_PROG_TYPE_LSM, attach_type=BPF_LSM_MAC, result=0, attach_btf_id=hook)
    return "a program was loaded", 0


def load_program(kind: int, *, attach_type: int, result: int, attach_btf_id: int = 0) -> int:
    """Loads ``return result`` as a BPF program of ``kind``; returns its descriptor (bpf(2), BPF_PROG_LOAD)."""
    code = struct.pack(BPF_RETURN, 0xB7, 0, 0, result, 0x95, 0, 0, 0)
    instructions = ctypes.create_string_buffer(code, len(code))
    gpl = ctypes.create_string_buffer(b"GPL")
    attr = struct.pack(
        "<IIQQIIQII16sIIIIQII",
        kind, 2, kernel.address_of(instructions), kernel.address_of(gpl), 0, 0, 0, 0, 0, b"dsec_probe", 0,
        attach_type, 0, 0, 0, 0, attach_btf_id,
    )  # fmt: skip
    return kernel.call("bpf", BPF_PROG_LOAD, ctypes.create_string_buffer(attr, 128), 128)


PROBES: dict[str, Callable[[], tuple[str, int]]] = {
    "seccomp_filter": seccomp_filter,
    "user_namespaces": user_namespaces,
    "pid_namespaces": pid_namespaces,
    "net_namespaces": net_namespaces,
    "landlock": landlock,
    "landlock_scopes": landlock_scopes,
    "openat2": openat2,
    "fanotify_permission": fanotify_permission,
    "apparmor": apparmor,
    "bpf_lsm": bpf_lsm,
}
