"""Kernel, cgroups, namespaces, file systems, network, KVM."""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dsec_imagefs.lazy import fuse_problem

from nomad_dsec.doctor.row import Check
from nomad_dsec.linux import upper
from nomad_dsec.linux.cgroup import detect_layout
from nomad_dsec.linux.cgroup_pool import is_moving_fast
from nomad_dsec.linux.procfs import is_filesystem_known, read_sysctl, status

if TYPE_CHECKING:
    from dsec_policies.abilities import HostAbilities

MIN_KERNEL: Final = (5, 15)
FILE_BACKED_EROFS: Final = (6, 12)
_CAPS: Final = {"CAP_SYS_ADMIN": 21, "CAP_NET_ADMIN": 12, "CAP_SETUID": 7, "CAP_SETGID": 6, "CAP_CHOWN": 0}
_CAP_SYS_RESOURCE: Final = 24
# ability -> (is it required, what to do without it)
_ISOLATION: Final = {
    "user_namespaces": (
        True,
        "set user.max_user_namespaces, and kernel.apparmor_restrict_unprivileged_userns=0 if set",
    ),
    "pid_namespaces": (True, "use a kernel with CONFIG_PID_NS"),
    "seccomp_filter": (True, "use a kernel with CONFIG_SECCOMP_FILTER"),
    "idmapped_mounts": (True, "use Linux 5.19 or newer, where EROFS and overlay layers can be idmapped"),
    "openat2": (True, "use Linux 5.6 or newer"),
    "landlock_scopes": (
        False,
        "use Linux 6.12 or newer with landlock in the lsm= list; the network namespace holds alone",
    ),
}


def release(text: str) -> tuple[int, int]:
    """(6, 18) of "6.18.44-fc-v657"."""
    major, minor = text.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def check_privileges() -> list[Check]:
    """Root, with the capabilities that starting sandboxes takes."""
    held = int((status(os.getpid()) or {}).get("CapEff", "0"), 16)
    lacking = [name for name, bit in _CAPS.items() if not held >> bit & 1]
    uid = os.geteuid()
    return [
        Check(
            name="privileges",
            ok=uid == 0 and not lacking,
            reason=f"uid {uid}" + (f", without {', '.join(lacking)}" if lacking else ""),
            fix="" if uid == 0 and not lacking else "run the node daemon as root with all capabilities",
            required=True,
        ),
        Check(
            name="CAP_SYS_RESOURCE",
            ok=bool(held >> _CAP_SYS_RESOURCE & 1),
            reason="PID 1 of a sandbox is spared by the OOM killer, rlimits may exceed ours"
            if held >> _CAP_SYS_RESOURCE & 1
            else "PID 1 of a sandbox can't be spared by the OOM killer, rlimits end at ours",
            fix="" if held >> _CAP_SYS_RESOURCE & 1 else "give the daemon the capability, if the host lets you",
        ),
    ]


def check_kernel(abilities: HostAbilities) -> list[Check]:
    """Version and architecture."""
    version = release(platform.release())
    return [
        Check(
            name="kernel",
            ok=version >= MIN_KERNEL,
            reason=f"Linux {platform.release()} on {abilities.arch}",
            fix="" if version >= MIN_KERNEL else f"use Linux {MIN_KERNEL[0]}.{MIN_KERNEL[1]} or newer",
            required=True,
        )
    ]


def check_cgroups() -> list[Check]:
    """Which hierarchies there are, whether the limits can be enforced, and how dear a move is."""
    layout = detect_layout()
    missing = layout.missing()
    rows = [
        Check(
            name="cgroups",
            ok=not missing,
            reason=f"{layout.mode}: limits by {', '.join(sorted(layout.hierarchies()))}"
            if not missing
            else f"no {', '.join(missing)} controller",
            fix="" if not missing else "mount the v1 controllers, or boot with systemd.unified_cgroup_hierarchy=1",
            required=True,
        ),
        Check(
            name="cgroup2",
            ok=bool(layout.unified),
            reason=f"{layout.unified}: whole-tree kill, exec cgroups" if layout.unified else "no cgroup2 mount",
            fix="" if layout.unified else "mount -t cgroup2 none /sys/fs/cgroup/unified (it needs no controllers)",
        ),
    ]
    fast = is_moving_fast() or layout.mode == "v2"
    rows.append(
        Check(
            name="cgroup moves",
            ok=fast,
            reason="no grace period" if fast else "each start waits ~7 ms for an RCU grace period",
            fix="" if fast else "the node daemon remounts a hierarchy with favordynmods (Linux 6.0) when it starts",
        )
    )
    return rows


def check_isolation(abilities: HostAbilities) -> list[Check]:
    """What the default profile rests on."""
    rows = []
    for name, (required, fix) in _ISOLATION.items():
        found = abilities.get(name)
        rows.append(
            Check(
                name=name.replace("_", " "),
                ok=found.ok,
                reason=found.detail or ("works" if found.ok else "absent"),
                fix="" if found.ok else fix,
                required=required,
            )
        )
    return rows


def check_images() -> list[Check]:
    """How image roots are mounted."""
    version, loop = release(platform.release()), Path("/dev/loop-control").exists()
    known = is_filesystem_known("erofs")
    fuse = fuse_problem()
    how = "from the file" if version >= FILE_BACKED_EROFS else "through a loop device" if loop else "not at all"
    return [
        Check(
            name="erofs",
            ok=known and how != "not at all",
            reason=f"mounted {how}" if known else "the kernel lists no erofs (modprobe erofs may bring it)",
            fix="" if known and how != "not at all" else "modprobe erofs loop, or use a kernel with CONFIG_EROFS_FS",
            required=True,
        ),
        Check(
            name="overlay",
            ok=is_filesystem_known("overlay"),
            reason="in /proc/filesystems" if is_filesystem_known("overlay") else "not in /proc/filesystems",
            fix="" if is_filesystem_known("overlay") else "modprobe overlay",
            required=True,
        ),
        Check(
            name="images on demand",
            ok=not fuse,
            reason=fuse or "/dev/fuse opens: data of pulled images is fetched when it is read",
            fix="" if not fuse else "modprobe fuse; until then bring images here whole: dsec image pull --whole",
            required=False,
        ),
    ]


def check_uppers(data: Path) -> list[Check]:
    """Which kinds of writable layer the data directory offers."""
    place = next(path for path in (data, *data.parents) if path.is_dir())
    with tempfile.TemporaryDirectory(prefix="dsec-doctor-", dir=place) as directory:
        choice = upper.probe(Path(directory), node="doctor")
    on_disk = choice.store.kind != "tmpfs"
    others = "; ".join(f"{kind}: {reason}" for kind, reason in choice.reasons.items() if reason)
    return [
        Check(
            name="writable layers",
            ok=on_disk,
            reason=f"{choice.store.kind} in {place}" + (f" ({others})" if others else ""),
            fix=""
            if on_disk
            else "layers live in memory and count against each sandbox's limit; put node.data on btrfs for disk",
        )
    ]


def check_network(abilities: HostAbilities) -> list[Check]:
    """What a network of kind `open` needs; `none` needs only namespaces."""
    forwarding = read_sysctl("net.ipv4.ip_forward") == "1"
    rows = [
        Check(
            name="network namespaces",
            ok=abilities.has("net_namespaces"),
            reason=abilities.get("net_namespaces").detail or "work",
            fix="" if abilities.has("net_namespaces") else "use a kernel with CONFIG_NET_NS",
            required=True,
        )
    ]
    for name, fix in (("nftables", "install nftables; modprobe nf_tables nft_masq"), ("veth", "modprobe veth")):
        found = abilities.get(name)
        reason = found.detail or ("works" if found.ok else "absent")
        rows.append(Check(name=name, ok=found.ok, reason=reason, fix="" if found.ok else f"{fix} (for network=open)"))
    text = "on" if forwarding else "off: the node daemon turns it on when a sandbox first asks for network=open"
    return [*rows, Check(name="ip_forward", ok=True, reason=text)]


def check_kvm() -> list[Check]:
    """By what the machine is, never by opening /dev/kvm: PVM's opens, reports every capability, and boots nothing."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    if Path("/sys/module/kvm_pvm").exists():
        reason = "kvm is PVM (kvm_pvm is loaded): ordinary guest kernels don't boot on it"
    elif " vmx" not in flags and " svm" not in flags:
        reason = "the CPU shows neither vmx nor svm"
    elif not os.access("/dev/kvm", os.R_OK | os.W_OK):
        reason = "/dev/kvm is missing or not ours"
    else:
        return [Check(name="kvm", ok=True, reason="hardware virtualisation")]
    return [
        Check(name="kvm", ok=False, reason=reason, fix="containers don't need it; VMs fall back to emulation (TCG)")
    ]
