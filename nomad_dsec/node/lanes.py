"""The node's part of fncall: the engine made from settings, its background work, and requests by namespace."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from libdsec.errors import CapacityError, DsecError, NotSupported
from libdsec.wire import BackendFingerprint

from nomad_dsec.backends.container.backend import ContainerBackend
from nomad_dsec.backends.container.native import NativeLauncher
from nomad_dsec.backends.fncall.artefacts import ArtefactCache
from nomad_dsec.backends.fncall.compiler import Compiler
from nomad_dsec.backends.fncall.engine import Engine
from nomad_dsec.backends.fncall.flights import Flights
from nomad_dsec.backends.fncall.lane import Lane
from nomad_dsec.backends.fncall.pool import LaneKind, LanePool, Marks
from nomad_dsec.backends.fncall.queue import FairQueue
from nomad_dsec.backends.fncall.runner import Runner
from nomad_dsec.backends.fncall.warm import WarmUps
from nomad_dsec.node.fingerprint import machine_cpus

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from libdsec.wire_fncall import FnRequest, FnResult, LanguageList, SubmitRequest, SubmitResult

    from nomad_dsec.node.core import Node

CULL_EVERY_S: Final = 5.0
LANES_PER_CPU: Final = 8
CACHE_MEMORY_BYTES: Final = 512 * 1024 * 1024
CACHE_DISK_BYTES: Final = 4 * 1024 * 1024 * 1024


class Lanes:
    """Made once per daemon; the first call starts what it needs. `close` ends every lane."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._names = itertools.count(1)
        self._launcher: NativeLauncher | None = None
        limits = node.limits
        running_max = limits.calls_max or machine_cpus()
        self.queue = FairQueue(running_max=running_max, waiting_max=limits.calls_queue_max)
        marks = Marks(target=running_max + 1, low=1, high=limits.lanes_max or max(4, LANES_PER_CPU * running_max))
        self.pool: LanePool[Lane] = LanePool(marks, self._start, self._spawn)
        self._cache = ArtefactCache(node.data / "fncall", memory_bytes=CACHE_MEMORY_BYTES, disk_bytes=CACHE_DISK_BYTES)
        runner = Runner(self.queue, self.pool)
        warm_ups = WarmUps(runner, self._cache, self._spawn)
        self._engine = Engine(runner, Compiler(runner, self._cache, warm_ups))
        self._flights = Flights(self._spawn)

    def _spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._node.room.spawn(name, work)

    def _backend(self) -> ContainerBackend:
        backend = self._node.backends.get("container")
        if not isinstance(backend, ContainerBackend):
            raise NotSupported("not_supported", "this node runs no containers, and so no calls")
        return backend

    async def _start(self, kind: LaneKind) -> Lane:
        backend = self._backend()
        if self._launcher is None:
            config = backend.host.config
            self._launcher = NativeLauncher(config.init_binary, backend.host.cgroups.layout)
        name = f"lane-{self._node.id}-{next(self._names)}"
        return await Lane.start(backend, self._launcher, name=name, digest=kind.digest, zygote=kind.zygote)

    def offer(self, backends: Sequence[BackendFingerprint]) -> BackendFingerprint:
        """What this node says of calls: they run in lanes, which are containers."""
        container = next((one for one in backends if one.name == "container"), None)
        if container is None or not isinstance(self._node.backends.get("container"), ContainerBackend):
            return BackendFingerprint(name="fncall", available=False, reason="this node runs no containers")
        return BackendFingerprint(name="fncall", available=container.available, reason=container.reason)

    async def cull(self) -> None:
        """Runs until cancelled: lanes of images that nobody asks for go."""
        while True:
            await asyncio.sleep(CULL_EVERY_S)
            self.pool.cull()

    def _check_open(self) -> None:
        self._backend()
        if self._node.draining:
            raise CapacityError("draining", "this node is being drained", retry_after_s=5.0)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except DsecError as error:
            self._node.metrics.call_refused(error.code)
            raise

    def observe(self) -> None:
        """Bring the gauges up to date."""
        metrics = self._node.metrics
        metrics.lanes.set(self.pool.lanes)
        metrics.lanes_replaced.set(self.pool.replaced)
        metrics.calls_running.set(self.queue.running)
        metrics.calls_waiting.set(self.queue.waiting)

    async def run(self, request: FnRequest, *, namespace: str, digest: str) -> FnResult:
        """One call; one with an id that is under way is joined."""
        self._check_open()
        image = await self._node.images.defaults(digest, request.image)

        async def work() -> FnResult:
            with self._counted():
                result = await self._engine.run(request, digest=image.digest, image_env=image.env, namespace=namespace)
            self._node.metrics.call_done(result.verdict, result.queue_s)
            return result

        if request.call_id:
            return await self._flights.join(namespace, request.call_id, work)
        return await work()

    async def submit(self, request: SubmitRequest, *, namespace: str, digest: str) -> SubmitResult:
        """One submission with its tests, under the call id of its program."""
        self._check_open()
        image = await self._node.images.defaults(digest, request.program.image)

        async def work() -> SubmitResult:
            with self._counted():
                judged = await self._engine.submit(
                    request, digest=image.digest, image_env=image.env, namespace=namespace
                )
            for result in judged.tests:
                self._node.metrics.call_done(result.verdict, result.queue_s)
            return judged

        if request.program.call_id:
            return await self._flights.join(namespace, f"submit {request.program.call_id}", work)
        return await work()

    def cancel(self, namespace: str, call_id: str) -> None:
        """End what runs or waits under that id; unknown ids are fine."""
        self._flights.cancel(namespace, call_id)
        self._flights.cancel(namespace, f"submit {call_id}")

    async def languages(self, image: str, *, namespace: str, digest: str) -> LanguageList:
        """What an image can compile and run."""
        self._check_open()
        found = await self._node.images.defaults(digest, image)
        return await self._engine.languages(digest=found.digest, image_env=found.env, namespace=namespace)

    async def close(self) -> None:
        """End the lanes and their launcher; the backend still stands."""
        async with AsyncExitStack() as ends:
            if self._launcher is not None:
                ends.push_async_callback(self._launcher.close)
            ends.callback(self._cache.close)
            ends.push_async_callback(self.pool.close)
