"""One lane: a container of its own in which calls run, one at a time; started, set up, asked, checked, ended.

Everything of it goes with this process: its PID 1 ends when our end of its socket closes, and what is left of its
cgroup is swept at the next start of the node daemon, since no handle owns it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from libdsec.errors import DeadlineExceeded, PlatformError

from nomad_dsec.backends.container.finish import finish
from nomad_dsec.backends.container.launcher import Slot
from nomad_dsec.backends.container.live import Live
from nomad_dsec.backends.container.record import Record
from nomad_dsec.backends.container.spec import MIB, ContainerSpec, Limits, TmpfsUpper
from nomad_dsec.backends.fncall import lane_wire as wire
from nomad_dsec.backends.fncall.lane_policy import compile_lane_policy
from nomad_dsec.linux import netns
from nomad_dsec.linux.cgroup_files import Limits as CgroupLimits
from nomad_dsec.linux.cgroup_files import parse_keyed, read_file
from nomad_dsec.linux.memfd import make_memfd
from nomad_dsec.linux.netns_pool import NetSlot
from nomad_dsec.linux.procfs import boot_id
from nomad_dsec.linux.syscalls import SyscallError
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from nomad_dsec.backends.container.backend import ContainerBackend
    from nomad_dsec.backends.container.native import NativeLauncher
    from nomad_dsec.backends.fncall.lane_wire import LaneCall, LaneReply
    from nomad_dsec.linux.cgroup import Cgroup

SETUP_S: Final = 45.0
NOT_BEGUN: Final = "lane_failed"  # code of a fault before anything of the program ran
SLACK_S: Final = 15.0  # beyond a call's own wall time, until the lane is given up
IDLE_MEMORY_MIB: Final = 512  # while the interpreter starts; each call writes its own
LANE_CPUS: Final = 1.5  # one thread never meets the quota, a JVM's helpers get some
OWN_PIDS: Final = 6  # PID 1, reapers of this and the last call, zygote, two helpers on their way out
CHARGE_SLACK_BYTES: Final = 8 * MIB
RESET_S: Final = 1.0
RESET_NAP_S: Final = 0.005
ZYGOTE: Final = Path(__file__).with_name("zygote.py")
# LD_BIND_NOW: symbols are looked up once, by the zygote, and not by each child that is the first to call something.
_ZYGOTE_ENV: Final = (
    b"PATH=/usr/local/bin:/usr/bin:/bin", b"LANG=C.UTF-8", b"PYTHONDONTWRITEBYTECODE=1", b"HOME=/tmp", b"LD_BIND_NOW=1",
)  # fmt: skip
_log = get_log("fncall.lane")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a call may use of the lane's cgroup, its own overhead not counted."""

    memory_bytes: int
    pids: int


class Lane:
    """Make it with `await Lane.start(...)`; `broken` says that it must not be used again."""

    def __init__(self, live: Live, control: socket.socket, backend: ContainerBackend, launcher: NativeLauncher) -> None:
        self._live = live
        self._control = control
        self._backend = backend
        self._launcher = launcher
        self._waiting: asyncio.Future[LaneReply] | None = None
        self._number = 0
        self._limits: CgroupLimits | None = None
        self._overhead_bytes = 0
        self._idle_bytes = 0
        self._oom_told = 0
        self.name = live.sandbox
        self.has_zygote = False
        self.broken = ""
        self.calls = 0
        asyncio.get_running_loop().add_reader(control.fileno(), self._readable)

    @classmethod
    async def start(
        cls, backend: ContainerBackend, launcher: NativeLauncher, *, name: str, digest: str, zygote: str
    ) -> Lane:
        """A lane over this image; zygote: argv[0] of an interpreter for it, or "". All or nothing."""
        host = backend.host
        rootfs = await host.roots.acquire(digest)
        live = Live(sandbox=name, owner=f"{name}#0", record=_record(backend, name, digest))
        backend.adopt_lane(live)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        ours.setblocking(False)
        lane = cls(live, ours, backend, launcher)
        try:
            with theirs:
                await lane._launch(rootfs, theirs.fileno())
            await lane._set_up(zygote)
        except BaseException:
            await lane.close()
            raise
        return lane

    async def _launch(self, rootfs: Path, control_fd: int) -> None:
        host, live = self._backend.host, self._live
        live.uids = host.uids.take()
        limits = CgroupLimits(cpus=LANE_CPUS, memory_bytes=IDLE_MEMORY_MIB * MIB, pids=256)
        live.cgroup = host.take_cgroup(limits, live.owner)
        # `lo` stays down: a packet to it would leave state (TIME_WAIT, ports) that the next call could meet.
        live.net = NetSlot(kind="none", fd=await asyncio.to_thread(_silent_netns))
        live.record = replace(
            live.record, uid_base=live.uids.base, cgroup=live.cgroup.to_record(), net=live.net.to_record()
        )
        spec = ContainerSpec(
            id=live.sandbox,
            incarnation=0,
            rootfs=rootfs,
            upper=TmpfsUpper(size_bytes=MIB, inodes=1024),
            limits=Limits(cpus=limits.cpus, memory_bytes=limits.memory_bytes, pids=limits.pids),
            policy=compile_lane_policy(host.abilities),
            uid_base=live.uids.base,
            runtime_dir=host.config.run,
            hostname="call",
            lane=True,
        )
        cgroup_fd = os.open(live.cgroup.unified, os.O_RDONLY | os.O_DIRECTORY) if live.cgroup.unified else -1
        try:
            slot = Slot(cgroup=live.cgroup, cgroup_fd=cgroup_fd, net=live.net)
            launched = await self._launcher.launch(spec, slot, control_fd)
        finally:
            if cgroup_fd >= 0:
                os.close(cgroup_fd)
        live.pid, live.pidfd = launched.pid, launched.pidfd

    async def _set_up(self, zygote: str) -> None:
        assert self._live.cgroup is not None
        argv = [zygote.encode(), b"-B", b"-c", ZYGOTE.read_bytes()] if zygote else []
        call = wire.LaneCall(argv=argv, env=_ZYGOTE_ENV if zygote else ())
        with ExitStack() as opened:
            fds = []
            for path in _meters(self._live.cgroup):
                fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                opened.callback(os.close, fds[-1])
            reply = await self._ask(wire.SETUP, call, fds, SETUP_S)
        if reply.flags & wire.BROKEN:
            raise PlatformError("lane_failed", f"step {reply.step}: {os.strerror(reply.error)}")
        self.has_zygote = bool(zygote) and not reply.flags & wire.NO_ZYGOTE
        await self._probe()
        self._note_idle()
        self._overhead_bytes = _unreclaimable(self._live.cgroup)

    async def _probe(self) -> None:
        """The forbidden is tried with a program's rights before there is a first program."""
        call = wire.LaneCall(
            argv=[b"probe"], wall_us=10_000_000, cpu_us=5_000_000, output_bytes=4096, disk_bytes=64 * MIB,
            stack_bytes=8 * MIB, flags=wire.PROBE,
        )  # fmt: skip
        reply = await self._ask(wire.RUN, call, [], SETUP_S)
        if reply.flags or reply.status:
            raise PlatformError(
                "policy_not_enforced",
                f"attempt {reply.status >> 8} of call_probe.c was not denied in a new lane "
                f"(step {reply.step or '-'}, errno {reply.error}, flags {reply.flags:#x}, status {reply.status:#x})",
                hint="report this: nothing ran in it",
            )

    def _note_idle(self) -> None:
        assert self._live.cgroup is not None
        self._idle_bytes = int(read_file(_meters(self._live.cgroup)[2]))

    def prepare(self, room: Room) -> None:
        """Write the cgroup's limits for the next call where they differ. PlatformError lane_failed: it is broken."""
        limits = CgroupLimits(
            cpus=LANE_CPUS, memory_bytes=self._overhead_bytes + room.memory_bytes, pids=room.pids + OWN_PIDS
        )
        if limits == self._limits:
            return
        assert self._live.cgroup is not None
        try:
            self._live.cgroup.set_limits(limits)
        except SyscallError as error:
            self.broken = f"limits: {error}"
            raise PlatformError(NOT_BEGUN, str(error)) from error
        self._limits = limits

    async def run(self, call: LaneCall, *, stdin_fd: int = -1, exec_fd: int = -1) -> LaneReply:
        """One call to its end; the descriptors stay the caller's. When cancelled, the call is killed first.

        PlatformError lane_died when the lane went, lane_failed when nothing had begun; DeadlineExceeded when it does
        not answer. It is broken then.
        """
        self.calls += 1
        fds = [fd for fd in (stdin_fd, exec_fd) if fd >= 0]
        flags = (wire.STDIN_FD if stdin_fd >= 0 else 0) | (wire.EXEC_FD if exec_fd >= 0 else 0)
        asking = asyncio.ensure_future(self._ask(wire.RUN, call, fds, call.wall_us / 1e6 + SLACK_S, flags))
        try:
            reply = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self.cancel()
            with contextlib.suppress(PlatformError, DeadlineExceeded):
                await finish(_result(asking))
            raise
        if reply.flags & wire.BROKEN:
            self.broken = f"step {reply.step}: {os.strerror(reply.error)}"
        if self._limits is not None and wire.has_thrashed(reply, self._limits.memory_bytes):
            reply = replace(reply, flags=reply.flags | wire.THRASHED)
        return reply

    def oom_kills(self) -> int:
        """Those of the call under way, or that was when the lane died; 0 when its cgroup is gone."""
        with contextlib.suppress(SyscallError):
            return self._live.cgroup.oom_kills() - self._oom_told if self._live.cgroup is not None else 0
        return 0

    def cancel(self) -> None:
        """Kill the call that runs, if one does; its result says so."""
        if self._waiting is not None:
            message = wire.pack_request(wire.CANCEL, self._number, wire.LaneCall(argv=()), 0, 0)
            with contextlib.suppress(OSError):
                self._control.send(message)

    async def _ask(self, kind: int, call: LaneCall, fds: list[int], timeout_s: float, flags: int = 0) -> LaneReply:
        if self.broken:
            raise PlatformError(NOT_BEGUN, f"lane {self.name}: {self.broken}")
        self._number += 1
        answer: asyncio.Future[LaneReply] = asyncio.get_running_loop().create_future()
        self._waiting = answer
        try:
            self._send(kind, call, fds, flags)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as late:
            self.broken = "it does not answer"
            raise DeadlineExceeded("lane_deadline", f"lane {self.name} gave no answer in {timeout_s:g} s") from late
        except OSError as error:
            self.broken = f"send: {error.strerror}"
            raise PlatformError(NOT_BEGUN, f"lane {self.name} takes no message: {error.strerror}") from error
        except asyncio.CancelledError:
            self.broken = self.broken or "a request was given up"
            raise
        finally:
            self._waiting = None

    def _send(self, kind: int, call: LaneCall, fds: list[int], flags: int) -> None:
        payload = wire.pack_payload(call)
        with ExitStack() as opened:
            if len(payload) > wire.INLINE_MAX:
                fds = [make_memfd("dsec-call", payload, opened), *fds]
                flags |= wire.PAYLOAD_FD
            parts = [wire.pack_request(kind, self._number, call, len(payload), flags)]
            if not flags & wire.PAYLOAD_FD:
                parts.append(payload)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            self._control.sendmsg(parts, rights)

    def _readable(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._control, wire.MESSAGE_MAX, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        waiting = self._waiting
        try:
            if not message:
                raise PlatformError("lane_died", f"PID 1 of lane {self.name} ended")
            reply = _read_reply(message, fds)
            self._oom_told += reply.oom_kills
        except PlatformError as error:
            self.broken = self.broken or str(error)
            self._stop_reading()
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
            return
        finally:
            for fd in fds:
                os.close(fd)
        if waiting is not None and not waiting.done() and reply.id == self._number:
            waiting.set_result(reply)

    async def check_reset(self, reply: LaneReply) -> str:
        """Empty when nothing of the call is charged to the lane any more; else what is left.

        Page cache of the image may grow: it is given up before any limit kills. Inodes and dentries are freed a grace
        period after their last user. So only a growth is looked into, and given a moment.
        """
        if reply.memory_bytes <= self._idle_bytes + CHARGE_SLACK_BYTES:
            return ""
        assert self._live.cgroup is not None
        deadline = time.monotonic() + RESET_S
        while (left := _unreclaimable(self._live.cgroup) - self._overhead_bytes) > CHARGE_SLACK_BYTES:
            if time.monotonic() > deadline:
                return f"{left // MIB} MiB are still charged"
            await asyncio.sleep(RESET_NAP_S)
        self._note_idle()
        return ""

    def _stop_reading(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            asyncio.get_running_loop().remove_reader(self._control.fileno())

    async def close(self) -> None:
        """Kill it and give everything back. Idempotent."""
        self.broken = self.broken or "closed"
        if self._control.fileno() >= 0:
            self._stop_reading()
            self._control.close()
        net_fd = self._live.net.fd if self._live.net else -1
        if net_fd >= 0:
            # Not the pool's: its lo is down.
            os.close(net_fd)
            self._live.net = None
        await finish(self._live.end(self._backend.host, self._launcher))
        self._backend.forget_lane(self._live)


async def _result(asking: asyncio.Future[LaneReply]) -> LaneReply:
    return await asking


def _record(backend: ContainerBackend, name: str, digest: str) -> Record:
    host = backend.host
    return Record(
        boot_id=boot_id(), launcher="native", digest=digest, uid_base=host.config.uid_base,
        socket=str(host.config.run / f"{name}.sock"), cgroup={}, net={}, upper={"kind": "tmpfs", "name": name},
    )  # fmt: skip


def _silent_netns() -> int:
    with netns.own_netns() as fd:
        return fd


def _meters(cgroup: Cgroup) -> tuple[str, str, str]:
    """Files with the CPU time, the count of OOM kills and the memory in use; their kind is told by their text."""
    cpu = f"{cgroup.unified}/cpu.stat" if cgroup.unified else f"{cgroup.paths['cpuacct']}/cpuacct.usage"
    memory = cgroup.path_of("memory")
    if "memory" in cgroup.layout.v2:
        return cpu, f"{memory}/memory.events", f"{memory}/memory.current"
    return cpu, f"{memory}/memory.oom_control", f"{memory}/memory.usage_in_bytes"


def _unreclaimable(cgroup: Cgroup) -> int:
    """Bytes in use that no reclaim gives back: all but page cache, of which tmpfs is not part."""
    stat = parse_keyed(read_file(f"{cgroup.path_of('memory')}/memory.stat"))
    in_use = int(read_file(_meters(cgroup)[2]))
    cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    return max(0, in_use - cache)


def _read_reply(message: bytes, fds: list[int]) -> LaneReply:
    flags, size = wire.unpack_header(message)
    body = message[wire.REPLY.size :]
    if flags & wire.BODY_FD and fds:
        parts = []
        got = 0
        while got < size and (part := os.pread(fds[0], size - got, got)):
            parts.append(part)
            got += len(part)
        body = b"".join(parts)
    return wire.unpack_reply(message, body)
