"""A ContainerSpec turned into the list of operations that makes it, in order. Pure: data in, data out.

Cgroups come first, so that all memory is charged to the sandbox; then mounts, as the host's root in namespaces that the
sandbox does not own; then the user namespace; what takes rights away comes last, the system call filter last of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from nomad_dsec.backends.container.plan_ops import OPTION_SEPARATOR, Op, pack_ops, pack_plan
from nomad_dsec.backends.container.spec import MIB, SECRETS_DIR, UID_RANGE, TmpfsUpper

if TYPE_CHECKING:
    from dsec_policies.compiled import CompiledPolicy

    from nomad_dsec.backends.container.spec import ContainerSpec

# linux/sched.h
CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
# linux/mount.h
ATTR_RDONLY: Final = 0x1
ATTR_NOSUID: Final = 0x2
ATTR_NODEV: Final = 0x4
ATTR_NOEXEC: Final = 0x8
SEALED: Final = ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC
# init.h
INIT_NO_NEW_PRIVS: Final = 1
INIT_OOM_PROTECT: Final = 4
INIT_LANE: Final = 8
OOM_PROTECT: Final = -998
INIT_NICE: Final = -20  # dsec-init runs before every program of its sandbox

RESOURCES: Final = {
    "CPU": 0, "FSIZE": 1, "DATA": 2, "STACK": 3, "CORE": 4, "RSS": 5, "NPROC": 6, "NOFILE": 7, "MEMLOCK": 8, "AS": 9,
    "LOCKS": 10, "SIGPENDING": 11, "MSGQUEUE": 12, "NICE": 13, "RTPRIO": 14, "RTTIME": 15,
}  # fmt: skip

DEV_LINKS: Final = (
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
    ("/dev/ptmx", "pts/ptmx"),
)
TTY_GROUP: Final = 5
SHM_INODES: Final = 16_384
MOUNTED_READ_ONLY: Final = "/sys"  # its own mount is read-only; a bind over it would add nothing

LISTEN, ROOTFS, NETNS, UNIFIED, LAYER, OOM = "listen", "rootfs", "netns", "unified", "layer", "oom"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The operations of one container, and the descriptors that they name in the order in which they are passed."""

    head: tuple[Op, ...]
    own: tuple[Op, ...]
    fixed: tuple[Op, ...]
    tail: tuple[Op, ...]
    fds: tuple[str, ...]
    packed: bytes

    @property
    def ops(self) -> tuple[Op, ...]:
        """All of them, in order."""
        return self.head + self.own + self.fixed + self.tail

    def to_json(self) -> list[dict[str, Any]]:
        """One entry an operation, as `dsec sandbox create --plan` prints them."""
        return [op.to_json() for op in self.ops]


def procs_fd(controller: str) -> str:
    """The name of the descriptor of a v1 controller's cgroup.procs."""
    return f"procs:{controller}"


def mount_fd(index: int) -> str:
    """The name of the descriptor of the n-th host mount."""
    return f"mount:{index}"


def plan_container(spec: ContainerSpec, *, controllers: tuple[str, ...], unified: bool) -> Plan:
    """Every operation for `spec` on a host with these v1 controllers and, if `unified`, a cgroup2 hierarchy."""
    fds = (LISTEN, OOM, *((UNIFIED,) if unified else ()), NETNS, ROOTFS, *map(procs_fd, controllers))
    if not isinstance(spec.upper, TmpfsUpper):
        fds += (LAYER,)
    fds += tuple(mount_fd(index) for index in range(len(spec.mounts)))
    index = {name: number for number, name in enumerate(fds)}
    head = _head(spec, controllers, unified=unified)
    own = _own(spec)
    fixed, fixed_packed = _lane(spec.policy.devices) if spec.lane else _fixed(spec.shm_bytes, spec.policy.devices)
    tail, tail_packed = _tail(spec.policy, spec.log_bytes, unified, lane=spec.lane)
    packed = pack_plan(
        len(head) + len(own) + len(fixed) + len(tail),
        (pack_ops(head, index), pack_ops(own, index), fixed_packed, tail_packed),
    )
    return Plan(head=head, own=own, fixed=fixed, tail=tail, fds=fds, packed=packed)


def _head(spec: ContainerSpec, controllers: tuple[str, ...], *, unified: bool) -> tuple[Op, ...]:
    ops = [
        Op("userns", (spec.uid_base, UID_RANGE)),
        Op("clone", (CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS, UNIFIED if unified else "")),
        *(Op("cgroup", (procs_fd(name),)) for name in controllers),
        # Only now, so that the namespace's root is the sandbox's cgroup and not the launcher's.
        Op("unshare", (CLONE_NEWCGROUP,)),
        Op("setns", (NETNS, CLONE_NEWNET)),
        Op("hostname", (spec.hostname,)),
    ]
    if isinstance(spec.upper, TmpfsUpper):
        ops.append(Op("tmpfs_upper", (spec.upper.size_bytes, spec.upper.inodes)))
    else:
        ops.append(Op("disk_upper", (LAYER,)))
    ops += [Op("idmap", (ROOTFS,)), Op("overlay", (ROOTFS, ATTR_NODEV))]
    return tuple(ops)


def _options(*options: str) -> str:
    return OPTION_SEPARATOR.join(options)


@lru_cache(maxsize=64)
def _fixed(shm_bytes: int, devices: tuple[Any, ...]) -> tuple[tuple[Op, ...], bytes]:
    """The kernel's file systems: alike for all sandboxes with one profile. "@n" is id n of the sandbox on the host."""
    dev = _options("size=64k", "nr_inodes=128", "mode=755", "uid=@0", "gid=@0")
    pts = _options("newinstance", "ptmxmode=0666", "mode=0620", "uid=@0", f"gid=@{TTY_GROUP}", "max=1024")
    shm = _options(f"size={shm_bytes}", f"nr_inodes={SHM_INODES}", "mode=1777", "uid=@0", "gid=@0")
    ops = (
        Op("mount", ("proc", "/proc", "", SEALED, 0o555, 0)),
        Op("mount", ("sysfs", "/sys", "", SEALED | ATTR_RDONLY, 0o555, 0)),
        Op("mount", ("tmpfs", "/dev", dev, ATTR_NOSUID | ATTR_NOEXEC, 0o755, 0)),
        # The sandbox's root has no CAP_MKNOD over this file system, whatever it holds inside.
        *(Op("mknod", (f"/dev/{device.name}", 0o666, device.major, device.minor)) for device in devices),
        *(Op("symlink", link) for link in DEV_LINKS),
        Op("mount", ("devpts", "/dev/pts", pts, ATTR_NOSUID | ATTR_NOEXEC, 0o755, 0)),
        Op("mount", ("tmpfs", "/dev/shm", shm, SEALED, 0o1777, 0)),
    )
    return ops, pack_ops(ops, {})


@lru_cache(maxsize=8)
def _lane(devices: tuple[Any, ...]) -> tuple[tuple[Op, ...], bytes]:
    """The same for a lane, whose calls copy this mount namespace, so that each mount costs every call.

    Nothing may be mounted on this procfs: the kernel lets a user namespace mount its own only where one is to be seen
    whole (mount_too_revealing). Calls cover it by one that shows processes only; what must exist for all is made here,
    since the root becomes read-only.
    """
    dev = _options("size=64k", "nr_inodes=64", "mode=755", "uid=@0", "gid=@0")
    tmp = _options("size=64k", "nr_inodes=8", "mode=1777", "uid=@0", "gid=@0")
    ops = (
        Op("mount", ("proc", "/proc", "", SEALED, 0o555, 0)),
        Op("mount", ("tmpfs", "/dev", dev, ATTR_NOSUID | ATTR_NOEXEC, 0o755, 0)),
        *(Op("mknod", (f"/dev/{device.name}", 0o666, device.major, device.minor)) for device in devices),
        *(Op("symlink", link) for link in DEV_LINKS[:4]),
        Op("symlink", ("/dev/shm", "/tmp/.shm")),
        Op("remount", ("/dev", ATTR_RDONLY)),
        Op("mount", ("tmpfs", "/tmp", tmp, ATTR_NOSUID | ATTR_NODEV | ATTR_RDONLY, 0o1777, 0)),
        Op("remount", ("/", ATTR_RDONLY)),
    )
    return ops, pack_ops(ops, {})


def _own(spec: ContainerSpec) -> tuple[Op, ...]:
    """What is made inside the image's tree as the host's root.

    It precedes the kernel's file systems: a link of the image to /proc then leads to the image's own empty directory.
    """
    name = spec.hostname
    hosts = f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{name}\n"
    resolv = "".join(f"nameserver {address}\n" for address in spec.nameservers)
    ops = [
        Op("file", (path, text.encode(), 0o644, 1))
        for path, text in (("/etc/hostname", f"{name}\n"), ("/etc/hosts", hosts), ("/etc/resolv.conf", resolv))
    ]
    if spec.secrets:
        size = sum(len(text.encode()) for text in spec.secrets.values()) + len(spec.secrets) * 4096
        options = _options(f"size={size + MIB}", f"nr_inodes={len(spec.secrets) + 8}", "mode=755", "uid=@0", "gid=@0")
        ops.append(Op("mount", ("tmpfs", SECRETS_DIR, options, SEALED, 0o755, 1)))
        ops += [
            Op("file", (f"{SECRETS_DIR}/{key}", text.encode(), 0o400, spec.secrets_uid << 8), secret=True)
            for key, text in sorted(spec.secrets.items())
        ]
        ops.append(Op("remount", (SECRETS_DIR, ATTR_RDONLY)))
    for index, mount in enumerate(spec.mounts):
        attributes = ATTR_NOSUID | ATTR_NODEV | (ATTR_RDONLY if mount.read_only else 0)
        ops.append(Op("bind", (mount_fd(index), mount.target, attributes)))
    for path in spec.policy.protected_paths:
        ops += [Op("pin", (path,)), Op("readonly", (path, 1, ATTR_RDONLY))]
    return tuple(ops)


@lru_cache(maxsize=64)
def _tail(policy: CompiledPolicy, log_bytes: int, unified: bool, *, lane: bool = False) -> tuple[tuple[Op, ...], bytes]:
    """What takes rights away: alike for all sandboxes of one policy and size, so it is packed once for them."""
    ops = [Op("mask", (path,)) for path in policy.masked_paths]
    ops += [Op("readonly", (p, 0, ATTR_RDONLY | SEALED)) for p in policy.read_only_paths if p != MOUNTED_READ_ONLY]
    ops.append(Op("oom_score", (OOM_PROTECT + 1000,)))
    if not lane:  # a lane's process becomes the programs itself
        ops.append(Op("nice", (INIT_NICE + 20,)))
    ops.append(Op("root"))
    ops += [Op("rlimit", (RESOURCES[name], soft, hard)) for name, soft, hard in policy.rlimits]
    ops.append(Op("enter_userns"))
    ops += [Op("sysctl", (name.replace(".", "/"), value)) for name, value in policy.sysctls]
    if not policy.landlock.is_empty:
        rules = policy.landlock
        ops += [Op("landlock", (rules.handled_fs, rules.handled_net, rules.scoped))]
    if policy.no_new_privs:
        ops.append(Op("no_new_privs"))
    if not policy.landlock.is_empty:
        ops.append(Op("landlock_self"))
    # Without no_new_privs the filter needs CAP_SYS_ADMIN in the user namespace, which `caps` takes away.
    last = [Op("caps", (policy.init_capabilities, policy.capabilities)), Op("seccomp", (policy.seccomp,))]
    ops += last if policy.no_new_privs else reversed(last)
    flags = (INIT_NO_NEW_PRIVS if policy.no_new_privs else 0) | INIT_OOM_PROTECT | (INIT_LANE if lane else 0)
    ops.append(Op("serve", (LISTEN, UNIFIED if unified and not lane else "", flags, log_bytes, "" if lane else OOM)))
    # The descriptors that the tail names come first in every plan, so their numbers are the same for all.
    return tuple(ops), pack_ops(ops, {LISTEN: 0, OOM: 1, UNIFIED: 2})
