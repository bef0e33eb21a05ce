"""A backend without isolation, for tests of node, gateway and SDK: dsec-init on a scratch copy of the host's root.

Real in what those rooms rely on (own process that outlives the daemon, handle, recover, pause, files, execs), and in
nothing else: no limits, no policy, no users, the host's network. Offered only when `node.backends` says `fake`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libdsec.errors import NotSupported, PlatformError
from libdsec.wire import BackendFingerprint, Metrics

from nomad_dsec.backends import fake_host as host
from nomad_dsec.backends.base import Ended, Fate, Recovered, Started
from nomad_dsec.guest.channel import GuestChannel
from nomad_dsec.linux.pidfd import wait_ended
from nomad_dsec.linux.procfs import boot_id, start_time, status
from nomad_dsec.model import HANDLE_VERSION, Handle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from nomad_dsec.backends.base import Steps
    from nomad_dsec.model import SandboxSpec

PREFIX = "fake-"
READY_S = 20.0
DELAY = "DSEC_FAKE_DELAY_S"  # in spec.env: a slow start, for tests
FAIL = "DSEC_FAKE_FAIL"  # in spec.env: `before` or `after` the resources are made, for tests


class FakeBackend:
    """Sandboxes below one directory. It answers to the name of the backend whose place it takes."""

    def __init__(self, directory: Path, init_binary: Path, *, name: str = "container") -> None:
        self.name = name
        self._dir = directory
        self._binary = init_binary
        self._channels: dict[str, GuestChannel] = {}
        self._reason: str | None = None

    async def fingerprint(self) -> BackendFingerprint:
        """See Backend."""
        if self._reason is None:
            self._reason = await asyncio.to_thread(self._probe)
        return BackendFingerprint(
            name=self.name,
            available=not self._reason,
            reason=self._reason,
            features=["pause", "files", "exec", "pty"] if not self._reason else [],
            attributes={"launcher": "fake", "isolation": "none"},
        )

    async def start(self, spec: SandboxSpec, journal: Callable[[Handle], Awaitable[None]], steps: Steps) -> Started:
        """See Backend. Cancelled or failing, it removes what it made."""
        if spec.mounts:
            raise NotSupported("no_mounts", "the fake backend shows no directories of the host", field="mounts")
        run = self._dir / (PREFIX + spec.id)
        handle = Handle(
            version=HANDLE_VERSION,
            backend=self.name,
            sandbox=spec.id,
            incarnation=spec.incarnation,
            data={"dir": str(run), "boot_id": boot_id()},
        )
        await journal(handle)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.stop, handle)
            _fail_on_request(spec, "before")
            with steps.step("rootfs"):
                host.make_root(run)
            with steps.step("launch"):
                pid = host.spawn_keeper(run, self._binary)
            handle = _with_pid(handle, pid)
            with steps.step("ready"):
                await asyncio.sleep(float(spec.env.get(DELAY, "0")))
                await self._ready(handle)
            _fail_on_request(spec, "after")
            undo.pop_all()
        shown = {"profile": "none", "network": {"kind": "host"}, "unenforced": ["everything: this is the fake backend"]}
        return Started(handle=handle, policy=shown)

    async def recover(self, handle: Handle) -> Recovered:
        """See Backend."""
        if handle.data.get("boot_id") != boot_id():
            return Recovered(fate=Fate.LOST, reason="node_lost", message="the machine was restarted")
        init = host.init_pid(handle)
        if init is None:
            return Recovered(fate=Fate.EXITED, reason="init_exited", message="its init is gone")
        state = (status(init) or {}).get("State", "")
        if state.startswith("T"):
            return Recovered(fate=Fate.PAUSED)
        try:
            await self._ready(handle)
        except PlatformError as error:
            return Recovered(fate=Fate.LOST, reason="error(recover)", message=str(error))
        return Recovered(fate=Fate.RUNNING)

    async def connect(self, handle: Handle) -> GuestChannel:
        """See Backend."""
        channel = self._channels.get(handle.sandbox)
        if channel is None or channel.closed:
            path = Path(handle.data["dir"]) / "init.sock"
            channel = await GuestChannel.connect(lambda: host.connect(path), timeout_s=5.0)
            self._channels[handle.sandbox] = channel
        return channel

    async def wait_ended(self, handle: Handle) -> Ended:
        """See Backend."""
        pidfd = host.open_keeper(handle)
        if pidfd is not None:
            try:
                await wait_ended(pidfd)
            finally:
                os.close(pidfd)
            host.reap(handle.data["pid"])
        return Ended(reason="init_exited", message="its init ended by itself")

    async def stop(self, handle: Handle) -> None:
        """See Backend."""
        channel = self._channels.pop(handle.sandbox, None)
        if channel is not None:
            await channel.close()
        run = Path(handle.data["dir"])
        for pid in host.keepers(handle):
            await host.kill(pid)
        await asyncio.to_thread(host.remove_root, run)

    async def stats(self, handle: Handle) -> Metrics:
        """See Backend. Only the number of processes is known."""
        init = host.init_pid(handle)
        return Metrics(pids=len(host.members(init)) if init is not None else 0, at=time.time())

    async def sweep(self, keep: Sequence[Handle]) -> list[str]:
        """See Backend."""
        kept = {handle.data["dir"] for handle in keep}
        removed = []
        for run in sorted(self._dir.glob(PREFIX + "*")):
            if str(run) in kept:
                continue
            data: dict[str, Any] = {"dir": str(run)}
            name = run.name.removeprefix(PREFIX)
            await self.stop(Handle(version=HANDLE_VERSION, backend=self.name, sandbox=name, incarnation=0, data=data))
            removed.append(f"sandbox directory {run}")
        return removed

    async def pause(self, handle: Handle) -> None:
        """Stop every process of it; ones that are forked meanwhile are found in the next round."""
        init = host.init_pid(handle)
        if init is None:
            raise PlatformError("pause_failed", f"{handle.sandbox} has no init")
        stopped: set[int] = set()
        while fresh := host.members(init) - stopped:
            for pid in fresh:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= fresh

    async def resume(self, handle: Handle) -> None:
        """Let all of them go on."""
        init = host.init_pid(handle)
        if init is None:
            raise PlatformError("resume_failed", f"{handle.sandbox} has no init")
        for pid in host.members(init):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def plan(self, spec: SandboxSpec) -> list[dict[str, Any]]:
        """See Planned."""
        run = str(self._dir / (PREFIX + spec.id))
        return [
            {"op": "overlay", "lower": "/", "target": f"{run}/root"},
            {"op": "spawn", "argv": host.keeper_argv(run)},
        ]

    async def close(self) -> None:
        """See Backend."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    def _probe(self) -> str:
        if os.geteuid() != 0:
            return "not root"
        if not self._binary.is_file():
            return f"{self._binary} is not built"
        return "" if shutil.which("unshare") else "unshare is not installed"

    async def _ready(self, handle: Handle) -> None:
        try:
            async with asyncio.timeout(READY_S):
                await (await self.connect(handle)).ping()
        except TimeoutError as late:
            log_text = (Path(handle.data["dir"]) / "log").read_text("utf-8", "replace")[-500:]
            raise PlatformError("launch_failed", f"dsec-init does not answer: {log_text}") from late


def _fail_on_request(spec: SandboxSpec, step: str) -> None:
    if spec.env.get(FAIL) == step:
        raise PlatformError("launch_failed", f"{FAIL}={step} was asked for")


def _with_pid(handle: Handle, pid: int) -> Handle:
    data = {**handle.data, "pid": pid, "start": start_time(pid)}
    return Handle(
        version=handle.version,
        backend=handle.backend,
        sandbox=handle.sandbox,
        incarnation=handle.incarnation,
        data=data,
    )
