"""The C process `dsec-init launch` and the socket to it: requests out, pidfds back. guest/c/launch.c is the protocol.

It runs from a sealed memfd, so that nothing in a sandbox can reach and overwrite the program that the host runs
(CVE-2019-5736). It is a child of ours and ends with us; what it starts does not.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import signal
import socket
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from libdsec.errors import PlatformError

from nomad_dsec.backends.container.finish import finish
from nomad_dsec.linux.memfd import make_memfd
from nomad_dsec.linux.pidfd import send_signal
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from pathlib import Path

ANSWER_S: Final = 20.0
_REQUEST: Final = struct.Struct("<IIQ")
_REQUEST_MAGIC: Final = 0x51525344
_REPLY: Final = struct.Struct("<QiiIi")
_CONTROL_FD: Final = 3
_log = get_log("container.spawner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """The C process's answer: a pidfd that the receiver owns, or -1 and the index of the operation that failed."""

    pid: int
    pidfd: int
    error: int
    failed: int


class Spawner:
    """The C process and the socket to it. Requests are answered in order; several may be under way."""

    def __init__(self, binary: Path) -> None:
        self.ended = False
        self._next_id = 0
        self._waiting: dict[int, asyncio.Future[Spawned]] = {}
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

    async def request(self, fds: list[int]) -> Spawned:
        """Send one and wait for the answer. When cancelled, waits all the same and kills what was started."""
        self._next_id += 1
        answer: asyncio.Future[Spawned] = self._loop.create_future()
        number = self._next_id
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._send(_REQUEST.pack(_REQUEST_MAGIC, len(fds), number), fds)
        except BaseException:
            self._waiting.pop(number, None)
            raise
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.shield(answer)
        except BaseException:
            # The caller is about to give its cgroup to somebody else: the clone must be over, and the child dead.
            started = await finish(_settled(answer))
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
            answer.set_result(Spawned(pid=pid, pidfd=pidfd, error=error, failed=failed))

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
            image = make_memfd("dsec-init", binary.read_bytes(), opened, sealed=True)
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


async def _settled(answer: asyncio.Future[Spawned]) -> Spawned | None:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await asyncio.shield(answer)
    except (TimeoutError, PlatformError):
        return None
