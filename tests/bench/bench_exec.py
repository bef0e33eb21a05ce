"""exec `true` through SDK and gateway, alone and by one async client over 64 sandboxes; where the CPU goes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from libdsec import AsyncClient, AsyncSandbox

from tests.bench.bench_create import SPEC
from tests.bench.floor import build_nothing, start_cpu_ms
from tests.bench.live import live, percentiles

NOTHING = "/tmp/nothing"  # inside of each sandbox


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
            count = bench.size(10_000, 800)
            rate, used = await _costs(machine, group, ["true"], count)
            nothing = build_nothing(bench.work)
            async with asyncio.TaskGroup() as tasks:
                for sandbox in group:
                    tasks.create_task(sandbox.files.write(NOTHING, nothing.read_bytes(), mode=0o755))
            nothing_rate, nothing_used = await _costs(machine, group, [NOTHING], count)
    starts = bench.size(1000, 200)
    return {
        "exec_true_ms": percentiles(alone),
        "sandboxes": len(group),
        "exec_per_s": round(rate, 1),
        "cpu_ms_per_exec": used,
        "exec_nothing_per_s": round(nothing_rate, 1),
        "cpu_ms_per_exec_nothing": nothing_used,
        "cpu_ms_bare_start": {
            "true": start_cpu_ms("/bin/true", starts),
            "nothing": start_cpu_ms(str(nothing), starts),
        },
    }


async def _costs(machine: Any, group: Any, argv: list[str], count: int) -> tuple[float, dict[str, float]]:
    """Execs a second, and CPU milliseconds an exec of each of our processes, of what is inside, and of all."""
    before = machine.cpu_s()
    rate = await _many(list(group), argv, count)
    used = {role: (after - before[role]) * 1000 / count for role, after in machine.cpu_s().items()}
    return rate, {role: round(ms, 3) for role, ms in (used | {"all": sum(used.values())}).items()}


async def _alone(sandbox: AsyncSandbox, count: int) -> list[float]:
    series = []
    for _ in range(count):
        began = time.perf_counter()
        result = await sandbox.exec(["true"])
        series.append((time.perf_counter() - began) * 1000)
        assert result.exit_code == 0
    return series


async def _many(sandboxes: list[AsyncSandbox], argv: list[str], count: int) -> float:
    left = iter(range(count))

    async def work(sandbox: AsyncSandbox) -> None:
        for _ in left:
            result = await sandbox.exec(argv)
            assert result.exit_code == 0

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for sandbox in sandboxes:
            tasks.create_task(work(sandbox))
    return count / (time.perf_counter() - began)
