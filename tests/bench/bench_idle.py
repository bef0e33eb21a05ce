"""Memory of idle sandboxes and how many stand at once, still answering execs.

Measured as the fall of MemAvailable over the whole machine divided by the count; the image was read before, so its page
cache is not in it, but kernel memory (cgroups, namespaces, mounts, sockets) and our daemons' growth are.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from libdsec import AsyncClient, AsyncSandbox

from tests.bench.bench_create import SPEC
from tests.bench.live import live, percentiles

BATCH = 50
#: Idle sandboxes promise more than they use: by default a node promises 16 times its cores and 4 times its memory.
SETTINGS = {"DSEC_NODE_CPU_OVERCOMMIT": "1000", "DSEC_NODE_MEMORY_OVERCOMMIT": "100", "DSEC_NODE_SANDBOXES_MAX": "3300"}


def available_kib() -> int:
    """MemAvailable of the machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1])
    raise RuntimeError("no MemAvailable")


def run(bench: Any) -> dict[str, Any]:
    """As many as asked for, then some execs, then all killed."""
    with live(bench.data("idle"), images=bench.images, timeout_s=600, settings=SETTINGS) as machine:
        return asyncio.run(_measure(bench, machine))


async def _measure(bench: Any, machine: Any) -> dict[str, Any]:
    count = bench.size(3200, 200)
    async with AsyncClient(machine.endpoint, machine.key) as client:
        async with await AsyncSandbox.create(bench.image, client=client, **SPEC) as first:
            await first.exec(["true"])
        await asyncio.sleep(2)
        before, daemons = available_kib(), machine.footprint()
        began = time.perf_counter()
        groups = [
            await AsyncSandbox.create_many(BATCH, bench.image, client=client, **SPEC) for _ in range(count // BATCH)
        ]
        took_s = time.perf_counter() - began
        await asyncio.sleep(2)
        each = (before - available_kib()) / count
        answers = []
        for group in groups:
            start = time.perf_counter()
            result = await group[0].exec(["echo", "here"])
            answers.append((time.perf_counter() - start) * 1000)
            assert result.stdout == "here\n"
        after = machine.footprint()
        for group in groups:
            await group.kill()
    return {
        "at_once": count,
        "creates_per_s": round(count / took_s, 1),
        "kib_each": round(each, 1),
        "exec_ms_at_full": percentiles(answers),
        "daemons_before": daemons,
        "daemons_at_full": after,
    }
