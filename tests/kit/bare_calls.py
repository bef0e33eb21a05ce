"""Calls without images or a daemon: the engine on real lanes, over a file system that is given.

For machines that have little, such as that of tests/kit/vm: it needs a kernel, Python and a built dsec-init.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from libdsec.wire_fncall import FnLimits, FnRequest, FnResult

from nomad_dsec.backends.container.backend import ContainerBackend
from nomad_dsec.backends.container.host import ContainerConfig
from nomad_dsec.backends.container.native import NativeLauncher
from nomad_dsec.backends.fncall.artefacts import ArtefactCache
from nomad_dsec.backends.fncall.compiler import Compiler
from nomad_dsec.backends.fncall.engine import Engine
from nomad_dsec.backends.fncall.lane import Lane
from nomad_dsec.backends.fncall.pool import LaneKind, LanePool, Marks
from nomad_dsec.backends.fncall.queue import FairQueue
from nomad_dsec.backends.fncall.runner import Runner
from nomad_dsec.backends.fncall.warm import WarmUps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from dsec_imagefs.mounts import MountTable

DIGEST = "sha256:" + "0" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRoot:
    """What a MountTable is to a node, for one root that somebody else mounted."""

    path: Path

    def acquire(self, digest: str, user: str) -> Path:
        """Always the one."""
        del digest, user
        return self.path

    def is_on_demand(self, digest: str) -> bool:
        """It is here."""
        del digest
        return False

    def retain(self, user: str, digests: object) -> int:
        """It stays."""
        del user, digests
        return 0

    def unmount_unused(self) -> tuple[str, ...]:
        """It stays."""
        return ()

    def close(self) -> tuple[str, ...]:
        """It stays."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BareCalls:
    """The engine and what it draws from. One call runs at a time, so all are in one lane as long as it is good."""

    engine: Engine
    pool: LanePool[Lane]
    backend: ContainerBackend

    async def python(self, code: str, **fields: Any) -> FnResult:
        """One call in the zygote; `limits` may be a dict."""
        fields["limits"] = FnLimits(**fields.get("limits", {}))
        request = FnRequest(image="root", language="python", code=code, **fields)
        return await self.engine.run(request, digest=DIGEST, image_env={}, namespace="test")


@asynccontextmanager
async def open_bare_calls(directory: Path, *, root: Path, init_binary: Path) -> AsyncIterator[BareCalls]:
    """All of it, and its end. root: a mount whose file system takes idmapped mounts."""
    node = f"bare{os.getpid()}"
    settings = ContainerConfig(
        node=node, data=directory / "node", init_binary=init_binary, pool_slots=1, network_pool=0, upper="tmpfs"
    )
    backend = await ContainerBackend.open(settings, cast("MountTable", OneRoot(path=root)))
    launcher = NativeLauncher(init_binary, backend.host.cgroups.layout)
    names = itertools.count(1)
    tasks: set[asyncio.Task[Any]] = set()

    def spawn(name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def start(kind: LaneKind) -> Lane:
        name = f"lane-{node}-{next(names)}"
        return await Lane.start(backend, launcher, name=name, digest=kind.digest, zygote=kind.zygote)

    pool = LanePool(Marks(target=0, low=0, high=2), start, spawn)
    cache = ArtefactCache(directory / "fncall", memory_bytes=1 << 20, disk_bytes=1 << 20)
    runner = Runner(FairQueue(running_max=1, waiting_max=16), pool)
    engine = Engine(runner, Compiler(runner, cache, WarmUps(runner, cache, spawn)))
    try:
        yield BareCalls(engine=engine, pool=pool, backend=backend)
    finally:
        await pool.close()
        if tasks:
            await asyncio.wait(tasks, timeout=60)
        await launcher.close()
        await backend.close()


def mount_image(image: Path, target: Path) -> None:
    """An ext4 image, to read."""
    target.mkdir()
    device = subprocess.run(
        ["losetup", "--find", "--show", str(image)], check=True, timeout=30, capture_output=True, text=True
    ).stdout.strip()
    subprocess.run(["mount", "-t", "ext4", "-o", "ro", device, str(target)], check=True, timeout=30)
