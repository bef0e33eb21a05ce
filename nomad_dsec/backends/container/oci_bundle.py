"""A ContainerSpec as an OCI bundle: config.json, and what has to be prepared before the runtime reads it. Pure.

The runtime (crun, runc) makes the namespaces, the kernel's file systems, masks, read-only paths, capabilities and
limits of PID 1. What its configuration can't say is prepared in the root file system (oci_stage.py), or done by
dsec-init as the bundle's process (`dsec-init inside`): pinned paths, Landlock scopes, the capabilities of execs, and
the system call filter, which is byte for byte the native launcher's.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dsec_policies.capabilities import names_of

from nomad_dsec.backends.container.plan import INIT_NO_NEW_PRIVS, INIT_OOM_PROTECT, LISTEN, OOM, OOM_PROTECT, UNIFIED
from nomad_dsec.backends.container.plan_ops import Op, pack_ops, pack_plan
from nomad_dsec.backends.container.spec import SECRETS_DIR, UID_RANGE, DirUpper

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nomad_dsec.backends.container.spec import ContainerSpec

OCI_VERSION: Final = "1.0.2"
# The descriptors of PID 1 as --preserve-fds passes them on; the list of operations names the first three by index.
LISTEN_FD, CGROUP_FD, OOM_FD, PLAN_FD, IMAGE_FD, STATUS_FD = 3, 4, 5, 6, 7, 8
PRESERVED: Final = 6
_TTY_GROUP: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What of the host bends a bundle: rlimit name -> hard limit that may not be raised, and the rest by name.

    may_protect: oom_score_adj may be lowered. cgroups_path: the cgroup as the runtime shall name it; "" when the
    process that starts the runtime has joined the cgroups already.
    """

    hard_limits: Mapping[str, int]
    may_protect: bool
    cgroups_path: str = ""


def render_config(spec: ContainerSpec, facts: HostFacts) -> dict[str, Any]:
    """config.json of the bundle (runtime-spec's config.md and config-linux.md)."""
    policy = spec.policy
    capabilities = [f"CAP_{name.upper()}" for name in names_of(policy.init_capabilities)]
    process: dict[str, Any] = {
        "terminal": False,
        "user": {"uid": 0, "gid": 0, "umask": 0o22},
        "args": [
            f"/proc/self/fd/{IMAGE_FD}",
            "inside",
            "--plan",
            str(PLAN_FD),
            "--status",
            str(STATUS_FD),
        ],
        "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
        "cwd": "/",
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        "rlimits": [_rlimit(name, soft, hard, facts.hard_limits) for name, soft, hard in policy.rlimits],
        "noNewPrivileges": policy.no_new_privs,
    }
    if facts.may_protect:
        process["oomScoreAdj"] = OOM_PROTECT
    linux: dict[str, Any] = {
        "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "user", "cgroup")],
        "uidMappings": [_mapping(spec)],
        "gidMappings": [_mapping(spec)],
        "maskedPaths": list(policy.masked_paths),
        # /sys is mounted read-only by oci_stage.
        "readonlyPaths": [path for path in policy.read_only_paths if path != "/sys"],
        "resources": {},
    }
    if facts.cgroups_path:
        linux["cgroupsPath"] = facts.cgroups_path
    return {
        "ociVersion": OCI_VERSION,
        "process": process,
        "root": {"path": "root", "readonly": False},
        "hostname": spec.hostname,
        "mounts": _mounts(spec),
        "linux": linux,
    }


def _mapping(spec: ContainerSpec) -> dict[str, int]:
    return {"containerID": 0, "hostID": spec.uid_base, "size": UID_RANGE}


def _rlimit(name: str, soft: int, hard: int, ceilings: Mapping[str, int]) -> dict[str, Any]:
    ceiling = ceilings.get(name, hard)
    return {"type": f"RLIMIT_{name}", "soft": min(soft, ceiling), "hard": min(hard, ceiling)}


def _mounts(spec: ContainerSpec) -> list[dict[str, Any]]:
    def mount(target: str, fstype: str, *options: str) -> dict[str, Any]:
        return {"destination": target, "type": fstype, "source": fstype, "options": list(options)}

    sealed = ("nosuid", "noexec", "nodev")
    shm = ("mode=1777", f"size={spec.shm_bytes}", "nr_inodes=16384")
    return [
        mount("/proc", "proc", *sealed),
        mount("/dev", "tmpfs", "nosuid", "noexec", "mode=755", "size=64k", "nr_inodes=128"),
        mount(
            "/dev/pts",
            "devpts",
            "nosuid",
            "noexec",
            "newinstance",
            "ptmxmode=0666",
            "mode=0620",
            f"gid={_TTY_GROUP}",
            "max=1024",
        ),
        mount("/dev/shm", "tmpfs", *sealed, *shm),
    ]


def inside_ops(spec: ContainerSpec, *, unified: bool) -> tuple[Op, ...]:
    """What dsec-init does as the bundle's process, in order."""
    policy = spec.policy
    rules = policy.landlock
    ops: list[Op] = []
    if not rules.is_empty:
        ops.append(Op("landlock", (rules.handled_fs, rules.handled_net, rules.scoped)))
    if policy.no_new_privs:
        ops.append(Op("no_new_privs"))
    if not rules.is_empty:
        ops.append(Op("landlock_self"))
    last = [Op("caps", (policy.init_capabilities, policy.capabilities)), Op("seccomp", (policy.seccomp,))]
    ops += last if policy.no_new_privs else reversed(last)
    flags = (INIT_NO_NEW_PRIVS if policy.no_new_privs else 0) | INIT_OOM_PROTECT
    ops.append(Op("serve", (LISTEN, UNIFIED if unified else "", flags, spec.log_bytes, OOM)))
    return tuple(ops)


def pack_inside(ops: tuple[Op, ...]) -> bytes:
    """The list as dsec-init reads it from PLAN_FD, with room for the report."""
    return pack_plan(len(ops), (pack_ops(ops, {LISTEN: LISTEN_FD - 3, UNIFIED: CGROUP_FD - 3, OOM: OOM_FD - 3}),))


def own_files(spec: ContainerSpec) -> tuple[tuple[str, str], ...]:
    """(path, text) of the files that every sandbox gets; alike with both launchers."""
    name = spec.hostname
    return (
        ("/etc/hostname", f"{name}\n"),
        ("/etc/hosts", f"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{name}\n"),
        ("/etc/resolv.conf", "".join(f"nameserver {address}\n" for address in spec.nameservers)),
    )


def stage_request(spec: ContainerSpec) -> dict[str, Any]:
    """What oci_stage prepares, JSON-able. Holds the secrets: it goes through a pipe and is never stored."""
    upper: dict[str, Any]
    if isinstance(spec.upper, DirUpper):
        upper = {"upper": str(spec.upper.upper), "work": str(spec.upper.work)}
    else:
        upper = {"size_bytes": spec.upper.size_bytes, "inodes": spec.upper.inodes}
    return {
        "uid_base": spec.uid_base,
        "uid_count": UID_RANGE,
        "rootfs": str(spec.rootfs),
        "upper": upper,
        "files": [[path, text] for path, text in own_files(spec)],
        "secrets_dir": SECRETS_DIR,
        "secrets": {name: base64.b64encode(text.encode()).decode("ascii") for name, text in spec.secrets.items()},
        "secrets_uid": spec.secrets_uid,
        "mounts": [
            {"source": str(item.source), "target": item.target, "read_only": item.read_only, "owners": item.owners}
            for item in spec.mounts
        ],
        "protected": list(spec.policy.protected_paths),
        "sysctls": [list(item) for item in spec.policy.sysctls],
    }


def describe(spec: ContainerSpec, facts: HostFacts, *, unified: bool) -> list[dict[str, Any]]:
    """What launch would do, printable: the preparation without secrets, config.json, and what dsec-init does."""
    prepared = stage_request(spec) | {"secrets": sorted(spec.secrets)}
    return [
        {"op": "stage", **prepared},
        {"op": "config.json", **render_config(spec, facts)},
        *(op.to_json() for op in inside_ops(spec, unified=unified)),
    ]
