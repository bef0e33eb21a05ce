"""A burst of containers from images that no machine has: data on demand against fetching and unpacking all of it.

The store is a directory behind an imagined line (2 ms a request, one bandwidth for all). A task reads whole
directories, about 8 % of its image. The other way is that of a registry client made as quick as it can be: no
compression, each byte written once. Page caches are dropped before both.
"""

from __future__ import annotations

import ctypes
import io
import os
import random
import resource
import shutil
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_imagefs import ImageStore, MountTable
from dsec_imagefs.blobd import BlobClient, ensure_server
from dsec_imagefs.lazy import IMAGE_SETTINGS
from dsec_imagefs.remote import Remote
from dsec_imagefs.stores.parse import parse_store
from dsec_imagefs.syscalls import mount_fs, umount

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.bench.run import Bench

_FILE = 256 << 10
_FILES = 16  # in a directory
_EVERY = 12  # of so many directories a task reads one
_LATENCY_MS, _MIB_S = 2, 1000
_CACHESTAT = 451  # of Linux 6.5 on every architecture
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Burst:
    """What is started."""

    images: int
    containers: int
    directories: int  # an image

    @property
    def image_bytes(self) -> int:
        return self.directories * _FILES * _FILE

    @property
    def touched(self) -> list[int]:
        """Numbers of the directories a task reads."""
        return list(range(3, self.directories, _EVERY))


def run(bench: Bench) -> dict[str, Any]:
    """The same burst both ways, then a second container of each image."""
    burst = Burst(
        images=bench.size(16, 4), containers=bench.size(64, 16), directories=bench.size(256, 24)
    )  # fmt: skip
    work = bench.data("images")
    url = f"dir:{work / 'shared'}?latency_ms={_LATENCY_MS}&bandwidth_mib_s={_MIB_S}"
    (work / "shared").mkdir()
    need = 2 * burst.images * burst.image_bytes + 4 * burst.image_bytes  # the store, all unpacked, and what is in work
    free = shutil.disk_usage(work).free
    if free < need:
        raise RuntimeError(
            f"{work} has {free >> 30} GiB free; this bench takes {need >> 30} GiB: set TMPDIR or --quick"
        )
    _say(f"{burst.images} images of {burst.image_bytes >> 20} MiB, {burst.containers} containers")
    names = _publish(work, burst)
    touched = burst.images * len(burst.touched) * _FILES * _FILE
    try:
        _drop_caches()
        lazy = _lazily(work, url, names, burst)
        _say(f"on demand: all ready in {lazy['ready_s']:.1f} s")
        _drop_caches()
        whole = _whole(work, url, names, burst)
        _say(f"fetched and unpacked: all ready in {whole['ready_s']:.1f} s")
    finally:
        BlobClient(work / "node").stop()
    return {
        "images": burst.images, "containers": burst.containers, "image_mib": burst.image_bytes >> 20,
        "touched_mib": touched >> 20, "latency_ms": _LATENCY_MS, "bandwidth_mib_s": _MIB_S,
        "lazy": lazy, "whole": whole,
        "ratio_time": whole["ready_s"] / lazy["ready_s"],
        "ratio_time_server_running": whole["ready_s"] / (lazy["ready_s"] - lazy["server_start_s"]),
        "ratio_disk": lazy["disk_bytes"] / whole["disk_bytes"],
        "ratio_fetched_to_touched": lazy["fetched_bytes"] / touched,
    }  # fmt: skip


def _publish(work: Path, burst: Burst) -> list[str]:
    """Make the images and push them; each file is of its own bytes, so that nothing can be shared."""
    noise = random.Random(5).randbytes(_FILE)
    builder = ImageStore(work / "builder")
    names = []
    for image in range(burst.images):
        tar_path = work / "layer.tar"
        with tarfile.open(tar_path, "w") as tar:
            for number in range(burst.directories * _FILES):
                info = tarfile.TarInfo(f"d{number // _FILES:04}/f{number % _FILES:02}")
                info.size = _FILE
                stamp = f"{image}:{number}".encode().ljust(64)
                tar.addfile(info, io.BytesIO(stamp + noise[64:]))
        name = f"task{image}"
        made = builder.import_image(f"tar:{tar_path}", name)
        for layer in builder.layers(made):  # by a link, which a push then finds: a second copy shows nothing here
            there = work / "shared" / "objects" / layer.blob.digest[:2] / layer.blob.digest
            there.parent.mkdir(parents=True, exist_ok=True)
            os.link(builder.objects.blob(layer.blob.digest), there)
        Remote(store=builder, url=f"dir:{work / 'shared'}").push(name)
        builder.rm(name)
        names.append(f"{name}:latest")
        _say(f"published {image + 1} of {burst.images}")
    tar_path.unlink()
    return names


def _lazily(work: Path, url: str, names: list[str], burst: Burst) -> dict[str, Any]:
    store = ImageStore(work / "node")
    table = MountTable(store, work / "mounts")
    remote = Remote(store=store, url=url)
    turns = {name: threading.Lock() for name in names}

    def start(number: int) -> Path:
        name = names[number % burst.images]
        with turns[name]:
            try:
                image = store.resolve(name)
            except Exception:  # the first container of an image brings its metadata
                image = remote.pull(name)
        return table.acquire(image.digest, f"c{number}")

    try:
        before = _disk(work / "node")
        began = time.monotonic()
        ensure_server(store.root, IMAGE_SETTINGS)  # once a host; it counts, and is also told apart
        server_s = time.monotonic() - began
        took, cpu_s = _all_ready(work, burst, start)
        stats = BlobClient(store.root).stats()
        fetched = sum(row["present_bytes"] for row in stats["blobs"])
        cached = _cached(table, store, names, burst)
        again, _ = _all_ready(work, burst, start)
        after = BlobClient(store.root).stats()
        result = {
            "ready_s": server_s + took, "server_start_s": server_s, "cpu_s": cpu_s,
            "fetched_bytes": fetched, "disk_bytes": _disk(work / "node") - before,
            "metadata_bytes": _disk(work / "node" / "objects"),
            "second": {
                "ready_s": again,
                "fetched_bytes": sum(row["present_bytes"] for row in after["blobs"]) - fetched,
                "server_reads": after["counters"]["reads"] - stats["counters"]["reads"],
                "page_cache_mib": (_cached(table, store, names, burst) - cached) / (1 << 20),
            },
            "page_cache_mib": cached / (1 << 20),
        }  # fmt: skip
    finally:
        table.retain_only(set())
        table.close()
    return result


def _whole(work: Path, url: str, names: list[str], burst: Burst) -> dict[str, Any]:
    """Fetch an image's data in order and write its files, then start its containers from the directory."""
    there = parse_store(url)
    root = work / "unpacked"
    done: dict[str, threading.Event] = {}
    turn = threading.Lock()

    def fetch(name: str) -> None:
        store = ImageStore(work / "builder")
        image = Remote(store=store, url=url).pull(name)  # for the digest of its data only
        (layer,) = store.layers(image)
        deadline = time.monotonic() + 3600
        for directory in range(burst.directories):
            folder = root / name.partition(":")[0] / f"d{directory:04}"
            folder.mkdir(parents=True)
            data = there.read(layer.wire.digest, directory * _FILES * _FILE, _FILES * _FILE, deadline=deadline)
            for number in range(_FILES):
                (folder / f"f{number:02}").write_bytes(data[number * _FILE : (number + 1) * _FILE])
        os.sync()

    def start(number: int) -> Path:
        name = names[number % burst.images]
        with turn:
            first = name not in done
            event = done.setdefault(name, threading.Event())
        if first:
            fetch(name)
            event.set()
        event.wait(3600)
        return root / name.partition(":")[0]

    took, cpu_s = _all_ready(work, burst, start)
    disk = _disk(root)
    shutil.rmtree(root)
    there.close()
    return {"ready_s": took, "cpu_s": cpu_s, "disk_bytes": disk}


def _all_ready(work: Path, burst: Burst, start: Callable[[int], Path]) -> tuple[float, float]:
    """Start all at once, each with a writable layer and reading what a task reads; seconds until the last is done."""

    def one(number: int) -> None:
        lower = start(number)
        place = work / "c" / str(number)
        for part in ("upper", "work", "root"):
            (place / part).mkdir(parents=True)
        options = f"lowerdir={lower},upperdir={place / 'upper'},workdir={place / 'work'}"
        mount_fs("overlay", place / "root", "overlay", 0, options)
        try:
            for directory in burst.touched:
                for path in sorted((place / "root" / f"d{directory:04}").iterdir()):
                    assert len(path.read_bytes()) == _FILE
        finally:
            umount(place / "root")

    used = resource.getrusage(resource.RUSAGE_SELF)
    began = time.monotonic()
    try:
        with ThreadPoolExecutor(burst.containers) as pool:
            list(pool.map(one, range(burst.containers)))
        took = time.monotonic() - began
    finally:
        shutil.rmtree(work / "c", ignore_errors=True)
    now = resource.getrusage(resource.RUSAGE_SELF)
    return took, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def _disk(path: Path) -> int:
    """Bytes on disk below a directory, not on other file systems."""
    if not path.exists():
        return 0
    device = path.stat().st_dev
    total = 0
    for folder, names, files in os.walk(path):
        names[:] = [name for name in names if os.lstat(os.path.join(folder, name)).st_dev == device]
        total += sum(os.lstat(os.path.join(folder, name)).st_blocks * 512 for name in files)
    return total


def _cached(table: MountTable, store: ImageStore, names: list[str], burst: Burst) -> int:
    """Bytes of the page cache that belong to these images: files in their mounts, and the files of the node's store.

    What other programs of the machine cache meanwhile is not in it, as it would be in /proc/meminfo.
    """
    total = 0
    for name in names:
        digest = store.resolve(name).digest
        root = table.acquire(digest, "count")
        folders = (root / f"d{number:04}" for number in burst.touched)
        total += sum(_resident(path) for folder in folders for path in folder.iterdir())
        table.release(digest, "count")
    for folder, _, files in os.walk(store.root):
        if os.lstat(folder).st_dev == store.root.stat().st_dev:
            paths = (Path(folder, name) for name in files)
            total += sum(_resident(path) for path in paths if path.is_file())  # no sockets
    return total


def _resident(path: Path) -> int:
    """Bytes of a regular file in the page cache: cachestat(2)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        span, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
        if _libc.syscall(_CACHESTAT, fd, span, found, 0):
            raise OSError(ctypes.get_errno(), "cachestat", str(path))
        return found[0] * _PAGE
    finally:
        os.close(fd)


def _say(text: str) -> None:
    """A line of progress, on stderr: stdout is the report."""
    print(f"{time.strftime('%H:%M:%S')} images: {text}", file=sys.stderr, flush=True)


def _drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")
