"""The native launcher: one small C process (`dsec-init launch`) per daemon starts sandboxes from lists of operations.

It is a child of ours and ends with us; what it starts does not. It runs from a sealed memfd, so that nothing in a
sandbox can reach and overwrite the program that the host runs (CVE-2019-5736). The protocol is in guest/c/launch.c.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import socket
import struct
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from libdsec.errors import DeadlineExceeded, PlatformError, UsageError

from nomad_dsec.backends.container.launcher import Launched, Slot
from nomad_dsec.backends.container.plan import (
    LAYER,
    LISTEN,
    NETNS,
    ROOTFS,
    UNIFIED,
    Plan,
    mount_fd,
    plan_container,
    procs_fd,
)
from nomad_dsec.backends.container.plan_ops import REPORT_BYTES, Report, unpack_report
from nomad_dsec.backends.container.spec import DirUpper
from nomad_dsec.linux.pidfd import send_signal
from nomad_dsec.linux.syscalls import OPEN_TREE_CLONE, open_tree
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from nomad_dsec.backends.container.spec import ContainerSpec
    from nomad_dsec.linux.cgroup_files import Layout

LAUNCH_TIMEOUT_S: Final = 20.0
_REQUEST: Final = struct.Struct("<IIQ")
_REQUEST_MAGIC: Final = 0x51525344
_REPLY: Final = struct.Struct("<QiiIi")
_NO_OP: Final = 0xFFFF_FFFF
_CONTROL_FD: Final = 3
_MFD_EXEC: Final = 0x10  # linux/memfd.h, 6.3; older kernels refuse the flag and need none
_log = get_log("container.native")


class NativeLauncher:
    """Starts containers by our own C list-runner. One per daemon; the process is started when first needed."""

    name = "native"

    def __init__(self, binary: Path, layout: Layout) -> None:
        self._binary = binary
        self._controllers = tuple(name for name in layout.hierarchies() if name != UNIFIED)
        self._unified = bool(layout.unified)
        self._spawner: Spawner | None = None

    async def probe(self) -> str:
        """Empty when the C process starts and takes a request; what a sandbox needs beyond is seen at its start."""
        try:
            await self._running()
        except (PlatformError, OSError) as error:
            return str(error)
        return ""

    def plan(self, spec: ContainerSpec) -> list[dict[str, Any]]:
        """The operations as data."""
        return self._plan(spec).to_json()

    def _plan(self, spec: ContainerSpec) -> Plan:
        return plan_container(spec, controllers=self._controllers, unified=self._unified)

    async def launch(self, spec: ContainerSpec, slot: Slot, listen_fd: int) -> Launched:
        """See Launcher.launch."""
        spawner = await self._running()
        plan = self._plan(spec)
        with ExitStack() as opened:
            memfd = _memfd("dsec-plan", plan.packed, opened)
            status, status_child = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            opened.callback(os.close, status)
            fds = _open_all(plan, spec, slot, listen_fd, opened)
            try:
                launched = await spawner.request([memfd, status_child, *fds])
            finally:
                os.close(status_child)
            if launched.pidfd < 0:
                raise _failure(plan, launched.failed, launched.error, "")
            try:
                async with asyncio.timeout(LAUNCH_TIMEOUT_S):
                    word = await _read_word(status)
                report = unpack_report(os.pread(memfd, REPORT_BYTES, len(plan.packed) - REPORT_BYTES), len(plan.ops))
                if word != b"R":
                    raise _failure(plan, report.done, report.error or errno.ECHILD, report.detail)
            except BaseException as error:
                send_signal(launched.pidfd, signal.SIGKILL)
                os.close(launched.pidfd)
                if isinstance(error, TimeoutError):
                    raise DeadlineExceeded(
                        "launch_timeout", f"dsec-init was not ready within {LAUNCH_TIMEOUT_S:g} s"
                    ) from error
                raise
        return Launched(pid=launched.pid, pidfd=launched.pidfd, steps_ms=_steps(plan, report))

    async def forget(self, sandbox: str, runtime_dir: Path) -> None:
        """Nothing is kept: all of a container is in its namespaces and cgroups."""

    async def _running(self) -> Spawner:
        if self._spawner is None or self._spawner.ended:
            if self._spawner is not None:
                self._spawner.close()
            self._spawner = Spawner(self._binary)
        return self._spawner

    async def close(self) -> None:
        """End the C process; its sandboxes live on."""
        if self._spawner is not None:
            self._spawner.close()
            self._spawner = None


class _Started:
    """The C process's answer: a pidfd, or the operation of its own that failed."""

    __slots__ = ("error", "failed", "pid", "pidfd")

    def __init__(self, *, pid: int, pidfd: int, error: int, failed: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.error = error
        self.failed = failed


class Spawner:
    """The C process and the socket to it. Requests are answered in order; several may be under way."""

    def __init__(self, binary: Path) -> None:
        self.ended = False
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[_Started]] = {}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._pid = _start(binary, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours.fileno(), self._on_readable)

    async def request(self, fds: list[int]) -> _Started:
        """Send one and wait for the answer. When cancelled, waits all the same and kills what was started."""
        self._next_id += 1
        answer: asyncio.Future[_Started] = self._loop.create_future()
        number = self._next_id
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(LAUNCH_TIMEOUT_S):
                await self._send(_REQUEST.pack(_REQUEST_MAGIC, len(fds), number), fds)
        except BaseException:
            self._waiting.pop(number, None)
            raise
        try:
            async with asyncio.timeout(LAUNCH_TIMEOUT_S):
                return await asyncio.shield(answer)
        except BaseException:
            # The caller is about to give its cgroup to somebody else: the clone must be over, and the child dead.
            started = await _despite_cancel(_settled(answer))
            if started is not None and started.pidfd >= 0:
                send_signal(started.pidfd, signal.SIGKILL)
                os.close(started.pidfd)
            raise

    async def _send(self, message: bytes, fds: list[int]) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        while True:
            try:
                self._socket.sendmsg([message], ancillary)
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)
            except OSError as error:
                self._end()
                raise PlatformError("launcher_died", f"dsec-init launch is gone: {error.strerror}") from error

    def _on_readable(self) -> None:
        for _ in range(len(self._waiting) + 1):
            try:
                message, fds, _, _ = socket.recv_fds(self._socket, _REPLY.size, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                message, fds = b"", []
            if len(message) != _REPLY.size:
                self._end()
                return
            request_id, pid, error, failed, _ = _REPLY.unpack(message)
            answer = self._waiting.pop(request_id, None)
            pidfd = fds[0] if fds else -1
            if answer is None or answer.done():
                if pidfd >= 0:
                    os.close(pidfd)
                continue
            answer.set_result(_Started(pid=pid, pidfd=pidfd, error=error, failed=failed))

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._socket.fileno())
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(PlatformError("launcher_died", "dsec-init launch ended before it answered"))
        _log.warning("dsec-init launch has ended; the next start brings up a new one", pid=self._pid)

    def close(self) -> None:
        """Close the socket, at which the process ends, and reap it."""
        if not self.ended:
            self.ended = True
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _start(binary: Path, control: int) -> int:
    """Start the C process from a sealed copy of its file; returns its pid."""
    with ExitStack() as opened:
        try:
            image = _memfd("dsec-init", binary.read_bytes(), opened, sealed=True)
        except FileNotFoundError as missing:
            raise PlatformError(
                "dsec_init_missing", f"{binary} is not there", hint="build it: python hatch_build.py"
            ) from missing
        return os.posix_spawn(
            f"/proc/self/fd/{image}",
            ["dsec-init", "launch", "--control-fd", str(_CONTROL_FD)],
            {},
            file_actions=[(os.POSIX_SPAWN_DUP2, control, _CONTROL_FD)],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM],
        )


def _memfd(name: str, content: bytes, opened: ExitStack, *, sealed: bool = False) -> int:
    flags = os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealed else 0)
    try:
        fd = os.memfd_create(name, flags | (_MFD_EXEC if sealed else 0))
    except OSError as error:
        if error.errno != errno.EINVAL or not sealed:
            raise
        fd = os.memfd_create(name, flags)
    opened.callback(os.close, fd)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    if sealed:
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    return fd


def _open_all(plan: Plan, spec: ContainerSpec, slot: Slot, listen_fd: int, opened: ExitStack) -> list[int]:
    """The descriptors that the plan names, in its order; those opened here are closed by `opened`."""
    known = {LISTEN: listen_fd, UNIFIED: slot.cgroup_fd, NETNS: slot.net.fd}
    paths: dict[str, tuple[str, int]] = {
        procs_fd(name): (f"{path}/cgroup.procs", os.O_WRONLY) for name, path in slot.cgroup.paths.items()
    }
    trees = {ROOTFS: str(spec.rootfs)} | {mount_fd(i): str(mount.source) for i, mount in enumerate(spec.mounts)}
    if isinstance(spec.upper, DirUpper):
        trees[LAYER] = str(spec.upper.path)
    fds: list[int] = []
    for name in plan.fds:
        fd = known.get(name)
        if fd is None:
            fd = open_tree(trees[name], OPEN_TREE_CLONE) if name in trees else _open(*paths[name])
            opened.callback(os.close, fd)
        fds.append(fd)
    return fds


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC)


async def _read_word(fd: int) -> bytes:
    """One byte of the status pipe; empty when the process died without a word."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return os.read(fd, 1)
        except BlockingIOError:
            ready = loop.create_future()
            loop.add_reader(fd, _wake, ready)
            try:
                await ready
            finally:
                loop.remove_reader(fd)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _settled(answer: asyncio.Future[_Started]) -> _Started | None:
    try:
        async with asyncio.timeout(LAUNCH_TIMEOUT_S):
            return await asyncio.shield(answer)
    except (TimeoutError, PlatformError):
        return None


async def _despite_cancel(work: Awaitable[_Started | None]) -> _Started | None:
    """Finish bounded work although the caller is cancelled, again and again if need be."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    return task.result()


def _steps(plan: Plan, report: Report) -> dict[str, float]:
    """Milliseconds by kind of operation: a plan has dozens, of which a reader wants the sums."""
    steps: dict[str, float] = {}
    last = 0
    for op, end in zip(plan.ops, report.ends_us, strict=True):
        if end:
            steps[op.name] = steps.get(op.name, 0.0) + (end - last) / 1000
            last = end
    return steps


def _failure(plan: Plan, index: int, number: int, detail: str) -> PlatformError | UsageError:
    if index == _NO_OP or index >= len(plan.ops):
        return PlatformError("launch_failed", f"dsec-init launch refused the request: {os.strerror(number)}")
    op = plan.ops[index]
    details = {"step": op.step, "errno": errno.errorcode.get(number, str(number)), "detail": detail}
    if op.name in ("pin", "readonly") and number == errno.ENOENT:
        return UsageError(
            "protected_path_missing",
            f"{op.step.partition(' ')[2]} is not in the image, so it can't be protected",
            field="policy.protected_paths",
            hint="name a file or directory of the image, or leave it out",
            details=details,
        )
    what = f"{op.step} ({detail})" if detail and detail not in op.step else op.step
    return PlatformError("launch_failed", f"step {what}: {os.strerror(number)}", details=details)
