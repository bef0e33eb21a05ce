"""Numbers of the demo: how long creates and execs take, one after the other and side by side."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from libdsec.sandbox import AsyncSandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from libdsec.client import AsyncClient


@dataclass(slots=True, kw_only=True)
class Latencies:
    """Milliseconds, SDK to SDK. first_ms: the create that mounts the image. steps_ms: medians of the node's steps."""

    first_ms: float = 0.0
    create_ms: list[float] = field(default_factory=list)
    exec_ms: list[float] = field(default_factory=list)
    kill_ms: list[float] = field(default_factory=list)
    steps_ms: dict[str, float] = field(default_factory=dict)
    burst: int = 0
    burst_s: float = 0.0

    @property
    def burst_rate(self) -> float:
        """Creates a second, side by side."""
        return self.burst / self.burst_s if self.burst_s else 0.0

    @property
    def where_ms(self) -> dict[str, float]:
        """The node's steps, and the rest of the median create."""
        rest = percentile(self.create_ms, 50) - sum(self.steps_ms.values())
        return {**self.steps_ms, "gateway, SDK and HTTP": rest} if rest > 0 else dict(self.steps_ms)


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]


async def measure(
    client: AsyncClient, image: str, *, creates: int, execs: int, burst: int, moved: Callable[[], None]
) -> Latencies:
    """One create after the other, each with its share of execs; then `burst` creates sixteen at a time."""
    found = Latencies()
    timings: dict[str, list[float]] = {}
    first = await _timed_create(client, image, found)
    found.first_ms = found.create_ms.pop()
    await first.kill()
    for _ in range(creates):
        sandbox = await _timed_create(client, image, found)
        for name, took in sandbox.details.timings_ms.items():
            timings.setdefault(name, []).append(took)
        for _ in range(execs // creates):
            began = time.perf_counter()
            (await sandbox.exec(["true"])).check()
            found.exec_ms.append((time.perf_counter() - began) * 1000)
        began = time.perf_counter()
        await sandbox.kill()
        found.kill_ms.append((time.perf_counter() - began) * 1000)
        moved()
    timings.pop("start", None)  # the sum of the others
    found.steps_ms = {name: percentile(took, 50) for name, took in timings.items()}
    await _burst(client, image, burst, found, moved)
    return found


async def _timed_create(client: AsyncClient, image: str, found: Latencies) -> AsyncSandbox:
    began = time.perf_counter()
    sandbox = await AsyncSandbox.create(image, client=client, memory_mib=256, labels={"demo": "latency"})
    found.create_ms.append((time.perf_counter() - began) * 1000)
    return sandbox


async def _burst(client: AsyncClient, image: str, count: int, found: Latencies, moved: Callable[[], None]) -> None:
    gate = asyncio.Semaphore(16)

    async def one() -> None:
        async with gate:
            sandbox = await AsyncSandbox.create(image, client=client, memory_mib=256, labels={"demo": "burst"})
            await sandbox.kill()
            moved()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(one())
    found.burst, found.burst_s = count, time.perf_counter() - began


def machine_facts() -> dict[str, str]:
    """What the numbers were taken on."""
    memory = next(line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if "model name" in line]
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "cpu": models[0] if models else platform.machine(),
        "memory": f"{int(memory) / 1024 / 1024:.1f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text("utf-8", "replace").splitlines()
