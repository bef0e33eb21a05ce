"""The backends that the contract suite runs on, each on a machine-room of its own: one directory, one image."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsec_imagefs.mounts import MountTable
from dsec_imagefs.store import ImageStore
from libdsec.errors import DsecError

from nomad_dsec.backends.base import Steps
from nomad_dsec.backends.container.backend import ContainerBackend
from nomad_dsec.backends.container.host import ContainerConfig
from nomad_dsec.backends.container.record import read_record
from nomad_dsec.guest.build import build
from nomad_dsec.guest.spec import ExecOutcome, ExecSpec
from nomad_dsec.linux.cgroup import CgroupRoot
from nomad_dsec.model import Handle, SandboxSpec

PATH = (b"PATH", b"/usr/sbin:/usr/bin:/sbin:/bin")
POOL = 4


@dataclass(kw_only=True)
class Room:
    """A backend under test. `handles` is what a node's journal would hold: written by start, kept until stop."""

    launcher: str
    directory: Path
    node: str
    digest: str = ""
    sanitize: bool = False  # dsec-init with ASan and UBSan: a fault of the launcher or of PID 1 fails the start
    backend: Any = None
    handles: dict[str, Handle] = field(default_factory=dict)
    lost_idle: set[str] = field(default_factory=set)  # cgroups that waited in the pool of a lost backend

    async def open(self) -> None:
        """Bring the backend up; also again, after `lose`, as a new daemon would."""
        store = ImageStore(self.directory / "store")
        config = ContainerConfig(
            node=self.node,
            data=self.directory / "node",
            init_binary=build(self.directory / "bin", sanitize=self.sanitize),
            launcher=self.launcher,
            pool_slots=POOL,
            network_pool=0,
        )
        self.backend = await ContainerBackend.open(config, MountTable(store, self.directory / "mounts"))

    async def lose(self) -> None:
        """What SIGKILL does to a daemon: its memory, descriptors and helper processes are gone; nothing is tidied."""
        backend, self.backend = self.backend, None
        host, launcher = backend._host, backend._launcher
        self.lost_idle |= host.cgroup_pool.idle_names()
        for task in host._background:
            task.cancel()
        for live in backend._live.values():
            if live.channel is not None:
                await live.channel.close()
            if live.pidfd >= 0:
                os.close(live.pidfd)
        backend._live.clear()
        await launcher.close()
        await host.nets.close()  # only descriptors: the kernel would close them
        gc.collect()

    def spec(self, **changes: Any) -> SandboxSpec:
        """A small sandbox."""
        values: dict[str, Any] = {
            "id": f"sb-{self.node}-{secrets.token_hex(8)}", "incarnation": 1, "namespace": "test",
            "digest": self.digest, "backend": "container", "cpus": 1.0, "memory_mib": 96, "disk_mib": 24, "pids": 48,
            "env": {}, "cwd": "/", "user": "", "hostname": "box", "qos": "latency_sensitive", "policy": {},
        }  # fmt: skip
        return SandboxSpec(**(values | changes))

    async def journal(self, handle: Handle) -> None:
        """As the node's: the last handle of a sandbox counts."""
        self.handles[handle.sandbox] = handle

    async def start(self, **changes: Any) -> Handle:
        """Start one and keep its handle."""
        started = await self.backend.start(self.spec(**changes), self.journal, Steps())
        self.handles[started.handle.sandbox] = started.handle
        return started.handle

    async def stop(self, handle: Handle) -> None:
        """Stop one and forget its handle."""
        await self.backend.stop(handle)
        self.handles.pop(handle.sandbox, None)

    async def stop_all(self) -> None:
        """After a test, whatever became of it."""
        for handle in list(self.handles.values()):
            with suppress(DsecError):
                await self.stop(handle)

    async def run(self, handle: Handle, *argv: str, timeout_s: float = 20.0, **more: Any) -> ExecOutcome:
        """A command to its end."""
        channel = await self.backend.connect(handle)
        spec = ExecSpec(argv=tuple(os.fsencode(word) for word in argv), env=(PATH,), timeout_s=timeout_s, **more)
        return await channel.run(spec, timeout_s=timeout_s + 20)

    async def shell(self, handle: Handle, script: str, **more: Any) -> str:
        """The output of a bash script."""
        outcome = await self.run(handle, "/bin/bash", "-c", script, **more)
        assert outcome.start_error is None, outcome
        return outcome.stdout.decode(errors="replace").strip()

    def census(self) -> dict[str, Any]:
        """Everything of this node's that a sandbox could leave. Idle pool entries are not counted."""
        host = self.backend._host
        spawner = getattr(self.backend._launcher, "_spawner", None)  # comes up with the first start
        used = set(host.cgroups.names()) - host.cgroup_pool.idle_names() - self.lost_idle
        return {
            "cgroups": sorted(used),
            "processes": sorted(pid for name in used for pid in _pids(host.cgroups, name)),
            "sockets": sorted(path.name for path in host.config.run.iterdir()),
            "uid ranges": host.config.uid_ranges - host.uids.free,
            "mounts": sum(
                str(self.directory) in line for line in Path("/proc/self/mountinfo").read_text().splitlines()
            ),
            "children": sorted(_children() - {getattr(spawner, "_pid", 0)}),
            "live": sorted(self.backend._live),
        }

    async def close(self) -> None:
        """Everything of it goes."""
        await self.stop_all()
        await self.backend.sweep(())
        await self.backend.close()
        await CgroupRoot.detect(self.node).remove()
        MountTable(ImageStore(self.directory / "store"), self.directory / "mounts").close()


def _children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def _mountinfo() -> list[str]:
    return Path("/proc/self/mountinfo").read_text().splitlines()


def _pids(root: CgroupRoot, name: str) -> list[int]:
    return root.adopt({"name": name}).pids()


def init_pid(room: Room, handle: Handle) -> int:
    """PID 1 of a sandbox as the host counts, found as recovery finds it."""
    from nomad_dsec.backends.container.live import find_init

    cgroup = room.backend._host.cgroups.adopt(read_record(handle).cgroup)
    found = find_init(cgroup)
    assert found is not None
    os.close(found[1])
    return found[0]


async def settle(condition: Any, *, timeout_s: float = 5.0) -> bool:
    """Wait for something of the kernel's that comes a moment later."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True
