"""Facts of a running container as the host sees them, for comparing launchers. Reads /proc; changes nothing."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

from nomad_dsec.linux.mountinfo import read_mounts
from nomad_dsec.linux.procfs import parse_status

STATUS = (
    "Uid Gid Groups NSpid CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp Seccomp_filters Umask SigIgn Threads"
).split()
NAMESPACES = ("user", "mnt", "pid", "ipc", "uts", "net", "cgroup")
LIMIT_FLAGS = ("ro", "nosuid", "nodev", "noexec")
FILES = ("/etc/hostname", "/etc/hosts", "/etc/resolv.conf")


def inside(pid: int, *argv: str, namespaces: str) -> str:
    """A program of the host in some of the container's namespaces."""
    done = subprocess.run(
        ["nsenter", "-t", str(pid), *namespaces.split(), *argv], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout


def facts(pid: int, *, masks: tuple[str, ...], read_only: tuple[str, ...]) -> dict[str, Any]:
    """Everything that has to agree, by topic. Numbers of mounts, processes and namespaces are left out.

    masks, read_only: the policy's paths; masks are compared by what a reader meets, read-only paths by being that.
    """
    proc, root = Path(f"/proc/{pid}"), Path(f"/proc/{pid}/root")
    status = parse_status((proc / "status").read_text())
    seen = {key: status[key].split() for key in STATUS}
    seen["NSpid"] = seen["NSpid"][1:]  # the host's own number differs
    return {
        "status": seen,
        "limits": (proc / "limits").read_text().splitlines(),
        "id maps": [(proc / name).read_text().split() for name in ("uid_map", "gid_map")],
        "own namespaces": {name: not _is_host(pid, name) for name in NAMESPACES},
        "cgroup below mounts": sorted(
            line.partition(":")[2] for line in (proc / "cgroup").read_text().splitlines() if "/dsec-" in line
        ),
        "cgroup root inside": _ours(pid, inside(pid, "cat", f"/proc/{pid}/cgroup", namespaces="-C")),
        "hostname": inside(pid, "hostname", namespaces="-u"),
        "namespace limits": {
            name.name: inside(pid, "cat", str(name), namespaces="-U").strip()
            for name in sorted(Path("/proc/sys/user").glob("max_*_namespaces"))
        },
        "oom_score_adj": (proc / "oom_score_adj").read_text(),
        "mounts": mounts(pid, without={*masks, *read_only}),
        "read-only": {path: "ro" in options for path, options in _targets(pid).items() if path in read_only},
        "masks": {path: _mask(Path(f"{root}{path}"), path, _targets(pid)) for path in masks},
        "dev": devices(root / "dev"),
        "files": {path: _entry(root / path.lstrip("/")) for path in FILES},
        "secrets": tree(root / "run/secrets"),
        "owners": {
            path: _owner(f"{root}{path}") for path in ("/", "/bin", "/usr", "/usr/bin", "/tmp", "/etc", "/work")
        },
        "names": sorted(os.listdir(root)),
    }


def _ours(pid: int, text: str) -> list[str]:
    """Of /proc/PID/cgroup as seen inside, the hierarchies in which the sandbox has a cgroup of its own."""
    host = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return [line for line, full in zip(text.splitlines(), host, strict=True) if "/dsec-" in full]


def _mask(path: Path, name: str, targets: dict[str, tuple[str, ...]]) -> str:
    """What a reader meets: absent, empty, or "open" when nothing covers it."""
    if not path.exists():
        return "absent"
    if name not in targets:
        return "open"
    if path.is_dir():
        return "open" if os.listdir(path) or "ro" not in targets[name] else "empty"
    return "open" if path.read_bytes() else "empty"


def _targets(pid: int) -> dict[str, tuple[str, ...]]:
    return {mount.target: mount.options for mount in read_mounts(pid)}


def mounts(pid: int, *, without: set[str]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Target -> (file system, flags) of all mounts but these and device nodes, which OCI runtimes bind."""
    found = {}
    for mount in read_mounts(pid):
        is_node = mount.target.startswith("/dev/") and mount.fstype == "devtmpfs"
        if not is_node and mount.target not in without:
            flags = tuple(flag for flag in LIMIT_FLAGS if flag in mount.options)
            found[mount.target] = (mount.fstype, flags)
    return found


def devices(top: Path) -> dict[str, Any]:
    """The entries of /dev: kind, mode and number or link. Owners differ: made for the sandbox, or the host's own.

    crun adds `core`, a link to the masked /proc/kcore.
    """
    return {name: (kind, mode, detail) for name, (kind, mode, _, detail) in tree(top).items() if name != "core"}


def tree(top: Path) -> dict[str, Any]:
    """Name -> (kind, mode, owner, device or link or content) of a directory's entries."""
    return {name: _entry(top / name) for name in sorted(os.listdir(top))} if top.is_dir() else {}


def _owner(path: str) -> tuple[str, int, int]:
    info = os.lstat(path)  # with a slash at the end it is the root itself, not the link to it
    return stat.filemode(info.st_mode), info.st_uid, info.st_gid


def _entry(path: Path) -> tuple[str, str, int, str]:
    info = os.lstat(path)
    kind = stat.filemode(info.st_mode)
    detail = ""
    if stat.S_ISLNK(info.st_mode):
        detail = os.readlink(path)
    elif stat.S_ISCHR(info.st_mode):
        detail = f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
    elif stat.S_ISREG(info.st_mode):
        detail = path.read_text()
    return kind[0], kind[1:], info.st_uid, detail


def _is_host(pid: int, name: str) -> bool:
    return os.stat(f"/proc/{pid}/ns/{name}").st_ino == os.stat(f"/proc/self/ns/{name}").st_ino


def differences(mine: Any, theirs: Any, at: str = "") -> list[str]:
    """One line a leaf that differs: "topic/name: mine != theirs"."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        lines = []
        for key in sorted(mine.keys() | theirs.keys()):
            lines += differences(mine.get(key, "(none)"), theirs.get(key, "(none)"), f"{at}/{key}")
        return lines
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        return [
            line for n, pair in enumerate(zip(mine, theirs, strict=True)) for line in differences(*pair, f"{at}[{n}]")
        ]
    return [] if mine == theirs else [f"{at}: {mine!r} != {theirs!r}"]
