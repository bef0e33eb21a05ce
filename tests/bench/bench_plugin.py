"""The task drivers: handshake quiet and under load, idle memory, a stop while a thousand streams are held, and, where
`nomad` is on PATH, allocations a second through single-task drivers against sandboxes a second through the pool's path.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dsec_plugins import install
from dsec_plugins.proto import driver_pb2 as pb

from tests.bench.live import _cpu_s, _footprint, percentiles
from tests.kit.driverhost import driver_host
from tests.kit.node_daemon import NodeDaemon
from tests.kit.nomad_agent import job, nomad_version
from tests.kit.pluginhost import launched
from tests.system.nomad.conftest import start_cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.kit.driverhost import DriverHost
    from tests.system.nomad.conftest import Cluster

STREAMS = 500
BUSY_A_CORE = 2  # a loaded machine
HOGS_A_CORE = 8  # P28: one that is far beyond it
SLEEP = ("sleep", "100000")
# More tasks are held than a small machine has cores: the room must not be what this bench runs out of.
ROOM = ("--cpu-overcommit", "1000", "--memory-overcommit", "100")


def run(bench: Any) -> dict[str, Any]:
    """The plugin alone, then under an agent."""
    result = asyncio.run(_plugin(bench))
    if shutil.which("nomad"):
        result["nomad"] = _nomad(bench)
    return result


async def _plugin(bench: Any) -> dict[str, Any]:
    directory = bench.data("plugin")
    daemon = NodeDaemon(directory, backend="container", flags=ROOM)
    daemon.start()
    try:
        quiet = await _handshakes(directory, bench.size(30, 8))
        with hogs(BUSY_A_CORE * (os.cpu_count() or 1)):
            busy = await _handshakes(directory, bench.size(30, 8))
        with hogs(HOGS_A_CORE * (os.cpu_count() or 1)):
            loaded = await _handshakes(directory, bench.size(10, 4))
        async with driver_host(daemon, directory) as host:
            await asyncio.sleep(1)
            idle = _footprint(host.plugin.process.pid)
            held = await _stops(host, bench.size(100, 30))
    finally:
        daemon.remove()
    handshakes = {"handshake_ms": quiet, "handshake_busy_ms": busy, "handshake_loaded_ms": loaded}
    return handshakes | {"idle": idle, "held": held}


async def _handshakes(directory: Path, count: int) -> dict[str, float]:
    """From exec to the line on stdout and a channel, in ms; the CPU that it took."""
    (entry,) = install.install(directory / "plugins", names=("dsec-container",))
    took, cpu_s = [], 0.0
    for _ in range(count):
        began = time.perf_counter()
        async with launched([str(entry)]) as plugin:
            took.append((time.perf_counter() - began) * 1000)
            cpu_s += _cpu_s(plugin.process.pid)
    return percentiles(took) | {"cpu_ms_each": round(cpu_s / count * 1000)}


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Processes that do nothing but compute."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
        for one in running:
            one.wait()


async def _stops(host: DriverHost, count: int) -> dict[str, Any]:
    """StopTask of `count` tasks, one after another, while waits and stats of others are open."""
    held = [host.task(*SLEEP) for _ in range(8)]
    stopped = [host.task(*SLEEP) for _ in range(count)]
    for task in (*held, *stopped):
        await host.start(task)
    ids = [task.id for task in held]
    waits = [host.driver.WaitTask(pb.WaitTaskRequest(task_id=ids[n % len(ids)])) for n in range(STREAMS)]
    streams = []
    for number in range(STREAMS):
        request = pb.TaskStatsRequest(task_id=ids[number % len(ids)])
        request.collection_interval.FromSeconds(1)
        streams.append(host.driver.TaskStats(request))
    reading = [asyncio.ensure_future(_read(stream)) for stream in streams]
    waiting = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.sleep(3)
    pid, began = host.plugin.process.pid, time.perf_counter()
    cpu = _cpu_s(pid)
    took = []
    for task in stopped:
        start = time.perf_counter()
        await host.stop(task.id, 0)
        took.append((time.perf_counter() - start) * 1000)
    used = _cpu_s(pid) - cpu
    full = _footprint(pid)
    still = sum(not wait.done() for wait in waiting)
    for stream in streams:
        stream.cancel()
    for task in (*held, *stopped):
        await host.destroy(task.id)
    await asyncio.gather(*waiting, *reading, return_exceptions=True)
    return {
        "waits": still,
        "stats_streams": len(streams),
        "stop_ms": percentiles(took),
        "plugin_cpu_share": round(used / (time.perf_counter() - began), 3),
        "plugin": full,
    }


async def _read(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


def _nomad(bench: Any) -> dict[str, Any]:
    """One agent, one node daemon; all rates by wall time in one run, so only their ratios are worth much."""
    count = bench.size(100, 30)
    cluster = start_cluster(bench.data("nomad"))
    try:
        container = _allocations(cluster, "dsec-container", {"image": "small", "command": "id"}, count)
        calls = _allocations(cluster, "dsec-fncall", {"image": "small", "args": ["id"]}, count)
        pool = job("pool", driver="dsec-pool", kind="service", config={"cpus": 64.0, "memory_mib": 65536})
        cluster.agent.run(pool)
        cluster.agent.wait_task("pool", "running")
        sandboxes = asyncio.run(_pool_path(cluster, count * 4))
        cluster.agent.purge("pool")
    finally:
        cluster.agent.clean()
        cluster.node.remove()
    return {
        "version": ".".join(str(part) for part in nomad_version()),
        "container_allocs_per_s": container,
        "fncall_allocs_per_s": calls,
        "pool_sandboxes_per_s": sandboxes,
        "pool_to_container": round(sandboxes / container, 1),
    }


def _allocations(cluster: Cluster, driver: str, config: dict[str, Any], count: int) -> float:
    """Dispatched at once, until the last has ended."""
    agent, name = cluster.agent, f"bench-{driver}"
    logs = {"LogConfig": {"MaxFiles": 1, "MaxFileSizeMB": 1}}
    more = {"ParameterizedJob": {"Payload": "optional"}}
    agent.run(job(name, driver=driver, config=config, cpu=20, memory_mib=32, more=more, task=logs))
    began = time.perf_counter()
    children = [
        agent.get(f"/v1/job/{name}/dispatch", "PUT", {})["DispatchedJobID"].replace("/", "%2F") for _ in range(count)
    ]
    for child in children:
        agent.wait_task(child, "dead", timeout_s=300)
    rate = count / (time.perf_counter() - began)
    agent.purge(*children)
    return round(rate, 2)


async def _pool_path(cluster: Cluster, count: int) -> float:
    """Create, one command, kill; eight at a time."""
    left = iter(range(count))
    async with cluster.node.client() as client:

        async def worker() -> None:
            for _ in left:
                (info,) = await client.create()
                await client.exec(info["id"], ["id"])
                await client.call("DELETE", f"/v1/sandboxes/{info['id']}")

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(8)))
        return round(count / (time.perf_counter() - began), 1)
