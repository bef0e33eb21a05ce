"""Tasks and grants of one node daemon over its Unix socket, and a log collector that can be slow, stuck or gone."""

from __future__ import annotations

import asyncio
import itertools
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
from libdsec.wire_tasks import task_key

from tests.kit.node_daemon import Reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.kit.node_daemon import NodeDaemon

_numbers = itertools.count(1)


class Collector:
    """What `nomad logmon` is for one task: makes the FIFOs, reads them on demand."""

    def __init__(self, directory: Path) -> None:
        self.logs = directory / "alloc/logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.paths = {name: self.logs / f".t.{name}.fifo" for name in ("stdout", "stderr")}
        for path in self.paths.values():
            if not path.exists():
                os.mkfifo(path, 0o600)
        self._fds = {name: os.open(path, os.O_RDONLY | os.O_NONBLOCK) for name, path in self.paths.items()}

    def read(self, name: str = "stdout") -> bytes:
        """What is there now."""
        parts = []
        while True:
            try:
                part = os.read(self._fds[name], 65536)
            except BlockingIOError:
                break
            if not part:
                break
            parts.append(part)
        return b"".join(parts)

    async def read_until(self, wanted: bytes, name: str = "stdout", *, timeout_s: float = 20.0) -> bytes:
        """Everything up to and with these bytes."""
        got = b""
        async with asyncio.timeout(timeout_s):
            while wanted not in got:
                got += self.read(name)
                await asyncio.sleep(0.02)
        return got

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


class TaskClient:
    """The driver plugins' side of the node daemon, raw."""

    def __init__(self, daemon: NodeDaemon, session: aiohttp.ClientSession) -> None:
        self.daemon = daemon
        self._session = session

    async def call(self, method: str, path: str, body: Any = None, **params: Any) -> Reply:
        async with self._session.request(method, f"http://node{path}", json=body, params=params or None) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    def new_id(self, name: str = "t") -> str:
        return f"alloc-{os.getpid()}-{next(_numbers)}/{name}/0badcafe"

    def body(self, task_id: str, *argv: str, **more: Any) -> dict[str, Any]:
        base = {
            "task_id": task_id,
            "alloc_id": task_id.partition("/")[0],
            "task_name": "t",
            "image": self.daemon.image,
            "argv": list(argv),
            "cpus": 0.5,
            "memory_mib": 64,
            "disk_mib": 16,
        }
        return base | more

    async def start(self, *argv: str, task_id: str = "", **more: Any) -> dict[str, Any]:
        task_id = task_id or self.new_id()
        return (await self.call("PUT", f"/v1/tasks/{task_key(task_id)}", self.body(task_id, *argv, **more))).ok()

    async def wait(self, key: str, kind: str = "tasks", timeout_s: float = 20.0) -> dict[str, Any]:
        info = (await self.call("GET", f"/v1/{kind}/{key}/wait", timeout_s=timeout_s)).ok()
        assert info.get("state") == "exited", info
        return info

    async def stop(self, key: str, timeout_s: float = 5.0, signal: int = 15, kind: str = "tasks") -> dict[str, Any]:
        return (await self.call("POST", f"/v1/{kind}/{key}/stop", {"timeout_s": timeout_s, "signal": signal})).ok()

    async def destroy(self, key: str, kind: str = "tasks") -> None:
        (await self.call("DELETE", f"/v1/{kind}/{key}", force="1")).ok()


@asynccontextmanager
async def task_client(daemon: NodeDaemon) -> AsyncIterator[TaskClient]:
    connector = aiohttp.UnixConnector(path=str(daemon.data / "node.sock"), limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=90)) as session:
        yield TaskClient(daemon, session)
