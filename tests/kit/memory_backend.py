"""A backend of nothing but records, for tests of the node's own rules: what it was told and holds, faults on demand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from libdsec.errors import PlatformError
from libdsec.wire import BackendFingerprint, Metrics

from nomad_dsec.backends.base import Ended, Fate, Recovered, Started
from nomad_dsec.model import Handle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from nomad_dsec.backends.base import Steps
    from nomad_dsec.guest.channel import GuestChannel
    from nomad_dsec.model import SandboxSpec


@dataclass
class World:
    """The machine: outlives any number of backends (daemons) that work on it."""

    alive: dict[str, str] = field(default_factory=dict)  # sandbox -> running | paused | exited
    log: list[tuple[str, str]] = field(default_factory=list)
    ends: dict[str, asyncio.Future[Ended]] = field(default_factory=dict)
    fail: dict[str, Exception] = field(default_factory=dict)  # verb, or verb:sandbox -> what it raises
    gate: asyncio.Event | None = None  # starts wait for it
    starting: int = 0
    starting_most: int = 0

    def act(self, verb: str, sandbox: str) -> None:
        self.log.append((verb, sandbox))
        error = self.fail.get(f"{verb}:{sandbox}") or self.fail.get(verb)
        if error is not None:
            raise error

    def end(self, sandbox: str, reason: str, message: str = "") -> None:
        """The sandbox ends by itself."""
        self.alive[sandbox] = "exited"
        self.ends[sandbox].set_result(Ended(reason=reason, message=message))


class MemoryBackend:
    name = "container"

    def __init__(self, world: World) -> None:
        self.world = world

    async def fingerprint(self) -> BackendFingerprint:
        return BackendFingerprint(name=self.name, available=True)

    async def start(self, spec: SandboxSpec, journal: Callable[[Handle], Awaitable[None]], steps: Steps) -> Started:
        world = self.world
        handle = Handle(version=1, backend=self.name, sandbox=spec.id, incarnation=spec.incarnation, data={})
        world.starting += 1
        world.starting_most = max(world.starting_most, world.starting)
        try:
            with steps.step("launch"):
                await journal(handle)
                world.alive[spec.id] = "running"
                try:
                    if world.gate is not None:
                        await world.gate.wait()
                    await asyncio.sleep(0)
                    world.act("start", spec.id)
                except BaseException:
                    del world.alive[spec.id]
                    raise
        finally:
            world.starting -= 1
        world.ends[spec.id] = asyncio.get_running_loop().create_future()
        return Started(handle=handle, policy={"profile": "none"})

    async def recover(self, handle: Handle) -> Recovered:
        self.world.act("recover", handle.sandbox)
        state = self.world.alive.get(handle.sandbox)
        if state in ("running", "paused"):
            self.world.ends[handle.sandbox] = asyncio.get_running_loop().create_future()
            return Recovered(fate=Fate(state))
        if state == "exited":
            return Recovered(fate=Fate.EXITED, reason="oom", message="its init was killed")
        return Recovered(fate=Fate.LOST, reason="node_lost", message="nothing of it is there")

    async def connect(self, handle: Handle) -> GuestChannel:
        raise PlatformError("connection_lost", f"{handle.sandbox} has no guest")

    async def wait_ended(self, handle: Handle) -> Ended:
        return await asyncio.shield(self.world.ends[handle.sandbox])

    async def stop(self, handle: Handle) -> None:
        await asyncio.sleep(0)
        self.world.act("stop", handle.sandbox)
        self.world.alive.pop(handle.sandbox, None)

    async def stats(self, handle: Handle) -> Metrics:
        return Metrics(memory_mib=1.0)

    async def sweep(self, keep: Sequence[Handle]) -> list[str]:
        kept = {handle.sandbox for handle in keep}
        orphans = [sandbox for sandbox in self.world.alive if sandbox not in kept]
        for sandbox in orphans:
            del self.world.alive[sandbox]
        return orphans

    async def pause(self, handle: Handle) -> None:
        await asyncio.sleep(0)
        self.world.act("pause", handle.sandbox)
        self.world.alive[handle.sandbox] = "paused"

    async def resume(self, handle: Handle) -> None:
        self.world.act("resume", handle.sandbox)
        self.world.alive[handle.sandbox] = "running"

    async def close(self) -> None:
        pass
