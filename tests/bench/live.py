"""A whole machine under test: node daemon and gateway as processes of their own, and what they cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[2]
DSEC = Path(sys.executable).parent / "dsec"
TICK = os.sysconf("SC_CLK_TCK")
_UNIFIED = ("/sys/fs/cgroup/unified", "/sys/fs/cgroup")


@dataclass(frozen=True)
class Live:
    """Where it listens, and the pids of our own processes by role."""

    endpoint: str
    key: str
    data: Path
    pids: dict[str, int]

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds used so far by each of our long-lived processes, by the caller, and inside of the sandboxes."""
        found = {role: _cpu_s(pid) for role, pid in self.pids.items()}
        return found | {"sdk": time.process_time(), "inside": self._inside_s()}

    def _inside_s(self) -> float:
        """Of all cgroups of the node, those that are gone too (cgroup-v2.rst, cpu.stat)."""
        node = json.loads((self.data / "node" / "node.json").read_text())["node"]
        for mounted in _UNIFIED:
            stat = Path(mounted) / f"dsec-{node}" / "cpu.stat"
            if stat.exists():
                return int(stat.read_text().split()[1]) / 1e6  # usage_usec
        return 0.0

    def footprint(self) -> dict[str, dict[str, int]]:
        """Descriptors, threads and resident KiB of each of our long-lived processes."""
        return {role: _footprint(pid) for role, pid in self.pids.items()}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(value) for value in fields[11:15]) / TICK  # user, system, and those of reaped children


def _footprint(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "rss_kib": int(status["VmRSS"].split()[0]),
    }


@contextmanager
def live(
    data: Path, *, images: Path | None = None, timeout_s: float = 120.0, settings: Mapping[str, str] | None = None
) -> Iterator[Live]:
    """`dsec dev --detach` in its own data directory, stopped at the end with all its sandboxes.

    settings: by environment variable, such as DSEC_NODE_CPU_OVERCOMMIT.
    """
    argv = [str(DSEC), "dev", "--data", str(data), "--detach"]
    if images is not None and not (data / "images").exists():
        (data / "images").symlink_to(images)  # the store of the whole run, so that no bench imports its own
    env = {**os.environ, **(settings or {})}
    subprocess.run(argv, check=True, timeout=timeout_s, stdout=subprocess.DEVNULL, env=env)
    try:
        facts = json.loads((data / "dev.json").read_text())
        yield Live(facts["endpoint"], facts["api_key"], data, _pids(facts["children"]))
    finally:
        subprocess.run([str(DSEC), "dev", "stop", "--data", str(data)], check=True, timeout=timeout_s)


def _pids(children: dict[str, Any]) -> dict[str, int]:
    return {role: int(record["pid"]) for role, record in children.items()}


def machine() -> dict[str, str | int]:
    """What the numbers were measured on."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ":unknown")
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "cpus": os.cpu_count() or 0,
        "cpu": model.partition(":")[2].strip(),
        "kernel": os.uname().release,
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "python": sys.version.split()[0],
        "revision": revision.stdout.strip(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load": Path("/proc/loadavg").read_text().split()[0],
    }


def percentiles(series: list[float]) -> dict[str, float]:
    """p50, p90, p99 and max of a series, in its own unit."""
    ordered = sorted(series)
    if not ordered:
        return {}
    at = {name: ordered[min(len(ordered) - 1, int(len(ordered) * part))] for name, part in _PARTS.items()}
    return {name: round(value, 3) for name, value in at.items()} | {"n": len(ordered)}


_PARTS = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
