"""Execs as seen from the host: requests, a live handle, and how frames become an outcome."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from libdsec.errors import ProtocolError

from nomad_dsec.guest import frames
from nomad_dsec.guest.frames import MAX_DATA, WINDOW, Frame, Record, Tag
from nomad_dsec.guest.link import late
from nomad_dsec.guest.spec import STDERR, STDOUT, ExecOutcome, ExecSpec, ExecState, OutputChunk, StartError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nomad_dsec.guest.frames import Fields, RawFrame
    from nomad_dsec.guest.link import Link, Stream

CALL_TIMEOUT_S = 10.0


def exec_fields(spec: ExecSpec, *, exec_id: str, credit: int, collect: bool) -> Fields:
    """The EXEC request of a spec."""
    fields: Fields = [(Tag.EXEC_ID, exec_id.encode())]
    fields += [(Tag.ARGV, arg) for arg in spec.argv]
    fields += [(Tag.ENV, key + b"=" + value) for key, value in spec.env]
    fields += [(Tag.CWD, spec.cwd), (Tag.MAX_OUTPUT, spec.max_output_bytes), (Tag.CREDIT, credit)]
    if spec.user:
        fields.append((Tag.USER, spec.user.encode("utf-8", "surrogateescape")))
    fields += [(Tag.RLIMIT, frames.encode_rlimit(r.resource, r.soft, r.hard)) for r in spec.rlimits]
    if spec.pty is not None:
        fields.append((Tag.PTY, spec.pty[0] << 16 | spec.pty[1]))
    if spec.stdin:
        fields.append((Tag.STDIN, 1))
    if spec.timeout_s is not None:
        fields.append((Tag.TIMEOUT_MS, max(1, round(spec.timeout_s * 1000))))
    if not spec.no_new_privs:
        fields.append((Tag.NO_NEW_PRIVS, 0))
    if spec.hold:
        fields.append((Tag.HOLD, 1))
    if collect:
        fields.append((Tag.COLLECT, 1))
    return fields


def parse_output(payload: bytes) -> OutputChunk:
    """An OUTPUT frame. ProtocolError when it is none."""
    if len(payload) < frames.OUTPUT_PREFIX.size:
        raise ProtocolError("bad_frame", "OUTPUT is cut short", field="output")
    stream, offset = frames.OUTPUT_PREFIX.unpack_from(payload)
    return OutputChunk(stream=stream, offset=offset, data=payload[frames.OUTPUT_PREFIX.size :])


def _start_error(record: Record) -> StartError | None:
    if not record.has(Tag.START_CODE):
        return None
    return StartError(code=record.text(Tag.START_CODE), message=record.text(Tag.MESSAGE), errno=record.num(Tag.ERRNO))


def parse_state(record: Record) -> ExecState:
    """One entry of LIST_EXECS."""
    return ExecState(
        exec_id=record.text(Tag.EXEC_ID),
        running=bool(record.num(Tag.RUNNING)),
        pid=record.num(Tag.PID),
        exit_code=record.num(Tag.EXIT_CODE) if record.has(Tag.EXIT_CODE) else None,
        signal=record.num(Tag.TERMSIG) if record.has(Tag.TERMSIG) else None,
        start_error=_start_error(record),
        timed_out=bool(record.num(Tag.TIMED_OUT)),
        oom_killed=bool(record.num(Tag.OOM_KILLED)),
        host_signal=record.num(Tag.HOST_SIGNAL),
        total_bytes=record.num(Tag.TOTAL),
        head_end=record.num(Tag.HEAD_END),
        tail_start=record.num(Tag.TAIL_START),
        background=bool(record.num(Tag.BACKGROUND)),
        duration_s=record.num(Tag.DURATION_US) / 1e6,
    )


class Kept:
    """Output bytes of one exec as they come, bounded to a head and a tail, by stream."""

    __slots__ = ("_head", "_head_room", "_since", "_tail", "_tail_bytes", "_tail_max", "delivered")

    def __init__(self, max_bytes: int, since: int = 0) -> None:
        self._head_room = max_bytes // 2
        self._tail_max = max_bytes - self._head_room
        self._head: list[OutputChunk] = []
        self._tail: list[OutputChunk] = []
        self._tail_bytes = 0
        self._since = since
        self.delivered = 0  # bytes that the caller gets, here or otherwise

    def add(self, chunk: OutputChunk) -> None:
        """Keep it, dropping from the middle what is too much."""
        data = chunk.data
        self.delivered += len(data)
        if self._head_room:
            part = data[: self._head_room]
            self._head_room -= len(part)
            self._head.append(OutputChunk(stream=chunk.stream, offset=chunk.offset, data=part))
            data = data[len(part) :]
        if not data:
            return
        self._tail.append(OutputChunk(stream=chunk.stream, offset=chunk.offset, data=data))
        self._tail_bytes += len(data)
        if self._tail_bytes > 2 * self._tail_max + MAX_DATA:  # cut now and then, not at every chunk
            self._cut()

    def _cut(self) -> None:
        excess = self._tail_bytes - self._tail_max
        self.delivered -= excess
        first = 0
        while excess > 0 and excess >= len(self._tail[first].data):
            excess -= len(self._tail[first].data)
            first += 1
        self._tail = self._tail[first:]
        if excess > 0:
            chunk = self._tail[0]
            self._tail[0] = OutputChunk(stream=chunk.stream, offset=chunk.offset, data=chunk.data[excess:])
        self._tail_bytes = min(self._tail_bytes, self._tail_max)

    def joined(self) -> tuple[bytes, bytes]:
        """(stdout, stderr)."""
        if self._tail_bytes > self._tail_max:
            self._cut()
        chunks = self._head + self._tail
        return (
            b"".join([c.data for c in chunks if c.stream == STDOUT]),
            b"".join([c.data for c in chunks if c.stream == STDERR]),
        )

    def outcome(self, exec_id: str, payload: bytes) -> ExecOutcome:
        """What an EXITED frame and the kept output come to."""
        record = Record(payload)
        stdout, stderr = self.joined()
        total = record.num(Tag.TOTAL)
        return ExecOutcome(
            exec_id=exec_id,
            exit_code=record.num(Tag.EXIT_CODE) if record.has(Tag.EXIT_CODE) else None,
            signal=record.num(Tag.TERMSIG) if record.has(Tag.TERMSIG) else None,
            start_error=_start_error(record),
            timed_out=bool(record.num(Tag.TIMED_OUT)),
            oom_killed=bool(record.num(Tag.OOM_KILLED)),
            host_signal=record.num(Tag.HOST_SIGNAL),
            stdout=stdout,
            stderr=stderr,
            truncated=self.delivered < total - self._since,
            total_bytes=total,
            duration_s=record.num(Tag.DURATION_US) / 1e6,
            cpu_s=record.num(Tag.CPU_US) / 1e6,
            max_rss_kib=record.num(Tag.MAXRSS_KIB),
        )


class GuestExec:
    """One attached exec: iterate it for OutputChunk (a slow reader sees gaps, never stops the program), then wait().

    Closing (`detach`) leaves the exec running. One reader at a time.
    """

    def __init__(
        self, link: Link, stream: Stream, exec_id: str, *, max_output_bytes: int, since: int, pid: int
    ) -> None:
        self.exec_id = exec_id
        self.pid = pid
        self._link = link
        self._stream = stream
        self._kept = Kept(max_output_bytes, since)
        self._outcome: ExecOutcome | None = None

    async def __aiter__(self) -> AsyncIterator[OutputChunk]:
        """Output as it comes, until the program has ended. What is read here is not in wait()'s outcome."""
        while (chunk := await self._next()) is not None:
            self._kept.delivered += len(chunk.data)
            yield chunk

    async def _next(self) -> OutputChunk | None:
        while self._outcome is None:
            frame: RawFrame = await self._stream.next()
            if frame.type == Frame.OUTPUT:
                return parse_output(frame.payload)
            if frame.type == Frame.EXITED:
                self._outcome = self._kept.outcome(self.exec_id, frame.payload)
        return None

    async def write(self, data: bytes) -> None:
        """Send to stdin; waits while the program does not read. What comes after its end, or its close, is dropped."""
        if not await self._stream.send(data) and self._stream.failure is not None:
            raise self._stream.failure

    async def close_stdin(self) -> None:
        """End of file for the program (on a terminal: ^D)."""
        if not self._stream.finished:
            self._link.write(frames.encode_frame(Frame.DATA_END, self._stream.id))
            await self._link.drain()

    async def signal(self, signum: int, *, tree: bool = True) -> None:
        """Signal the whole tree, or the main process only."""
        await send_signal(self._link, self.exec_id, signum, tree=tree)

    async def resize(self, rows: int, cols: int) -> None:
        """New size of its terminal."""
        fields: Fields = [(Tag.EXEC_ID, self.exec_id.encode()), (Tag.PTY, rows << 16 | cols)]
        await self._link.call(Frame.RESIZE, fields, timeout_s=CALL_TIMEOUT_S, what="resize")

    async def wait(self, *, timeout_s: float | None = None) -> ExecOutcome:
        """Collect what is left of the output and how it ended. Output read by iteration is not in it again.

        `truncated`: this reader has missed something. DeadlineExceeded after timeout_s: call again.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (chunk := await self._next()) is not None:
                    self._kept.add(chunk)
        except TimeoutError:
            raise late(f"wait for exec {self.exec_id}", timeout_s) from None
        assert self._outcome is not None
        return self._outcome

    async def detach(self) -> None:
        """Receive no more; the exec goes on."""
        self._stream.close()


async def send_signal(link: Link, exec_id: str, signum: int, *, tree: bool) -> None:
    """SIGNAL. NotFoundError unknown_exec."""
    fields: Fields = [(Tag.EXEC_ID, exec_id.encode()), (Tag.SIGNUM, signum), (Tag.TREE, int(tree))]
    await link.call(Frame.SIGNAL, fields, timeout_s=CALL_TIMEOUT_S, what=f"signal to exec {exec_id}")


async def collect(link: Link, spec: ExecSpec, exec_id: str, stdin: bytes) -> ExecOutcome:
    """Run to the end: one request out, kept output and end back."""
    fields = exec_fields(spec, exec_id=exec_id, credit=spec.max_output_bytes + WINDOW, collect=True)
    if stdin and not spec.stdin:
        fields.append((Tag.STDIN, 1))
    stream = link.open(Frame.EXEC, fields, what="exec")
    kept = Kept(spec.max_output_bytes)
    try:
        if len(stdin) <= WINDOW:  # no need to wait for credit: all in one go
            for at in range(0, len(stdin), MAX_DATA):
                link.write(frames.encode_frame(Frame.DATA, stream.id, stdin[at : at + MAX_DATA]))
            if stdin or spec.stdin:
                link.write(frames.encode_frame(Frame.DATA_END, stream.id))
            return await _collect_end(stream, kept, exec_id)
        async with asyncio.TaskGroup() as tasks:
            feeding = tasks.create_task(_feed(link, stream, stdin))
            outcome = await _collect_end(stream, kept, exec_id)
            feeding.cancel()
        return outcome
    except BaseExceptionGroup as group:
        raise first_of(group) from None
    finally:
        stream.close()


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain exception of a group: a task group's wrapping is of no use to callers."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _feed(link: Link, stream: Stream, stdin: bytes) -> None:
    if await stream.send(stdin):
        link.write(frames.encode_frame(Frame.DATA_END, stream.id))


async def _collect_end(stream: Stream, kept: Kept, exec_id: str) -> ExecOutcome:
    while True:
        frame = await stream.next()
        if frame.type == Frame.OUTPUT:
            kept.add(parse_output(frame.payload))
        elif frame.type == Frame.EXITED:
            return kept.outcome(exec_id, frame.payload)
