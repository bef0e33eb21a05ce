"""The blob server from a directory store on this machine: reads of partial and complete blobs, cold and warm.

Times are of one run on a machine that may be shared; so each is also given as a ratio to the same bytes read, hashed
and written by a plain loop, and the random reads also as CPU time of the server.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_imagefs.blobd import BlobClient, BlobSpec, Settings, ensure_server
from dsec_imagefs.layer.index import Index
from dsec_imagefs.stores.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.bench.run import Bench

_MIB = 1 << 20
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def run(bench: Bench) -> dict[str, Any]:
    """Sequential cold, random on a partial blob whose blocks are here, random on a complete one, warm."""
    base = bench.data("blobd")
    size, reads = bench.size(1024, 128) * _MIB, bench.size(20_000, 4_000)
    spec = _publish(base, size)
    client = ensure_server(base / "root", Settings(cache_bytes=4 * size, pinned_share=0))
    try:
        floor_s = _plain_loop(base / "store", spec, base / "floor")
        floor_all_s = _plain_loop(base / "store", spec, base / "floor-all", threads=os.cpu_count() or 1)
        hash_s = _hash_only()
        path = Path(client.attach(spec)["direct"])
        cold_s, cold_cpu_s = _timed(client, lambda: _read_all(path))
        time.sleep(3)  # until what was fetched is synced: that is no part of a read
        offsets = [random.Random(1).randrange(size // 4096) * 4096 for _ in range(reads)]
        partial = _random(client, path, offsets)
        client.stop()
        client = ensure_server(base / "root", Settings(cache_bytes=4 * size, pinned_share=1, sync_s=0.05))
        _wait_complete(client)
        complete = _random(client, path, offsets)
        warm = _random(client, path.with_suffix(".m"), offsets, rounds=2)
    finally:
        client.stop()
        shutil.rmtree(base, ignore_errors=True)
    return {
        "bytes": size,
        "cold_mb_per_s": size / cold_s / 1e6,
        "cold_cpu_ms_per_mib": cold_cpu_s * 1000 / (size / _MIB),
        "plain_mb_per_s": size / floor_s / 1e6,
        "ratio_cold_to_plain": cold_s / floor_s,
        "plain_all_cores_mb_per_s": size / floor_all_s / 1e6,
        "ratio_cold_to_plain_all_cores": cold_s / floor_all_s,
        "sha256_cpu_ms_per_mib": hash_s * 1000,
        "partial_4k": partial,
        "complete_4k": complete,
        "warm_4k": warm,
    }


def _publish(base: Path, size: int) -> BlobSpec:
    path, table, whole = base / "raw", [], hashlib.sha256()
    with path.open("wb") as file:
        for number in range(size // _MIB):
            block = os.urandom(_MIB)
            whole.update(block)
            table.append((hashlib.sha256(block).digest(), number * _MIB, _MIB))
            file.write(block)
    DirectoryStore(root=base / "store").put(whole.hexdigest(), path, deadline=time.monotonic() + 600)
    path.unlink()
    index = Index.of(table, block_bytes=_MIB, blob_size=size, encoding="raw")
    (base / "index").write_bytes(index.render())
    return BlobSpec(digest=whole.hexdigest(), size=size, index=str(base / "index"), store=f"dir:{base / 'store'}")


def _plain_loop(store: Path, spec: BlobSpec, target: Path, *, threads: int = 1) -> float:
    """What must be done in any case: read from the store, hash, write, read again. With all cores it is the floor."""
    start = time.monotonic()
    source = os.open(store / "objects" / spec.digest[:2] / spec.digest, os.O_RDONLY)
    out = os.open(target, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(out, spec.size)

    def turn(number: int) -> None:
        for offset in range(number * _MIB, spec.size, threads * _MIB):
            block = os.pread(source, _MIB, offset)
            hashlib.sha256(block).digest()
            os.pwrite(out, block, offset)
            os.pread(out, _MIB, offset)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(turn, range(threads)))
    took = time.monotonic() - start
    os.close(source)
    os.close(out)
    target.unlink()
    return took


def _hash_only() -> float:
    """CPU seconds that sha256 of 1 MiB takes here."""
    block, start = os.urandom(_MIB), time.thread_time()
    for _ in range(64):
        hashlib.sha256(block).digest()
    return (time.thread_time() - start) / 64


def _read_all(path: Path) -> None:
    buffer = bytearray(_MIB)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _random(client: BlobClient, path: Path, offsets: list[int], *, rounds: int = 1) -> dict[str, Any]:
    """Each offset once a round; the last round is measured."""
    took: list[float] = []
    with path.open("rb", buffering=0) as file:
        for _ in range(rounds):
            took = []
            before, cpu = client.stats()["counters"]["reads"], _cpu_s(client)
            for offset in offsets:
                start = time.perf_counter()
                os.pread(file.fileno(), 4096, offset)
                took.append(time.perf_counter() - start)
            cpu = _cpu_s(client) - cpu
        requests = client.stats()["counters"]["reads"] - before
    took.sort()
    return {
        "p50_us": took[len(took) // 2] * 1e6,
        "p99_us": took[len(took) * 99 // 100] * 1e6,
        "server_cpu_us": cpu * 1e6 / len(took),
        "requests": requests,
    }


def _timed(client: BlobClient, work: Callable[[], None]) -> tuple[float, float]:
    start, cpu = time.monotonic(), _cpu_s(client)
    work()
    return time.monotonic() - start, _cpu_s(client) - cpu


def _cpu_s(client: BlobClient) -> float:
    fields = Path(f"/proc/{client.status()['worker_pid']}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _wait_complete(client: BlobClient) -> None:
    deadline = time.monotonic() + 120
    while not client.stats()["blobs"][0]["complete"]:
        if time.monotonic() > deadline:
            raise TimeoutError("the blob does not become complete")
        time.sleep(0.05)
