"""A connection to one dsec-init: execs here, files in file_calls.py. The protocol is PROTOCOL.md."""

from __future__ import annotations

import asyncio
import secrets
import socket as sockets
from typing import TYPE_CHECKING

from libdsec.errors import DsecError, PlatformError

from nomad_dsec.guest import frames
from nomad_dsec.guest.execution import CALL_TIMEOUT_S, GuestExec, collect, exec_fields, parse_state, send_signal
from nomad_dsec.guest.file_calls import FileCalls
from nomad_dsec.guest.frames import WINDOW, Frame, Record, Tag
from nomad_dsec.guest.link import Link, late
from nomad_dsec.guest.spec import DEFAULT_OUTPUT_BYTES, Hello, PolicyFinding

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from nomad_dsec.guest.frames import Fields
    from nomad_dsec.guest.spec import ExecOutcome, ExecSpec, ExecState, PolicyAttempt

    Connect = Callable[[], Awaitable[sockets.socket]]

MAX_SINCE = 2**63


class GuestChannel(FileCalls):
    """All verbs of one dsec-init. Any number of calls may be in flight; each is told apart by its stream.

    Every call raises PlatformError connection_lost when the connection goes, and what the guest refuses as the error
    of its code (link.error_of). Cancelling a call cancels the request; an exec goes on.
    """

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.hello: Hello | None = None

    @classmethod
    async def connect(cls, target: str | Path | sockets.socket | Connect, *, timeout_s: float = 5.0) -> GuestChannel:
        """Connect and greet. target: path of a unix socket, a connected socket, or a coroutine function giving one.

        PlatformError connection_lost; DeadlineExceeded guest_deadline after timeout_s; ProtocolError bad_version.
        """
        loop = asyncio.get_running_loop()
        link: Link | None = None
        try:
            async with asyncio.timeout(timeout_s):
                if isinstance(target, sockets.socket) or callable(target):
                    sock = target if isinstance(target, sockets.socket) else await target()
                    sock.setblocking(False)
                    if sock.family == sockets.AF_UNIX:
                        _, link = await loop.create_unix_connection(Link, sock=sock)
                    else:
                        _, link = await loop.create_connection(Link, sock=sock)
                else:
                    _, link = await loop.create_unix_connection(Link, str(target))
                channel = cls(link)
                channel.hello = _parse_hello(await link.hello())
                return channel
        except TimeoutError:
            if link is not None:
                link.close()
            raise late("connect", timeout_s) from None
        except OSError as error:
            raise PlatformError("connection_lost", f"can't reach dsec-init: {error}") from error
        except (asyncio.CancelledError, DsecError):
            if link is not None:
                link.close()
            raise

    @property
    def closed(self) -> bool:
        """Is the connection gone."""
        return self._link.lost is not None

    async def exec(self, spec: ExecSpec, *, timeout_s: float = 30.0) -> GuestExec:
        """Start a command and attach to it; timeout_s is for the start, the spec's for the command.

        That the program could not be started is told by the outcome (`start_error`), not by an exception.
        """
        spec.check()
        exec_id = spec.exec_id or new_exec_id()
        fields = exec_fields(spec, exec_id=exec_id, credit=WINDOW, collect=False)
        return await self._attached(Frame.EXEC, fields, exec_id, spec.max_output_bytes, 0, timeout_s)

    async def attach(
        self, exec_id: str, *, since: int = 0, timeout_s: float = 30.0, max_output_bytes: int = DEFAULT_OUTPUT_BYTES
    ) -> GuestExec:
        """Attach to an exec that runs or has ended, from an offset of its output log.

        max_output_bytes bounds what wait() collects. NotFoundError unknown_exec.
        """
        fields: Fields = [(Tag.EXEC_ID, exec_id.encode()), (Tag.SINCE, min(since, MAX_SINCE)), (Tag.CREDIT, WINDOW)]
        return await self._attached(Frame.ATTACH, fields, exec_id, max_output_bytes, since, timeout_s)

    async def _attached(
        self, frame_type: Frame, fields: Fields, exec_id: str, max_bytes: int, since: int, timeout_s: float
    ) -> GuestExec:
        stream = self._link.open(frame_type, fields, what=f"exec {exec_id}")
        try:
            async with asyncio.timeout(timeout_s):
                started = Record((await stream.next()).payload)
        except BaseException as error:
            stream.close()
            if isinstance(error, TimeoutError):
                raise late(f"start of exec {exec_id}", timeout_s) from None
            raise
        pid = started.num(Tag.PID)
        return GuestExec(self._link, stream, exec_id, max_output_bytes=max_bytes, since=since, pid=pid)

    async def run(self, spec: ExecSpec, stdin: bytes = b"", *, timeout_s: float | None = None) -> ExecOutcome:
        """Run a command to its end and collect: one request out, the kept output and the end back.

        timeout_s bounds our waiting (DeadlineExceeded; the exec goes on), the spec's the command. An exec_id that is
        known is waited for and not run again; stdin is then continued where it was cut off.
        """
        spec.check()
        exec_id = spec.exec_id or new_exec_id()
        if timeout_s is None:
            return await collect(self._link, spec, exec_id, stdin)
        try:
            async with asyncio.timeout(timeout_s):
                return await collect(self._link, spec, exec_id, stdin)
        except TimeoutError:
            raise late(f"exec {exec_id}", timeout_s) from None

    async def list_execs(self, exec_id: str = "") -> list[ExecState]:
        """All execs that the guest remembers, newest first, or the one of that id (empty when unknown)."""
        fields: Fields = [(Tag.EXEC_ID, exec_id.encode())] if exec_id else []
        _, items = await self._link.call(Frame.LIST_EXECS, fields, timeout_s=CALL_TIMEOUT_S, what="list execs")
        return [parse_state(record) for item in items for record in frames.entries(item.payload)]

    async def forget(self, exec_id: str) -> None:
        """Drop an ended exec from the guest's memory. StateError exec_running, NotFoundError unknown_exec."""
        fields: Fields = [(Tag.EXEC_ID, exec_id.encode())]
        await self._link.call(Frame.FORGET, fields, timeout_s=CALL_TIMEOUT_S, what=f"forget exec {exec_id}")

    async def signal(self, exec_id: str, signum: int, *, tree: bool = True) -> None:
        """Signal an exec's whole tree (also what an ended one left behind), or its main process."""
        await send_signal(self._link, exec_id, signum, tree=tree)

    async def policy_probe(
        self, attempts: Sequence[PolicyAttempt], *, user: str = "", timeout_s: float = 10.0
    ) -> list[PolicyFinding]:
        """Try things with an exec's rights; findings in the order of the attempts."""
        fields: Fields = [(Tag.USER, user.encode())] if user else []
        for attempt in attempts:
            inner: Fields = [(Tag.KIND, attempt.kind.encode()), (Tag.TARGET, attempt.target)]
            inner += [(Tag.ARG, arg) for arg in attempt.args]
            inner += [(Tag.EXPECT, number) for number in attempt.errnos]
            fields.append((Tag.ATTEMPT, frames.encode_fields(inner)))
        payload, _ = await self._link.call(Frame.POLICY_PROBE, fields, timeout_s=timeout_s, what="policy probe")
        found = frames.entries(payload)
        if len(found) != len(attempts):
            raise PlatformError("io_error", f"policy probe: {len(found)} findings for {len(attempts)} attempts")
        return [
            PolicyFinding(attempt=attempt, errno=record.num(Tag.ERRNO), passed=bool(record.num(Tag.EXPECT)))
            for attempt, record in zip(attempts, found)
        ]

    async def clock_set(self, epoch_ns: int) -> None:
        """Set the real-time clock. DeniedError where the kernel refuses it (containers)."""
        await self._link.call(Frame.CLOCK_SET, [(Tag.CLOCK_NS, epoch_ns)], timeout_s=CALL_TIMEOUT_S, what="clock set")

    async def reseed(self, entropy: bytes) -> None:
        """Feed 1-512 bytes to the kernel's random generator. DeniedError where that is refused (containers)."""
        await self._link.call(Frame.RESEED, [(Tag.ENTROPY, entropy)], timeout_s=CALL_TIMEOUT_S, what="reseed")

    async def ping(self, *, timeout_s: float = 5.0) -> None:
        """Return when dsec-init has answered."""
        await self._link.call(Frame.PING, [], timeout_s=timeout_s, what="ping")

    async def shutdown(self) -> None:
        """Kill everything inside; dsec-init ends (a machine powers off)."""
        try:
            await self._link.call(Frame.SHUTDOWN, [], timeout_s=CALL_TIMEOUT_S, what="shutdown")
        except PlatformError as error:
            if error.code != "connection_lost":  # it was quicker than its answer
                raise

    async def close(self) -> None:
        """Drop the connection; execs go on."""
        self._link.close()


def new_exec_id() -> str:
    """An id that nobody else has."""
    return "x" + secrets.token_hex(12)


def _parse_hello(record: Record) -> Hello:
    return Hello(
        version=record.num(Tag.VERSION) & 0xFFFFFFFF,
        features=record.num(Tag.FEATURES),
        boot_id=record.raw(Tag.BOOT_ID),
        max_payload=record.num(Tag.MAX_PAYLOAD),
    )
