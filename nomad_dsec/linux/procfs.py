"""What /proc tells about processes and the host: pure parsers, and thin readers around them (proc(5))."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path


def parse_start_time(stat: str) -> int:
    """Field 22 of /proc/PID/stat, in clock ticks since boot; the command's name may hold spaces and brackets."""
    return int(stat.rpartition(")")[2].split()[19])


def parse_status(text: str) -> dict[str, str]:
    """/proc/PID/status as a mapping of its keys to their text."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields[key] = value.strip()
    return fields


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    amounts: dict[str, int] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        amounts[key] = int(number) * (1024 if unit == "kB" else 1)
    return amounts


def start_time(pid: int) -> int | None:
    """When the process began, in clock ticks since boot: with the pid and the boot id it names a process for good."""
    try:
        return parse_start_time(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None


def status(pid: int) -> dict[str, str] | None:
    """/proc/PID/status, or None when there is no such process."""
    try:
        return parse_status(Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return None


@lru_cache(maxsize=1)
def boot_id() -> str:
    """The kernel's name for this boot: a handle from another boot describes nothing that lives."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def read_sysctl(name: str) -> str | None:
    """A sysctl by its dotted name, None where the kernel has no such knob."""
    try:
        return Path("/proc/sys", *name.split(".")).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, PermissionError):
        return None


def is_filesystem_known(name: str) -> bool:
    """True when the kernel lists the file system as available now (a module may still bring it later)."""
    lines = Path("/proc/filesystems").read_text(encoding="ascii").splitlines()
    return any(line.split()[-1] == name for line in lines if line.strip())
