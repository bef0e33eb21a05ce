"""One interface over cgroup v1, v2 and their hybrid: make, limit, count, freeze, kill, remove a sandbox's cgroup.

Everything of a node lives below `dsec-<node>/` in each hierarchy in use, so that a sweep can tell its own from others'.
The unified hierarchy is used for what it does best even without controllers: CLONE_INTO_CGROUP, cgroup.kill,
cgroup.freeze, cpu.stat and the per-exec cgroups of dsec-init; v1 directories then exist only for cpu, memory and pids.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from libdsec.errors import DeadlineExceeded, PlatformError

from nomad_dsec.linux import cgroup_counts as counts
from nomad_dsec.linux import cgroup_files as files
from nomad_dsec.linux.cgroup_files import UNIFIED, CgroupStats, Layout, Limits, read_file, write_file
from nomad_dsec.linux.mountinfo import read_mounts
from nomad_dsec.linux.syscalls import SyscallError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MAX_EXEC_CGROUPS: Final = 4096
_ALL_CORES_US: Final = 1024 * files.PERIOD_US
_DELEGATED: Final = ("", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control")
_FIRST_NAP_S: Final = 0.0003
_LONGEST_NAP_S: Final = 0.02


def detect_layout() -> Layout:
    """What this host has mounted."""
    mounts = read_mounts()
    controllers = {}
    for mount in mounts:
        if mount.fstype == "cgroup2":
            controllers[mount.target] = read_file(f"{mount.target}/cgroup.controllers")
    return files.layout_of(mounts, controllers)


@dataclass(slots=True, kw_only=True)
class Cgroup:
    """One sandbox's directories, one a hierarchy. `baseline`: running counts as they stood at the hand-out."""

    name: str
    layout: Layout
    paths: Mapping[str, str]
    baseline: dict[str, int] = field(default_factory=dict)
    is_spent: bool = False  # cgroup.kill was written: see kill_nowait

    @property
    def unified(self) -> str:
        """The cgroup2 directory, for CLONE_INTO_CGROUP (clone3(2), 5.7); "" on a host without that hierarchy."""
        return self.paths.get(UNIFIED, "")

    @property
    def join_files(self) -> tuple[str, ...]:
        """The v1 files to which the launcher writes a pid, or "0" for itself, besides the clone into `unified`."""
        return tuple(f"{path}/cgroup.procs" for name, path in self.paths.items() if name != UNIFIED)

    @property
    def oom_file(self) -> str:
        """The file with the line `oom_kill N`; /dev/null, which counts none, where nothing limits memory."""
        return counts.oom_file(self.layout, self.paths) or os.devnull

    def path_of(self, controller: str) -> str:
        """The directory where a controller's files are; "" when nothing here has that controller."""
        return files.path_of(self.layout, self.paths, controller)

    def set_limits(self, limits: Limits) -> None:
        """Write all limits. SyscallError names the file that refused, e.g. EBUSY for memory below what is in use."""
        idle = self._has("cpu", "cpu.idle")
        v2 = files.limit_writes_v2(limits, idle=idle, swap=self._has("memory", "memory.swap.max"))
        v1 = files.limit_writes_v1(limits, idle=idle, memsw=self._has("memory", "memory.memsw.limit_in_bytes"))
        writes = [write for write in v2 if write[0] in self.layout.v2]
        writes += [write for write in v1 if write[0] not in self.layout.v2]
        for controller, name, value in writes:
            directory = self.path_of(controller)
            if directory:
                write_file(f"{directory}/{name}", value)

    def lift_cpu_limit(self) -> None:
        """For what is to die: hundreds of processes at a hundredth of a core take minutes to exit. A limit stays, since
        taking the last one of a machine away, and setting the next, patches the kernel's code.
        """
        v2 = "cpu" in self.layout.v2
        directory = self.path_of("cpu")
        if directory:
            quota = f"{_ALL_CORES_US} {files.PERIOD_US}" if v2 else str(_ALL_CORES_US)
            write_file(f"{directory}/{'cpu.max' if v2 else 'cpu.cfs_quota_us'}", quota)

    def _has(self, controller: str, name: str) -> bool:
        directory = self.path_of(controller)
        return bool(directory) and os.path.exists(f"{directory}/{name}")  # noqa: PTH110 - hot path

    def attach(self, pid: int) -> None:
        """Move a process in everywhere (a launcher that can't be cloned into place)."""
        for path in self.paths.values():
            write_file(f"{path}/cgroup.procs", str(pid))

    def open_delegated(self, uid: int, gid: int) -> int:
        """An O_PATH-less directory fd of the cgroup2 directory, now owned by the sandbox's root; -1 without one.

        dsec-init makes the cgroups of its execs below it. Limits, freeze and kill files stay ours (cgroup-v2.rst,
        "Delegation"). The fd is close-on-exec; the launcher passes it on.
        """
        if not self.unified:
            return -1
        for name in _DELEGATED:
            os.chown(f"{self.unified}/{name}", uid, gid)
        return os.open(self.unified, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def reclaim_delegation(self) -> None:
        """Back to us what open_delegated gave away, running rather than frozen."""
        write_file(f"{self.unified}/cgroup.freeze", "0")
        for name in _DELEGATED:
            os.chown(f"{self.unified}/{name}", 0, 0)

    def stats(self) -> CgroupStats:
        """Use since the cgroup was handed out. A file that this kernel lacks counts as zero."""
        now = counts.read_counts(self.layout, self.paths)
        since = {key: value - self.baseline.get(key, 0) for key, value in now.items()}
        return CgroupStats(
            cpu_usage_s=since.get("cpu_us", 0) / 1e6,
            memory_current_bytes=now.get("memory", 0),
            memory_peak_bytes=now.get("memory_peak", 0),
            pids_current=now.get("pids", 0),
            oom_kills=since.get("oom_kill", 0),
            pids_refused=since.get("pids_max", 0),
        )

    def oom_kills(self) -> int:
        """Only that running count."""
        return counts.oom_kills(self.layout, self.paths) - self.baseline.get("oom_kill", 0)

    def start_counting(self) -> None:
        """Let statistics begin now: the next owner must not see the use of the last one."""
        if "memory" not in self.layout.v2 and self.paths.get("memory"):
            write_file(f"{self.paths['memory']}/memory.max_usage_in_bytes", "0")
        self.baseline = {
            key: value
            for key, value in counts.read_counts(self.layout, self.paths).items()
            if key in ("oom_kill", "pids_max", "cpu_us")
        }

    def pids(self) -> list[int]:
        """Every process in it, those of exec cgroups included."""
        found: list[int] = []
        top = self.unified or next(iter(self.paths.values()))
        for directory, _, _ in os.walk(top):
            try:
                found += [int(line) for line in read_file(f"{directory}/cgroup.procs").split()]
            except SyscallError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
                    raise
        return found

    def is_empty(self) -> bool:
        """True when no live process is in it. A removed cgroup is empty."""
        try:
            if self.unified:
                return files.parse_keyed(read_file(f"{self.unified}/cgroup.events")).get("populated", 0) == 0
            return not self.pids()
        except SyscallError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV):
                return True
            raise

    def is_frozen(self) -> bool:
        """True when every task in it stands still."""
        if self.unified:
            return files.parse_keyed(read_file(f"{self.unified}/cgroup.events")).get("frozen", 0) == 1
        return read_file(f"{self.paths['freezer']}/freezer.state").strip() == "FROZEN"

    async def freeze(self, *, timeout_s: float) -> None:
        """Stop every task and return when all stand still; on DeadlineExceeded it is thawed again."""
        self._write_freeze(frozen=True)
        try:
            await self._wait(self.is_frozen, "freeze", timeout_s)
        except BaseException:
            self._write_freeze(frozen=False)
            raise

    async def thaw(self, *, timeout_s: float) -> None:
        """Let every task run; returns when the kernel says so."""
        self._write_freeze(frozen=False)
        await self._wait(lambda: not self.is_frozen(), "thaw", timeout_s)

    def _write_freeze(self, *, frozen: bool) -> None:
        if self.unified:
            write_file(f"{self.unified}/cgroup.freeze", "1" if frozen else "0")
        elif "freezer" in self.paths:
            write_file(f"{self.paths['freezer']}/freezer.state", "FROZEN" if frozen else "THAWED")
        else:
            raise PlatformError(
                "no_freezer", "this host has neither cgroup2 nor the v1 freezer", hint="see `dsec doctor`"
            )

    async def kill(self, *, timeout_s: float) -> None:
        """SIGKILL to everything in it, forks under way included; returns when it is empty. Idempotent."""
        self.kill_nowait()
        # Repeating costs little and is what a kernel without cgroup.kill needs against forks.
        await self._wait(lambda: self.is_empty() or self.kill_nowait(), "kill", timeout_s)

    def kill_nowait(self) -> bool:
        """Send the kill, by cgroup.kill (5.14) where it exists; False: nothing is known to be over yet.

        That spends the cgroup: seen on 6.18, whatever is later cloned into it (CLONE_INTO_CGROUP) dies at birth, since
        the kernel compares the cgroup's count of kills with the parent's.
        """
        try:
            if self.unified:
                self.is_spent = True
                write_file(f"{self.unified}/cgroup.kill", "1")
                return False
        except SyscallError as error:
            if error.errno == errno.ENODEV or not Path(self.unified).exists():
                return False  # removed already
            if error.errno != errno.ENOENT:
                raise
        self._kill_each()
        return False

    def _kill_each(self) -> None:
        # Frozen, nothing can fork away from the list; on v1 SIGKILL acts only after the thaw.
        freezer = self.paths.get("freezer")
        if freezer and Path(freezer).exists():
            write_file(f"{freezer}/freezer.state", "FROZEN")
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if freezer and Path(freezer).exists():
            write_file(f"{freezer}/freezer.state", "THAWED")

    async def remove(self, *, timeout_s: float = 5.0) -> None:
        """Take it away, exec cgroups first; repeats on EBUSY (dead tasks leave a moment late) until the deadline."""
        await self._wait(self._is_removed, "remove", timeout_s)

    def _is_removed(self) -> bool:
        gone = True
        for path in self.paths.values():
            gone = remove_tree(path) and gone
        return gone

    def remove_exec_cgroups(self) -> bool:
        """Take away what dsec-init made below; False when one still holds tasks."""
        return not self.unified or remove_tree(self.unified, keep_top=True)

    async def _wait(self, condition: Any, step: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        nap_s = _FIRST_NAP_S
        while not condition():
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"cgroup_{step}_timeout",
                    f"{step} of cgroup {self.name} did not finish within {timeout_s:g} s",
                    details={"pids": self.pids()[:20]},
                )
            await asyncio.sleep(nap_s)
            nap_s = min(nap_s * 2, _LONGEST_NAP_S)

    def to_record(self) -> dict[str, Any]:
        """What a handle keeps; CgroupRoot.adopt takes it."""
        return {"name": self.name, "baseline": dict(self.baseline)}


def remove_tree(top: str, *, keep_top: bool = False) -> bool:
    """Remove a cgroup directory and all below it, deepest first. False when something in it is still busy."""
    done = True
    for directory, _, _ in os.walk(top, topdown=False):
        if keep_top and directory == top:
            continue
        try:
            os.rmdir(directory)  # noqa: PTH106 - hot path
        except OSError as error:
            if error.errno == errno.EBUSY:
                done = False
            elif error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise SyscallError(error.errno or 0, "rmdir", directory) from error
            elif error.errno == errno.ENOTEMPTY:
                done = False
    return done


@dataclass(slots=True, kw_only=True)
class CgroupRoot:
    """`dsec-<node>/` in every hierarchy in use; the only maker of sandboxes' cgroups."""

    node: str
    layout: Layout
    tops: Mapping[str, str]

    @classmethod
    def detect(cls, node: str, *, layout: Layout | None = None) -> CgroupRoot:
        """Find the hierarchies and make the node's directories. PlatformError says which limit can't be enforced."""
        layout = layout or detect_layout()
        if layout.missing():
            raise PlatformError(
                "cgroup_controllers_missing",
                f"no cgroup hierarchy here has the controllers {', '.join(layout.missing())}",
                hint="mount them (v1), or boot with cgroup2 and see that cgroup.controllers lists them",
            )
        tops = {name: f"{mount}/dsec-{node}" for name, mount in layout.hierarchies().items()}
        for top in tops.values():
            Path(top).mkdir(mode=0o755, exist_ok=True)
        if layout.v2.intersection(files.LIMITED):
            wanted = " ".join(f"+{name}" for name in files.LIMITED if name in layout.v2)
            for directory in (layout.unified, tops[UNIFIED]):
                _enable_controllers(directory, wanted)
        return cls(node=node, layout=layout, tops=tops)

    def create(self, name: str, limits: Limits) -> Cgroup:
        """Fresh directories with limits written; on any failure nothing stays. FileExistsError for a name in use."""
        cgroup = self._named(name)
        made: list[str] = []
        try:
            for path in cgroup.paths.values():
                os.mkdir(path, 0o755)  # noqa: PTH102 - hot path
                made.append(path)
            if cgroup.unified:
                write_file(f"{cgroup.unified}/cgroup.max.descendants", str(MAX_EXEC_CGROUPS))
            cgroup.set_limits(limits)
        except BaseException:
            for path in made:
                remove_tree(path)
            raise
        return cgroup

    def adopt(self, record: Mapping[str, Any]) -> Cgroup:
        """The cgroup of a handle's record (Cgroup.to_record), whether or not its directories still exist."""
        cgroup = self._named(str(record["name"]))
        cgroup.baseline = {str(key): int(value) for key, value in dict(record.get("baseline", {})).items()}
        return cgroup

    def names(self) -> list[str]:
        """Every name that has a directory in any hierarchy."""
        found: set[str] = set()
        for top in self.tops.values():
            with os.scandir(top) as entries:
                found.update(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return sorted(found)

    async def sweep(self, keep: Collection[str], *, timeout_s: float = 10.0) -> list[str]:
        """Kill and remove what no one of `keep` (names) owns; returns the names removed."""
        removed = []
        for name in self.names():
            if name in keep:
                continue
            cgroup = self._named(name)
            await cgroup.kill(timeout_s=timeout_s)
            await cgroup.remove(timeout_s=timeout_s)
            removed.append(name)
        for mount in self.layout.foreign():
            self._sweep_foreign(f"{mount}/dsec-{self.node}", keep)
        return removed

    @staticmethod
    def _sweep_foreign(top: str, keep: Collection[str]) -> None:
        """What an OCI runtime left in a hierarchy that we don't use: empty, since its tasks were in ours too."""
        if not os.path.isdir(top):  # noqa: PTH112 - hot path
            return
        with os.scandir(top) as entries:
            strays = [entry.path for entry in entries if entry.is_dir() and entry.name not in keep]
        for path in strays:
            remove_tree(path)
        with contextlib.suppress(OSError):
            os.rmdir(top)  # noqa: PTH106 - as above

    async def remove(self, *, timeout_s: float = 10.0) -> None:
        """Sweep everything and take the node's own directories away (a node that leaves for good; tests)."""
        await self.sweep((), timeout_s=timeout_s)
        for top in self.tops.values():
            remove_tree(top)

    def _named(self, name: str) -> Cgroup:
        return Cgroup(name=name, layout=self.layout, paths={key: f"{top}/{name}" for key, top in self.tops.items()})


def _enable_controllers(directory: str, wanted: str) -> None:
    try:
        write_file(f"{directory}/cgroup.subtree_control", wanted)
    except SyscallError as error:
        raise PlatformError(
            "cgroup_not_delegated",
            f"can't enable {wanted!r} below {directory}: {error.strerror}",
            hint="run as root on the host, or in a service with Delegate=yes whose own processes sit in a child cgroup",
        ) from error
