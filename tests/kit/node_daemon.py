"""A real node daemon as a process: start, talk, SIGKILL, start again on the same data, and remove all that is left."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from dsec_imagefs.mounts import MountTable
from dsec_imagefs.store import ImageStore

from nomad_dsec.guest.build import build
from tests.kit.abilities import missing
from tests.kit.small_image import make_tree

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
STOP_S = 60.0
CONTAINER_NEEDS = ("root", "cgroup", "erofs", "overlay", "userns", "netns", "filters")
ERROR_TEXT = 2000


class Reply:
    """Status, headers and decoded body of one answer."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert self.status >= 400, (self.status, self.body[:ERROR_TEXT])
        return self.json["error"]

    def ok(self) -> Any:
        assert self.status == 200, (self.status, self.body[:ERROR_TEXT])
        return self.json


class NodeDaemon:
    """One data directory and, most of the time, one process on it."""

    def __init__(self, directory: Path, *, backend: str = "fake", flags: tuple[str, ...] = (), token: str = "") -> None:
        self.node = f"t{os.getpid()}{secrets.token_hex(2)}"
        self.directory = directory
        self.data = directory / "node"
        self.images = directory / "images"
        self.backend = backend
        self.flags = flags
        self._given_token = token  # what the flags say; "": the daemon makes one
        self.image = "debian"
        self.process: subprocess.Popen[bytes] | None = None
        self.facts: dict[str, Any] = {}
        self._numbers = iter(range(1, 1_000_000))
        build(ROOT / "nomad_dsec/guest/bin")
        if backend == "container":
            self._import_image()

    def _import_image(self) -> None:
        tree = make_tree(self.directory / "tree", Path("/bin/true"))
        self.image = "small"
        ImageStore(self.images).import_image(f"dir:{tree}", self.image)
        shutil.rmtree(tree)

    def start(self, *, failpoint: str = "", expect_death: bool = False, more: tuple[str, ...] = ()) -> None:
        """Start it and wait until it serves; with expect_death, until it has killed itself."""
        assert self.process is None
        argv = [sys.executable, "-m", "nomad_dsec.node", "--data", str(self.data), "--images", str(self.images)]
        argv += ["--backends", self.backend, "--id", self.node, "--failpoint", failpoint, "--pool-slots", "4"]
        argv += ["--network-pool", "0", *self.flags, *more]
        with (self.directory / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, cwd=ROOT)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if expect_death:
            self.wait_death()
            return
        assert line, self.log()[-ERROR_TEXT:]
        self.facts = json.loads(line)
        self.token = self._given_token or (self.data / "token").read_text()

    def log(self) -> str:
        return (self.directory / "daemon.log").read_text()

    def kill9(self) -> None:
        """As a crash would."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.wait_death()

    def wait_death(self) -> int:
        assert self.process is not None
        try:
            return self.process.wait(timeout=STOP_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(timeout=STOP_S)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.wait_death()

    def remove(self) -> None:
        """End all sandboxes and everything that outlives a daemon on purpose."""
        if self.process is not None:
            self.kill9()
        self.start(more=("--kill-on-exit",))
        status = self.stop()
        if self.backend == "container":
            table = MountTable(ImageStore(self.images), self.data / "mounts")
            table.retain_only(set())
            table.close()
        assert status == 0, self.log()[-ERROR_TEXT:]

    def new_ids(self, count: int = 1) -> list[str]:
        letters = "abcdefghijklmnopqrstuvwxyz234567"
        ids = []
        for _ in range(count):
            number, text = next(self._numbers), ""
            for _ in range(16):
                text = letters[number % 32] + text
                number //= 32
            ids.append(f"sb-{self.node}-{text}")
        return ids

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        headers = {"Authorization": f"Bearer {self.token}"}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.facts["http"], headers=headers, connector=connector) as session:
            yield Client(self, session)


class Client:
    """The node's HTTP API, raw."""

    def __init__(self, daemon: NodeDaemon, session: aiohttp.ClientSession) -> None:
        self.daemon = daemon
        self.session = session

    async def call(self, method: str, url: str, body: Any = None, /, *, data: Any = None, **params: Any) -> Reply:
        async with self.session.request(
            method, url, json=body, data=data, params=params or None, timeout=aiohttp.ClientTimeout(total=90)
        ) as reply:
            return Reply(reply.status, reply.headers, await reply.read())

    def body(self, ids: list[str], **spec: Any) -> dict[str, Any]:
        base = {
            "image": self.daemon.image,
            "cpus": 0.05,
            "memory_mib": 64,
            "disk_mib": 16,
            "pids": 64,
            "timeout_s": 600.0,
        }
        return {"ids": ids, "namespace": "test", "spec": base | spec}

    async def create(self, count: int = 1, **spec: Any) -> list[dict[str, Any]]:
        reply = await self.call("POST", "/v1/sandboxes", self.body(self.daemon.new_ids(count), **spec))
        return reply.ok()["sandboxes"]

    async def exec(self, sandbox: str, cmd: Any, **more: Any) -> dict[str, Any]:
        return (await self.call("POST", f"/v1/sandboxes/{sandbox}/execs", {"cmd": cmd, **more})).ok()

    async def info(self, sandbox: str) -> dict[str, Any]:
        return (await self.call("GET", f"/v1/sandboxes/{sandbox}")).ok()

    async def ls(self, **params: Any) -> dict[str, dict[str, Any]]:
        found = (await self.call("GET", "/v1/sandboxes", **params)).ok()["sandboxes"]
        return {info["id"]: info for info in found}

    async def metric(self, name: str) -> float:
        text = (await self.call("GET", "/metrics")).body.decode()
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    async def wait_state(self, sandbox: str, *states: str, timeout_s: float = 30.0) -> dict[str, Any]:
        async with asyncio.timeout(timeout_s):
            while (info := await self.info(sandbox))["state"] not in states:
                await asyncio.sleep(0.02)
        return info


def backends() -> Iterator[str]:
    """The backends that this machine can run; the fake one needs only root."""
    yield "fake"
    if not any(missing(name) for name in CONTAINER_NEEDS):
        yield "container"
