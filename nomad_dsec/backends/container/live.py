"""One container as its backend holds it in memory, and how it ends: killed, emptied, every resource given back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from libdsec.errors import DeadlineExceeded, PlatformError, StateError

from nomad_dsec.backends.base import Ended
from nomad_dsec.backends.container.sockets import connect_socket
from nomad_dsec.guest.channel import GuestChannel
from nomad_dsec.linux.cgroup_files import UNIFIED, read_file
from nomad_dsec.linux.pidfd import open_same_process, send_signal, wait_ended
from nomad_dsec.linux.procfs import start_time, status
from nomad_dsec.linux.syscalls import SyscallError

if TYPE_CHECKING:
    from nomad_dsec.backends.container.host import Host
    from nomad_dsec.backends.container.launcher import Launcher
    from nomad_dsec.backends.container.record import Record
    from nomad_dsec.linux.cgroup import Cgroup
    from nomad_dsec.linux.idmap import UidRange
    from nomad_dsec.linux.netns_pool import NetSlot
    from nomad_dsec.linux.upper import UpperLayer

CONNECT_S: Final = 5.0
KILL_S: Final = 20.0
UNHURRIED_S: Final = 0.2


@dataclass(slots=True, eq=False, kw_only=True)
class Live:
    """A container that has, or may have, something on this machine. pidfd: -1 until PID 1 is known.

    owner: its sandbox and incarnation, the label of its cgroup. oom_seen: OOM kills that its
    init is known to have outlived.
    """

    sandbox: str
    owner: str
    record: Record
    cgroup: Cgroup | None = None
    net: NetSlot | None = None
    uids: UidRange | None = None
    upper: UpperLayer | None = None
    pid: int = 0
    pidfd: int = -1
    channel: GuestChannel | None = None
    oom_seen: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def socket(self) -> Path:
        """Where its dsec-init listens."""
        return Path(self.record.socket)

    async def connect(self) -> GuestChannel:
        """The shared channel; made again when the last one broke. PlatformError connection_lost when nobody listens."""
        if self.channel is not None and not self.channel.closed:
            return self.channel
        async with self.turn:
            if self.channel is None or self.channel.closed:
                try:
                    self.channel = await GuestChannel.connect(lambda: connect_socket(self.socket), timeout_s=CONNECT_S)
                except OSError as error:
                    raise PlatformError(
                        "connection_lost", f"dsec-init of {self.sandbox} does not answer: {error.strerror}"
                    ) from error
            return self.channel

    async def wait_ended(self) -> Ended:
        """Return once PID 1 is dead, with the cause as far as the kernel tells it."""
        if self.pidfd < 0:
            raise StateError("not_running", f"{self.sandbox} has no running init")
        await wait_ended(self.pidfd)
        return self.cause()

    def cause(self) -> Ended:
        """Why PID 1, which never ends by itself, is dead."""
        kills = 0
        if self.cgroup is not None:
            with contextlib.suppress(SyscallError):
                kills = self.cgroup.oom_kills() - self.oom_seen
        if kills > 0:
            return Ended(
                reason="oom", message=f"out of memory: the kernel killed {kills} processes, its init among them"
            )
        return Ended(reason="init_exited", message="its init was killed or ended by itself")

    async def end(self, host: Host, launcher: Launcher) -> None:
        """Kill everything and give every resource back. Idempotent; raises DeadlineExceeded when it will not die."""
        async with self.turn:
            if self.channel is not None:
                await self.channel.close()
                self.channel = None
            reusable = await self._kill()
            await launcher.forget(self.sandbox, self.socket.parent)
            if self.upper is not None:
                if self.upper.path:
                    await host.uppers.store.remove(self.upper)
                self.upper = None
            if self.net is not None:
                await host.nets.give_back(self.net)
                self.net = None
            self.socket.unlink(missing_ok=True)
            if self.uids is not None:
                host.uids.release(self.uids)
                self.uids = None
            if self.cgroup is not None:
                # Last: with its label goes the proof that the handle still owns something.
                await host.give_back_cgroup(self.cgroup, reusable=reusable)
                self.cgroup = None

    async def _kill(self) -> bool:
        """Kill all of it; True when its cgroup may be used again.

        The death of PID 1 is the death of its whole pid namespace, and its pidfd becomes readable only after the
        last of them has been reaped (pid_namespaces(7)).
        """
        if self.cgroup is None:
            return False
        if self.pidfd >= 0:
            if not self.cgroup.unified:  # tasks frozen by a v1 freezer can't die
                await self.cgroup.thaw(timeout_s=KILL_S)
            send_signal(self.pidfd, signal.SIGKILL)
            if not await _ends_within(self.pidfd, UNHURRIED_S):
                with contextlib.suppress(SyscallError):
                    self.cgroup.lift_cpu_limit()
                if not await _ends_within(self.pidfd, KILL_S):
                    raise DeadlineExceeded("kill_timeout", f"{self.sandbox} did not die within {KILL_S:g} s")
            os.close(self.pidfd)
            self.pidfd = -1
        if self.cgroup.is_empty():
            return True
        await self.cgroup.kill(timeout_s=KILL_S)
        return False


async def _ends_within(pidfd: int, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await wait_ended(pidfd)
    except TimeoutError:
        return False
    return True


def find_init(cgroup: Cgroup) -> tuple[int, int] | None:
    """(pid, pidfd) of the process in this cgroup that is PID 1 of its namespace; None when there is none."""
    directory = cgroup.paths.get(UNIFIED) or next(iter(cgroup.paths.values()))
    try:
        pids = [int(line) for line in read_file(f"{directory}/cgroup.procs").split()]
    except SyscallError:
        return None
    for pid in pids:
        began = start_time(pid)
        numbers = (status(pid) or {}).get("NSpid", "").split()
        if began is None or len(numbers) < 2 or numbers[-1] != "1":
            continue
        pidfd = open_same_process(pid, began)
        if pidfd is not None:
            return pid, pidfd
    return None
