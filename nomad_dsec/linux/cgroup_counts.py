"""The running counts of a cgroup, read from whichever version of the interface has them."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from nomad_dsec.linux.cgroup_files import UNIFIED, Layout, parse_keyed, path_of, read_file
from nomad_dsec.linux.syscalls import SyscallError

if TYPE_CHECKING:
    from collections.abc import Mapping


def oom_file(layout: Layout, paths: Mapping[str, str]) -> str:
    """Where OOM kills are counted: memory.events on v2, memory.oom_control on v1 (4.13); "" when nothing does."""
    directory = path_of(layout, paths, "memory")
    name = "memory.events" if "memory" in layout.v2 else "memory.oom_control"
    return f"{directory}/{name}" if directory else ""


def oom_kills(layout: Layout, paths: Mapping[str, str]) -> int:
    """Processes that the kernel killed for memory."""
    file = oom_file(layout, paths)
    return parse_keyed(_read(file)).get("oom_kill", 0) if file else 0


def read_counts(layout: Layout, paths: Mapping[str, str]) -> dict[str, int]:
    """oom_kill, memory, memory_peak (bytes), pids, pids_max (refused forks), cpu_us. A file this kernel lacks is 0."""
    v2_memory = "memory" in layout.v2
    counts = {
        "oom_kill": oom_kills(layout, paths),
        "memory": _number(layout, paths, "memory", "memory.current" if v2_memory else "memory.usage_in_bytes"),
        "memory_peak": _number(layout, paths, "memory", "memory.peak" if v2_memory else "memory.max_usage_in_bytes"),
        "pids": _number(layout, paths, "pids", "pids.current"),
        "pids_max": parse_keyed(_text(layout, paths, "pids", "pids.events")).get("max", 0),
    }
    if UNIFIED in paths:  # cpu.stat has the usage even where the cpu controller is bound to v1
        counts["cpu_us"] = parse_keyed(_read(f"{paths[UNIFIED]}/cpu.stat")).get("usage_usec", 0)
    else:
        counts["cpu_us"] = _number(layout, paths, "cpuacct", "cpuacct.usage") // 1000
    return counts


def _number(layout: Layout, paths: Mapping[str, str], controller: str, name: str) -> int:
    text = _text(layout, paths, controller, name)
    return int(text) if text else 0


def _text(layout: Layout, paths: Mapping[str, str], controller: str, name: str) -> str:
    directory = path_of(layout, paths, controller)
    return _read(f"{directory}/{name}").strip() if directory else ""


def _read(path: str) -> str:
    try:
        return read_file(path)
    except SyscallError as error:
        if error.errno == errno.ENOENT:
            return ""
        raise
