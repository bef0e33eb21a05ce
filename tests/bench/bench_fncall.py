"""Stateless calls, SDK to SDK, everything on: latency alone, rates, spinners, and a long run whose counts stay flat.

The yardstick is `docker run --rm` of the same run where an engine answers, and bare `crun run` where crun is.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

from libdsec import AsyncClient, AsyncFnCall
from libdsec.wire_fncall import FnLimits

from tests.bench import peers
from tests.bench.bench_cycles import counts
from tests.bench.docker_engine import docker
from tests.bench.live import live, percentiles

if TYPE_CHECKING:
    from tests.bench.run import Bench

PYTHON = "print(1)"
CPP = '#include <cstdio>\nint main() { std::puts("1"); }\n'
CALLERS = 32
SPIN_CPU_S = 2.0


async def alone(client: AsyncClient, image: str, code: str, language: str, count: int) -> list[float]:
    """Milliseconds of calls one after the other."""
    series = []
    for _ in range(count):
        began = time.perf_counter()
        result = await AsyncFnCall.run(code, image=image, language=language, client=client)
        series.append((time.perf_counter() - began) * 1000)
        assert result.stdout == "1\n", result
    return series


async def rate(client: AsyncClient, image: str, code: str, language: str, count: int) -> float:
    """Calls a second with CALLERS in flight."""
    requests = (AsyncFnCall.request(code, image=image, language=language) for _ in range(count))
    began = time.perf_counter()
    async for outcome in AsyncFnCall.run_many(requests, in_flight=CALLERS, client=client):
        assert outcome.get().stdout_bytes == b"1\n"
    return count / (time.perf_counter() - began)


async def spinners(client: AsyncClient, image: str) -> dict[str, Any]:
    """Twice as many spinning programs as cores: when each was judged, and how long the gateway took to answer."""
    limits = FnLimits(cpu_s=SPIN_CPU_S, wall_s=SPIN_CPU_S)
    number = 2 * (os.cpu_count() or 1)
    answers: list[float] = []

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await client.nodes()
            answers.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(0.05)

    watcher = asyncio.create_task(watch())
    spin = "while True: pass"
    requests = [AsyncFnCall.request(spin, image=image, language="python", limits=limits) for _ in range(number)]
    results = [outcome.get() async for outcome in AsyncFnCall.run_many(requests, in_flight=number, client=client)]
    watcher.cancel()
    return {
        "programs": number,
        "limit_s": SPIN_CPU_S,
        "verdicts": sorted({result.verdict for result in results}),
        "longest_wall_s": round(max(result.wall_s for result in results), 3),
        "daemon_answers_ms": percentiles(answers),
    }


async def long_run(client: AsyncClient, machine: Any, image: str, tenth: int) -> list[dict[str, Any]]:
    """A row after each tenth."""
    rows = []
    for _ in range(10):
        found = await rate(client, image, PYTHON, "python", tenth)
        rows.append({"rate": round(found, 1)} | counts() | {"daemons": machine.footprint()})
    return rows


def run(bench: Bench) -> dict[str, Any]:
    """All of it in one run."""
    with live(bench.data("fncall"), images=bench.images) as machine:
        result = asyncio.run(_measure(bench, machine))
    return result | _peers(bench, result["python_per_s"])


async def _measure(bench: Bench, machine: Any) -> dict[str, Any]:
    image, result = bench.image, dict[str, Any]()
    count = bench.size(4000, 400)
    async with AsyncClient(machine.endpoint, machine.key) as client:
        for name, code, language in (("python", PYTHON, "python"), ("cpp_cached", CPP, "cpp")):
            await rate(client, image, code, language, 2 * CALLERS)  # warm: lanes started, the compile in the cache
            result[f"{name}_ms"] = percentiles(await alone(client, image, code, language, bench.size(500, 50)))
            before = machine.cpu_s()
            result[f"{name}_per_s"] = round(await rate(client, image, code, language, count), 1)
            used = {role: round((after - before[role]) * 1000 / count, 3) for role, after in machine.cpu_s().items()}
            result[f"{name}_cpu_ms_per_call"] = used
        result["spinners"] = await spinners(client, image)
        tenth = bench.size(10_000, 100)
        result["calls"] = tenth * 10
        result["rows"] = await long_run(client, machine, image, tenth)
    return result


def _peers(bench: Bench, ours_per_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with bench.mounted_root() as root, docker(bench.data("docker"), root) as engine:
        if engine is not None:
            program = ("python3", "-c", PYTHON)
            _, docker_per_s = peers.docker_series(engine, *program, count=bench.size(40, 10), workers=2)
            found["docker_run_per_s_2"] = round(docker_per_s, 2)
            found["ratio_to_docker_run"] = round(ours_per_s / docker_per_s, 1)
    if peers.has_crun():
        with bench.mounted_root() as root:
            bundle = peers.make_bundle(bench.data("crun"), root)
            _, crun_per_s = peers.crun_series(bundle, count=bench.size(200, 40), workers=2)
        found["crun_run_per_s_2"] = round(crun_per_s, 1)
        found["ratio_to_crun_run"] = round(ours_per_s / crun_per_s, 2)
    return found
