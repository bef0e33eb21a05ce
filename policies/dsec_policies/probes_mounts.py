"""Probes that need a mount, a cgroup or a network: all of them private to the child, or removed by it."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_policies import kernel_calls as kernel
from dsec_policies.probes_kernel import load_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OPEN_TREE_CLONE = 1
AT_EMPTY_PATH = 0x1000
MOUNT_ATTR_IDMAP = 0x10_0000
BPF_PROG_TYPE_CGROUP_DEVICE, BPF_CGROUP_DEVICE, BPF_PROG_ATTACH, BPF_F_ALLOW_MULTI = 15, 6, 8, 2
BTRFS_IOC_QUOTA_CTL, BTRFS_QUOTA_CTL_ENABLE = 0xC010_9428, 1
NLM_F_REQUEST, NLM_F_ACK, NLM_F_CREATE = 1, 4, 0x400
NETLINK_NETFILTER = 12
NFT_MSG_GETGEN = 10 << 8 | 16
RTM_NEWLINK = 16
IFLA_LINKINFO, IFLA_INFO_KIND = 18, 1
MKFS_TIMEOUT_S = 5.0


@contextmanager
def scratch() -> Iterator[Path]:
    """Yields an empty tmpfs in a mount namespace of the child's own; the directory below it is removed."""
    with tempfile.TemporaryDirectory(prefix="dsec-probe-") as name:
        kernel.private_mounts()
        kernel.mount("tmpfs", name, "tmpfs", 0, "size=8m,mode=755")
        try:
            yield Path(name)
        finally:
            kernel.call("umount2", name.encode(), 2)


def idmapped_mounts() -> tuple[str, int]:
    """Maps a clone of a mount into another user namespace (mount_setattr(2), Linux 5.12; tmpfs since 6.3)."""
    with scratch() as root:
        tree = kernel.call("open_tree", kernel.AT_FDCWD, str(root).encode(), OPEN_TREE_CLONE | os.O_CLOEXEC)
        with _user_namespace() as namespace:
            attr = ctypes.create_string_buffer(struct.pack("<QQQQ", MOUNT_ATTR_IDMAP, 0, 0, namespace), 32)
            kernel.call("mount_setattr", tree, b"", AT_EMPTY_PATH, attr, 32)
        os.close(tree)
    return "a tmpfs was mapped", 0


@contextmanager
def _user_namespace() -> Iterator[int]:
    """Yields a descriptor of a user namespace that maps 0 to 100000."""
    ready, done = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        kernel.unshare(kernel.CLONE_NEWUSER)
        os.write(done, b".")
        signal.pause()
    try:
        os.read(ready, 1)
        Path(f"/proc/{child}/uid_map").write_text("0 100000 65536")
        Path(f"/proc/{child}/gid_map").write_text("0 100000 65536")
        namespace = os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        yield namespace
        os.close(namespace)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def overlay_in_userns() -> tuple[str, int]:
    """Mounts an overlay as root of a fresh user namespace (Documentation/filesystems/overlayfs.rst, Linux 5.11)."""
    with tempfile.TemporaryDirectory(prefix="dsec-probe-") as name:
        child = os.fork()
        if child == 0:
            os._exit(_overlay_child(Path(name)))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        raise OSError(status, f"mount: {os.strerror(status)}")
    return "mounted one", 0


def _overlay_child(root: Path) -> int:
    """Returns 0 or an errno."""
    uid, gid = os.getuid(), os.getgid()
    try:
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        kernel.mount("tmpfs", str(root), "tmpfs", 0, "")
        lower, upper, work, merged = (root / part for part in ("lower", "upper", "work", "merged"))
        for part in (lower, upper, work, merged):
            part.mkdir()
        options = f"userxattr,lowerdir={lower},upperdir={upper},workdir={work}"
        kernel.mount("overlay", str(merged), "overlay", 0, options)
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


# -- cgroups -----------------------------------------------------------------------------------------------------


def _cgroup_mount(kind: str, controller: str = "") -> Path:
    """Returns where a cgroup hierarchy is mounted (mountinfo: fields after the dash are type, source, options)."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        words = after.split()
        if words[0] == kind and (not controller or controller in words[2].split(",")):
            return Path(before.split()[4])
    raise OSError(errno.ENOENT, f"no {kind} hierarchy {controller} is mounted".replace("  ", " "))


@contextmanager
def _child_cgroup(mount: Path) -> Iterator[Path]:
    """Yields a cgroup without processes below ``mount``."""
    path = mount / f"dsec-probe-{os.getpid()}"
    path.mkdir()
    try:
        yield path
    finally:
        path.rmdir()


def cgroup_v1_freezer() -> tuple[str, int]:
    """Freezes an empty cgroup (Documentation/admin-guide/cgroup-v1/freezer-subsystem.rst)."""
    with _child_cgroup(_cgroup_mount("cgroup", "freezer")) as group:
        (group / "freezer.state").write_text("FROZEN")
        (group / "freezer.state").write_text("THAWED")
        return str(group.parent), 0


def cgroup_v2_freezer() -> tuple[str, int]:
    """Freezes an empty cgroup (Documentation/admin-guide/cgroup-v2.rst, Linux 5.2)."""
    with _child_cgroup(_cgroup_mount("cgroup2")) as group:
        (group / "cgroup.freeze").write_text("1")
        return str(group.parent), 0


def cgroup_kill() -> tuple[str, int]:
    """Kills all of an empty cgroup (Documentation/admin-guide/cgroup-v2.rst, Linux 5.14)."""
    with _child_cgroup(_cgroup_mount("cgroup2")) as group:
        (group / "cgroup.kill").write_text("1")
        return str(group.parent), 0


def cgroup_v1_devices() -> tuple[str, int]:
    """Takes every device from an empty cgroup (Documentation/admin-guide/cgroup-v1/devices.rst)."""
    with _child_cgroup(_cgroup_mount("cgroup", "devices")) as group:
        (group / "devices.deny").write_text("a")
        return str(group.parent), 0


def cgroup_bpf() -> tuple[str, int]:
    """Attaches a program that allows every device to an empty cgroup (bpf(2), BPF_PROG_ATTACH, Linux 4.15)."""
    program = load_program(BPF_PROG_TYPE_CGROUP_DEVICE, attach_type=BPF_CGROUP_DEVICE, result=1)
    with _child_cgroup(_cgroup_mount("cgroup2")) as group:
        fd = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
        attr = struct.pack("<IIIII", fd, program, BPF_CGROUP_DEVICE, BPF_F_ALLOW_MULTI, 0)
        kernel.call("bpf", BPF_PROG_ATTACH, ctypes.create_string_buffer(attr, 128), 128)
        os.close(fd)
    return "a program was attached", 0


# -- networks ----------------------------------------------------------------------------------------------------


def nftables() -> tuple[str, int]:
    """Asks nf_tables of a fresh network namespace for its generation (NETLINK_NETFILTER)."""
    kernel.unshare(kernel.CLONE_NEWNET)
    _netlink(NETLINK_NETFILTER, NFT_MSG_GETGEN, 0, struct.pack(">BBH", 0, 0, 0))
    return "nf_tables answers", 0


def veth() -> tuple[str, int]:
    """Makes a veth pair in a fresh network namespace (veth(4))."""
    kernel.unshare(kernel.CLONE_NEWNET)
    kind = struct.pack("<HH", 8, IFLA_INFO_KIND) + b"veth"
    info = struct.pack("<HH", 4 + len(kind), IFLA_LINKINFO) + kind
    _netlink(socket.NETLINK_ROUTE, RTM_NEWLINK, NLM_F_ACK | NLM_F_CREATE, struct.pack("<BxHiII", 0, 0, 0, 0, 0) + info)
    return "made a pair", 0


def _netlink(family: int, message: int, flags: int, payload: bytes) -> None:
    """Sends one request and raises OSError when the answer is an error (netlink(7))."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, family) as link:
        link.settimeout(2.0)
        link.bind((0, 0))
        link.send(struct.pack("<IHHII", 16 + len(payload), message, NLM_F_REQUEST | flags, 1, 0) + payload)
        reply = link.recv(65536)
    kind = struct.unpack_from("<H", reply, 4)[0]
    if kind == 2 and (code := -struct.unpack_from("<i", reply, 16)[0]):
        raise OSError(code, f"netlink: {os.strerror(code)}")


# -- quotas ------------------------------------------------------------------------------------------------------


def tmpfs_quota() -> tuple[str, int]:
    """Mounts a tmpfs with quotas (tmpfs(5), Linux 6.6)."""
    with scratch() as root:
        target = root / "q"
        target.mkdir()
        kernel.mount("tmpfs", str(target), "tmpfs", 0, "usrquota")
        kernel.call("umount2", str(target).encode(), 2)
    return "mounted one", 0


def xfs_quota() -> tuple[str, int]:
    """Mounts a small XFS with project quota."""
    with _loop_mount(("mkfs.xfs", "-q"), "prjquota", size_mib=320):
        return "mounted one", 0


def ext4_quota() -> tuple[str, int]:
    """Mounts a small ext4 with project quota."""
    with _loop_mount(("mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota"), "prjquota", size_mib=16):
        return "mounted one", 0


def btrfs_qgroups() -> tuple[str, int]:
    """Mounts a small btrfs and switches its quotas on (BTRFS_IOC_QUOTA_CTL)."""
    with _loop_mount(("mkfs.btrfs", "-q"), "", size_mib=128) as root:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        request = ctypes.create_string_buffer(struct.pack("<QQ", BTRFS_QUOTA_CTL_ENABLE, 0), 16)
        kernel.call("ioctl", fd, BTRFS_IOC_QUOTA_CTL, request)
        os.close(fd)
    return "quotas were switched on", 0


@contextmanager
def _loop_mount(mkfs: tuple[str, ...], options: str, *, size_mib: int) -> Iterator[Path]:
    """Yields a mounted file system made by ``mkfs`` in a sparse file; mount(8) lets go of the loop device by itself."""
    with tempfile.TemporaryDirectory(prefix="dsec-probe-") as name:
        image, target = Path(name, "image"), Path(name, "mnt")
        target.mkdir()
        image.touch()
        os.truncate(image, size_mib << 20)
        _run(*mkfs, str(image))
        kernel.private_mounts()
        _run("mount", "-o", "loop" + ("," + options if options else ""), str(image), str(target))
        try:
            yield target
        finally:
            _run("umount", str(target))


def _run(*argv: str) -> None:
    """Runs a tool; its last line of complaint becomes the reason."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=MKFS_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise OSError(errno.ENOENT, f"{argv[0]} is not installed") from None
    if done.returncode != 0:
        raise OSError(errno.EIO, (done.stderr.strip().splitlines() or [f"{argv[0]} failed"])[0])


PROBES: dict[str, Callable[[], tuple[str, int]]] = {
    "idmapped_mounts": idmapped_mounts,
    "overlay_in_userns": overlay_in_userns,
    "cgroup_v1_freezer": cgroup_v1_freezer,
    "cgroup_v2_freezer": cgroup_v2_freezer,
    "cgroup_kill": cgroup_kill,
    "cgroup_v1_devices": cgroup_v1_devices,
    "cgroup_bpf": cgroup_bpf,
    "nftables": nftables,
    "veth": veth,
    "tmpfs_quota": tmpfs_quota,
    "xfs_quota": xfs_quota,
    "ext4_quota": ext4_quota,
    "btrfs_qgroups": btrfs_qgroups,
}
