"""The files of cgroup v1 and v2 (admin-guide/cgroup-v1, cgroup-v2.rst): layout, limits and statistics as data.

Pure but for `read_file` and `write_file`; which of these files to touch, and when, is cgroup.py's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nomad_dsec.linux.syscalls import SyscallError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from nomad_dsec.linux.mountinfo import Mount

UNIFIED: Final = "unified"
LIMITED: Final = ("cpu", "memory", "pids")
PERIOD_US: Final = 100_000
MIN_QUOTA_US: Final = 1_000
_V1_NAMES: Final = frozenset(
    "cpu cpuacct memory pids freezer devices cpuset blkio hugetlb net_cls net_prio perf_event name=systemd".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one sandbox may use. cpus: cores, as a hard quota; memory_bytes: with no swap on top; pids: tasks.

    best_effort: gives way to every other sandbox (cpu.idle, or the least weight where the kernel lacks it).
    """

    cpus: float
    memory_bytes: int
    pids: int
    best_effort: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupStats:
    """Use by one sandbox since it got the cgroup. oom_kills and pids_refused are running counts."""

    cpu_usage_s: float = 0.0
    memory_current_bytes: int = 0
    memory_peak_bytes: int = 0
    pids_current: int = 0
    oom_kills: int = 0
    pids_refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where this host keeps what. v1: controller -> mount; unified: mount of the cgroup2 hierarchy, "" if none;
    v2: controllers that the unified hierarchy really has (those bound to v1 are absent from it).
    """

    v1: Mapping[str, str]
    unified: str
    v2: frozenset[str]

    @property
    def mode(self) -> str:
        """v1, v2 or hybrid (limits by v1, a cgroup2 mount beside it)."""
        if not self.unified:
            return "v1"
        return "v2" if self.v2.issuperset(LIMITED) else "hybrid"

    def hierarchies(self) -> dict[str, str]:
        """Those in which a sandbox gets a directory: "unified" and the v1 controllers that are needed beside it."""
        needed = {name: self.v1[name] for name in LIMITED if name in self.v1 and name not in self.v2}
        if self.unified:
            return {UNIFIED: self.unified} | needed
        return needed | {name: self.v1[name] for name in ("cpuacct", "freezer") if name in self.v1}

    def foreign(self) -> list[str]:
        """v1 mounts in which sandboxes get no directory from us; runc makes some there all the same."""
        return sorted(set(self.v1.values()) - set(self.hierarchies().values()))

    def missing(self) -> list[str]:
        """Limits that nothing here can enforce."""
        return [name for name in LIMITED if name not in self.v2 and name not in self.v1]


def path_of(layout: Layout, paths: Mapping[str, str], controller: str) -> str:
    """Of one cgroup's directories (by hierarchy), that which has a controller's files; "" when none has."""
    return paths.get(UNIFIED if controller in layout.v2 else controller, "")


def layout_of(mounts: Iterable[Mount], controllers_of: Mapping[str, str]) -> Layout:
    """The layout from mountinfo and, per cgroup2 mount, the text of its cgroup.controllers."""
    v1: dict[str, str] = {}
    unified = ""
    for mount in mounts:
        if mount.fstype == "cgroup":
            for name in _V1_NAMES.intersection(mount.super_options):
                v1.setdefault(name, mount.target)
        elif mount.fstype == "cgroup2" and not unified:
            unified = mount.target
    return Layout(v1=v1, unified=unified, v2=frozenset(controllers_of.get(unified, "").split()))


def limit_writes_v1(limits: Limits, *, idle: bool, memsw: bool) -> Iterator[tuple[str, str, str]]:
    """(controller, file, value) in an order that the kernel takes for raised and for lowered limits alike.

    idle, memsw: whether cpu.idle (5.15) and memory.memsw.* exist. memory.limit may never exceed memsw.limit: the way
    through is to lift both (-1) first. A cpu.idle group refuses cpu.shares, so the flag goes first.
    """
    if idle:
        yield "cpu", "cpu.idle", "1" if limits.best_effort else "0"
    if not (idle and limits.best_effort):
        yield "cpu", "cpu.shares", "2" if limits.best_effort else str(_shares(limits.cpus))
    yield "cpu", "cpu.cfs_quota_us", str(_quota_us(limits.cpus))
    if memsw:
        yield "memory", "memory.memsw.limit_in_bytes", "-1"
    yield "memory", "memory.limit_in_bytes", str(limits.memory_bytes)
    if memsw:
        yield "memory", "memory.memsw.limit_in_bytes", str(limits.memory_bytes)
    yield "pids", "pids.max", str(limits.pids)


def limit_writes_v2(limits: Limits, *, idle: bool, swap: bool) -> Iterator[tuple[str, str, str]]:
    """The same for the unified hierarchy; idle, swap: whether cpu.idle and memory.swap.max exist."""
    if idle:
        yield "cpu", "cpu.idle", "1" if limits.best_effort else "0"
    if not (idle and limits.best_effort):
        yield "cpu", "cpu.weight", "1" if limits.best_effort else str(_weight(limits.cpus))
    yield "cpu", "cpu.max", f"{_quota_us(limits.cpus)} {PERIOD_US}"
    yield "memory", "memory.max", str(limits.memory_bytes)
    if swap:
        yield "memory", "memory.swap.max", "0"
    yield "pids", "pids.max", str(limits.pids)


def _quota_us(cpus: float) -> int:
    return max(MIN_QUOTA_US, round(cpus * PERIOD_US))


def _shares(cpus: float) -> int:
    return min(262_144, max(2, round(cpus * 1024)))


def _weight(cpus: float) -> int:
    return min(10_000, max(1, round(cpus * 100)))


def parse_keyed(text: str) -> dict[str, int]:
    """The "flat keyed" files: memory.events, cpu.stat, cgroup.events, memory.oom_control, pids.events."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if value.isdigit():
            values[key] = int(value)
    return values


def read_file(path: str) -> str:
    """A whole cgroup file; SyscallError names it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 65536).decode("ascii", "replace")
        finally:
            os.close(fd)
    except OSError as error:
        raise SyscallError(error.errno or 0, "read", path) from error


def write_file(path: str, value: str) -> None:
    """One write(2) of the value, as cgroup files demand; SyscallError names the file."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode("ascii"))
        finally:
            os.close(fd)
    except OSError as error:
        raise SyscallError(error.errno or 0, f"write {value!r}", path) from error
