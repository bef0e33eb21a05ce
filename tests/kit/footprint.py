"""What processes of ours hold while something runs: resident memory sampled at short steps, descriptors."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

STEP_S = 0.05


def rss_mib(pid: int) -> float:
    """Anonymous resident memory: what the process itself keeps, without mapped files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0  # it is ending: a zombie has no memory


def open_files(pid: int) -> int:
    """Descriptors that it has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@dataclass(slots=True)
class Footprint:
    """Of each process by its role: MiB before, and how many more it had at its highest."""

    pids: Mapping[str, int]
    before: dict[str, float] = field(default_factory=dict)
    growth: dict[str, float] = field(default_factory=dict)

    def sample(self) -> None:
        """Look once."""
        for role, pid in self.pids.items():
            with suppress(OSError):
                now = rss_mib(pid)
                self.before.setdefault(role, now)
                self.growth[role] = max(self.growth.get(role, 0.0), now - self.before[role])

    def __str__(self) -> str:
        rows = (f"{role} {self.before[role]:.0f}+{self.growth[role]:.1f} MiB" for role in self.before)
        return ", ".join(rows)


@asynccontextmanager
async def watched(pids: Mapping[str, int]) -> AsyncIterator[Footprint]:
    """Sample these processes while the block runs."""
    seen = Footprint(pids)
    seen.sample()

    async def sampling() -> None:
        while True:
            await asyncio.sleep(STEP_S)
            seen.sample()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(sampling())
        try:
            yield seen
        finally:
            task.cancel()
            seen.sample()


def init_of(marker: str) -> int:
    """PID 1 of the sandbox in which a process has `marker` in its command line, as the host counts."""
    spaces = {_pid_namespace(pid) for pid in _pids() if marker.encode() in _command_line(pid)}
    spaces -= {"", _pid_namespace(os.getpid())}
    found = [pid for pid in _pids() if _pid_namespace(pid) in spaces and _inner_pid(pid) == 1]
    if len(found) != 1:
        raise AssertionError(f"{len(found)} init processes for {marker!r}")
    return found[0]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _pid_namespace(pid: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _inner_pid(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0
