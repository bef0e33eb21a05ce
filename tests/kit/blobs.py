"""Blobs with their indexes in a directory store, and a blob server whose store can be told to misbehave."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_imagefs.blobd import BlobClient, BlobSpec, Settings, ensure_server
from dsec_imagefs.layer.index import Index
from dsec_imagefs.stores.directory import DirectoryStore

from tests.kit import faulty_blobd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 64 << 10
PROGRAM = (sys.executable, "-P", faulty_blobd.__file__)


@dataclass(frozen=True)
class Blob:
    """A blob, its bytes, and how it is attached."""

    data: bytes
    spec: BlobSpec
    index: Index

    @property
    def digest(self) -> str:
        return self.spec.digest

    @property
    def blocks(self) -> int:
        return self.index.count


class Machine:
    """One store root with its server, and the directory store behind it."""

    def __init__(self, base: Path, settings: Settings) -> None:
        self.base = base
        self.root = base / "root"
        self.store = DirectoryStore(root=base / "store")
        self.settings = settings
        self.client = BlobClient(self.root)
        (base / "objects").mkdir(parents=True, exist_ok=True)
        self.mode("ok")

    def start(self) -> BlobClient:
        """Find or start the server."""
        self.client = ensure_server(self.root, self.settings, argv=PROGRAM)
        return self.client

    def mode(self, text: str) -> None:
        """What the store does from now on: see tests/kit/faulty_blobd.py."""
        path = self.base / faulty_blobd.MODE_FILE
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)

    def blob(self, size: int, *, seed: int = 1, data: bytes | None = None, block: int = BLOCK) -> Blob:
        """Publish a blob in the store."""
        data = random.Random(seed).randbytes(size) if data is None else data
        digest = hashlib.sha256(data).hexdigest()
        path = self.base / "raw"
        path.write_bytes(data)
        self.store.put(digest, path, deadline=time.monotonic() + 60)
        parts = [data[at : at + block] for at in range(0, len(data), block)]
        blocks = [
            (hashlib.sha256(part).digest(), n * block, len(part) if any(part) else 0) for n, part in enumerate(parts)
        ]
        index = Index.of(blocks, block_bytes=block, blob_size=len(data), encoding="raw")
        raw = index.render()
        index_path = self.base / "objects" / hashlib.sha256(raw).hexdigest()
        index_path.write_bytes(raw)
        spec = BlobSpec(digest=digest, size=len(data), index=str(index_path), store=f"dir:{self.base / 'store'}")
        return Blob(data=data, spec=spec, index=index)

    def attach(self, blob: Blob) -> Path:
        """Its direct file."""
        return Path(self.client.attach(blob.spec)["direct"])

    def local(self, blob: Blob) -> Path:
        """The server's data file."""
        return self.root / "blobs" / blob.digest

    def counters(self) -> dict[str, int]:
        return self.client.stats()["counters"]

    def row(self, blob: Blob) -> dict:
        return next(row for row in self.client.stats()["blobs"] if row["digest"] == blob.digest)

    def settle(self) -> None:
        """Wait until what was fetched is kept too."""
        wait_for(lambda: self.client.stats()["gauges"]["flights"] == 0)

    def kill_worker(self) -> int:
        """SIGKILL, and wait until another one answers; returns its pid."""
        pid = self.client.status()["worker_pid"]
        os.kill(pid, signal.SIGKILL)
        return self.other_than(pid)

    def other_than(self, pid: int) -> int:
        """Wait for a worker that is not this one."""
        deadline = time.monotonic() + 20
        while (now := self.client.status()["worker_pid"]) == pid:
            assert time.monotonic() < deadline, "no other worker came"
            time.sleep(0.02)
        return now

    def kill_both(self) -> None:
        """SIGKILL to supervisor and worker at one instant: neither may see the other die."""
        status = self.client.status()
        pids = [status["supervisor_pid"], status["worker_pid"]]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while self.client.is_running():
            assert time.monotonic() < deadline, "the lock is still held"
            time.sleep(0.02)


@contextmanager
def blob_machine(base: Path, settings: Settings | None = None) -> Iterator[Machine]:
    """A machine whose server is gone afterwards, its mount too."""
    machine = Machine(base, settings or Settings(sync_s=0.1, fetchers=8))
    try:
        machine.start()
        yield machine
    finally:
        machine.client.stop()


def read_at(path: Path, offset: int, length: int) -> bytes:
    """Some bytes of a file, through a descriptor of its own."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


def read_in_thread(path: Path, offset: int, length: int) -> Future[bytes]:
    """The same, by a reader that may have to wait."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(read_at, path, offset, length)
    pool.shutdown(wait=False)
    return future


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.02)
