"""exec `true` round trip through SDK and gateway, alone and by one async client over 64 sandboxes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from libdsec import AsyncClient, AsyncSandbox

from tests.bench.bench_create import SPEC
from tests.bench.live import live, percentiles


def run(bench: Any) -> dict[str, Any]:
    """Both series in one run."""
    with live(bench.data("exec"), images=bench.images) as machine:
        return asyncio.run(_measure(bench, machine))


async def _measure(bench: Any, machine: Any) -> dict[str, Any]:
    async with AsyncClient(machine.endpoint, machine.key) as client:
        # half a core each: a quarter is throttled by the kernel at the rate of one caller, and measures that
        wanted = SPEC | {"cpus": 0.5}
        group = await AsyncSandbox.create_many(bench.size(64, 16), bench.image, client=client, **wanted)
        async with group:
            alone = await _alone(group[0], bench.size(1000, 100))
            before = machine.cpu_s()
            count = bench.size(10_000, 800)
            rate = await _many(list(group), count)
            used = {role: round((after - before[role]) * 1000 / count, 3) for role, after in machine.cpu_s().items()}
    return {
        "exec_true_ms": percentiles(alone),
        "sandboxes": len(group),
        "exec_per_s": round(rate, 1),
        "cpu_ms_per_exec": used,
    }


async def _alone(sandbox: AsyncSandbox, count: int) -> list[float]:
    series = []
    for _ in range(count):
        began = time.perf_counter()
        result = await sandbox.exec(["true"])
        series.append((time.perf_counter() - began) * 1000)
        assert result.exit_code == 0
    return series


async def _many(sandboxes: list[AsyncSandbox], count: int) -> float:
    left = iter(range(count))

    async def work(sandbox: AsyncSandbox) -> None:
        for _ in left:
            result = await sandbox.exec(["true"])
            assert result.exit_code == 0

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for sandbox in sandboxes:
            tasks.create_task(work(sandbox))
    return count / (time.perf_counter() - began)
