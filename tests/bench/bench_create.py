"""Create to ready, SDK to SDK, everything on; create+kill a second with 16 callers; against crun and `docker run`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from libdsec import AsyncClient, AsyncSandbox

from tests.bench import peers
from tests.bench.docker_engine import docker
from tests.bench.live import live, percentiles

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.run import Bench

SPEC: dict[str, Any] = {"cpus": 0.25, "memory_mib": 128, "disk_mib": 64}


async def one_at_a_time(client: AsyncClient, image: str, count: int) -> dict[str, list[float]]:
    """Milliseconds: create until ready, first exec, kill; and the node's own steps."""
    series: dict[str, list[float]] = {"create_ms": [], "first_exec_ms": [], "kill_ms": []}
    for _ in range(count):
        began = time.perf_counter()
        sandbox = await AsyncSandbox.create(image, client=client, **SPEC)
        ready = time.perf_counter()
        result = await sandbox.exec(["true"])
        done = time.perf_counter()
        assert result.exit_code == 0
        for step, took_ms in (await sandbox.info()).timings_ms.items():
            series.setdefault(f"step {step}", []).append(took_ms)
        before_kill = time.perf_counter()
        await sandbox.kill()
        series["create_ms"].append((ready - began) * 1000)
        series["first_exec_ms"].append((done - ready) * 1000)
        series["kill_ms"].append((time.perf_counter() - before_kill) * 1000)
    return series


async def sustained(client: AsyncClient, image: str, *, callers: int, count: int) -> float:
    """Creates and kills a second."""
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            sandbox = await AsyncSandbox.create(image, client=client, **SPEC)
            await sandbox.kill()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(work())
    return count / (time.perf_counter() - began)


def run(bench: Bench) -> dict[str, Any]:
    """All of it in one run."""
    with live(bench.data("create"), images=bench.images) as machine:
        result = asyncio.run(_measure(bench, machine))
    return result | _against_docker(bench, result)


async def _measure(bench: Bench, machine: Any) -> dict[str, Any]:
    singles, rounds = bench.size(200, 30), bench.size(2000, 200)
    async with AsyncClient(machine.endpoint, machine.key) as client:
        await one_at_a_time(client, bench.image, 10)  # warm: pools filled, image mounted
        series = await one_at_a_time(client, bench.image, singles)
        before = machine.cpu_s()
        rate = await sustained(client, bench.image, callers=16, count=rounds)
        used = {role: round((after - before[role]) * 1000 / rounds, 2) for role, after in machine.cpu_s().items()}
    result: dict[str, Any] = {name: percentiles(values) for name, values in series.items()}
    result["create_kill_per_s_16"] = round(rate, 1)
    result["cpu_ms_per_cycle"] = used
    if peers.has_crun():
        result |= _against_crun(bench, bench.data("crun"), series["create_ms"], rate)
    return result


def _against_docker(bench: Bench, ours: dict[str, Any]) -> dict[str, Any]:
    with bench.mounted_root() as root, docker(bench.data("docker"), root) as engine:
        if engine is None:
            return {}
        single, _ = peers.docker_series(engine, "true", count=bench.size(20, 8), workers=1)
        _, rate = peers.docker_series(engine, "true", count=bench.size(40, 10), workers=2)
    run_ms = percentiles(single)
    return {
        "docker_run_ms": run_ms,
        "docker_run_per_s_2": round(rate, 2),
        "ratio_create_p50_to_docker": round(ours["create_ms"]["p50"] / run_ms["p50"], 3),
        "ratio_rate_to_docker": round(ours["create_kill_per_s_16"] / rate, 1),
    }


def _against_crun(bench: Bench, work: Path, ours_ms: list[float], ours_rate: float) -> dict[str, Any]:
    with bench.mounted_root() as root:
        bundle = peers.make_bundle(work, root)
        single, _ = peers.crun_series(bundle, count=bench.size(100, 20), workers=1)
        _, rate = peers.crun_series(bundle, count=bench.size(400, 40), workers=2)
    crun = percentiles(single)
    return {
        "crun_run_ms": crun,
        "crun_run_per_s_2": round(rate, 1),
        "ratio_create_p50_to_crun": round(percentiles(ours_ms)["p50"] / crun["p50"], 2),
        "ratio_rate_to_crun": round(ours_rate / rate, 2),
    }
