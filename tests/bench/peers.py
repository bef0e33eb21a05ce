"""The yardsticks of the same run: bare `crun run` of a tiny bundle, and `docker run` where an engine answers."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def make_bundle(directory: Path, root: Path) -> Path:
    """A bundle by crun's own defaults whose process is `true`, on a read-only root directory."""
    bundle = directory / "bundle"
    bundle.mkdir(parents=True, exist_ok=True)
    if not (bundle / "config.json").exists():
        subprocess.run(["crun", "spec"], cwd=bundle, check=True, timeout=20)
    config: dict[str, Any] = json.loads((bundle / "config.json").read_text())
    config["process"].update(terminal=False, args=["/bin/true"])
    config["root"] = {"path": str(root), "readonly": True}
    (bundle / "config.json").write_text(json.dumps(config))
    return bundle


async def crun_run(bundle: Path) -> float:
    """Seconds for one create, start, end and delete."""
    began = time.perf_counter()
    child = await asyncio.create_subprocess_exec(
        "crun", "run", "--bundle", str(bundle), f"bench-{uuid.uuid4().hex[:12]}", stdin=asyncio.subprocess.DEVNULL
    )
    code = await asyncio.wait_for(child.wait(), 60)
    if code != 0:
        raise RuntimeError(f"crun ended with {code}")
    return time.perf_counter() - began


async def crun_series(bundle: Path, *, count: int, workers: int) -> tuple[list[float], float]:
    """Milliseconds of each run and runs a second with so many workers."""
    series: list[float] = []

    async def work(times: int) -> None:
        series.extend([await crun_run(bundle) * 1000 for _ in range(times)])

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work(count // workers))
    return series, len(series) / (time.perf_counter() - began)


def has_crun() -> bool:
    """Whether the yardstick is here."""
    return shutil.which("crun") is not None
