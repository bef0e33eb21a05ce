"""Thousands of create and kill cycles: descriptors, threads, memory, mounts, cgroups and links stay flat."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from libdsec import AsyncClient

from tests.bench.bench_create import sustained
from tests.bench.live import live


def counts() -> dict[str, int]:
    """What the kernel holds for us now."""
    cgroups = sum(1 for path in Path("/sys/fs/cgroup").rglob("dsec-*") if path.is_dir())
    return {
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": cgroups,
        "links": len(list(Path("/sys/class/net").iterdir())),
        "processes": sum(1 for path in Path("/proc").iterdir() if path.name.isdigit()),
    }


def run(bench: Any) -> dict[str, Any]:
    """A row after each tenth."""
    with live(bench.data("cycles"), images=bench.images) as machine:
        return asyncio.run(_measure(bench, machine))


async def _measure(bench: Any, machine: Any) -> dict[str, Any]:
    tenth = bench.size(1000, 50)
    rows = []
    async with AsyncClient(machine.endpoint, machine.key) as client:
        await sustained(client, bench.image, callers=16, count=tenth)
        for _ in range(10):
            rate = await sustained(client, bench.image, callers=16, count=tenth)
            rows.append({"rate": round(rate, 1)} | counts() | {"daemons": machine.footprint()})
    return {"cycles": tenth * 11, "rows": rows}
