"""The yardsticks of the same run: bare `crun run` of a tiny bundle, and `docker run` where an engine answers."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.bench.docker_engine import Docker

ROOT = Path(__file__).parents[2]


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


async def _series(bundle: Path, count: int, workers: int) -> dict[str, Any]:
    series: list[float] = []

    async def work(times: int) -> None:
        series.extend([await crun_run(bundle) * 1000 for _ in range(times)])

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work(count // workers))
    return {"ms": series, "per_s": len(series) / (time.perf_counter() - began)}


def crun_series(bundle: Path, *, count: int, workers: int) -> tuple[list[float], float]:
    """Milliseconds of each run and runs a second with so many workers.

    crun refuses a host that has controllers on a cgroup2 mount beside v1 ones, so it runs in a mount namespace in which
    that mount is not; it is started once, and costs the runs nothing.
    """
    hide = 'umount -l /sys/fs/cgroup/unified 2>/dev/null; exec "$@"'
    argv = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        hide,
        "sh",
        sys.executable,
        "-m",
        "tests.bench.peers",
    ]
    done = subprocess.run(
        [*argv, str(bundle), str(count), str(workers)], check=True, timeout=600, stdout=subprocess.PIPE, cwd=ROOT
    )
    answer = json.loads(done.stdout)
    return answer["ms"], answer["per_s"]


async def _docker_series(argv: list[str], count: int, workers: int) -> tuple[list[float], float]:
    series: list[float] = []

    async def work(times: int) -> None:
        for _ in range(times):
            started = time.perf_counter()
            child = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
            )
            code = await asyncio.wait_for(child.wait(), 60)
            if code != 0:
                raise RuntimeError(f"docker run ended with {code}")
            series.append((time.perf_counter() - started) * 1000)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work(count // workers))
    return series, count / (time.perf_counter() - began)


def docker_series(docker: Docker, *program: str, count: int, workers: int) -> tuple[list[float], float]:
    """Milliseconds of each `docker run --rm` of the program, and how many a second."""
    return asyncio.run(_docker_series(docker.run(*program), count, workers))


def has_crun() -> bool:
    """Whether the yardstick is here."""
    return shutil.which("crun") is not None


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_series(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))))
