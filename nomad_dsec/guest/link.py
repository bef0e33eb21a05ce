"""One connection to dsec-init: frames in and out, streams by number, credit, and what a lost connection means."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

from libdsec.errors import (
    CapacityError,
    DeadlineExceeded,
    DeniedError,
    DsecError,
    NotFoundError,
    NotSupported,
    PlatformError,
    ProtocolError,
    StateError,
    UsageError,
)

from nomad_dsec.guest import frames
from nomad_dsec.guest.frames import WINDOW, Frame, RawFrame, Record, Tag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nomad_dsec.guest.frames import Fields

FINAL = frozenset({Frame.OK, Frame.ERROR, Frame.EXITED})
GRANT_BYTES = WINDOW // 2

_ERROR_CLASSES: dict[str, type[DsecError]] = {
    "not_found": NotFoundError,
    "unknown_exec": NotFoundError,
    "denied": DeniedError,
    "read_only": DeniedError,
    "busy": CapacityError,
    "no_space": StateError,
    "exec_running": StateError,
    "not_supported": NotSupported,
    "no_memory": StateError,
    "no_processes": StateError,
    **dict.fromkeys(("bad_frame", "bad_version", "bad_stream", "unknown_verb"), ProtocolError),
    **dict.fromkeys(("worker_died", "io_error", "cancelled"), PlatformError),
}


def error_of(payload: bytes, *, what: str = "") -> DsecError:
    """The exception for an ERROR frame. Codes without a class of their own are faults of the request (UsageError)."""
    record = Record(payload)
    code = record.text(Tag.CODE) or "io_error"
    message = record.text(Tag.MESSAGE)
    cls = _ERROR_CLASSES.get(code, UsageError)
    return cls(
        code,
        f"{what}: {message}" if what else message,
        field=record.text(Tag.FIELD),
        retry_after_s=0.1 if cls is CapacityError else None,
        details={"errno": record.num(Tag.ERRNO)} if record.has(Tag.ERRNO) else {},
    )


def connection_lost(why: str) -> PlatformError:
    """The error that everything in flight ends with when the connection goes; never an exit code."""
    return PlatformError("connection_lost", f"the connection to dsec-init was lost: {why}")


class Stream:
    """One request in flight: incoming frames queued (bounded by the credit we grant), outgoing DATA by the guest's."""

    __slots__ = ("_frames", "_reader", "_sender", "failure", "finished", "granted", "id", "link", "what", "window")

    def __init__(self, link: Link, number: int, what: str) -> None:
        self.link = link
        self.id = number
        self.what = what
        self.window = WINDOW
        self.granted = 0
        self.finished = False
        self.failure: DsecError | None = None
        self._frames: deque[RawFrame] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._sender: asyncio.Future[None] | None = None

    def _wake(self) -> None:
        for waiter in (self._reader, self._sender):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def receive(self, frame: RawFrame) -> None:
        """A frame of this stream arrived."""
        if frame.type == Frame.CREDIT:
            self.window += frames.decode_credit(frame.payload)
        else:
            self.finished = frame.type in FINAL
            self._frames.append(frame)
        self._wake()

    def fail(self, error: DsecError) -> None:
        """The connection is gone."""
        self.finished = True
        self.failure = error
        self._wake()

    async def next(self) -> RawFrame:
        """The next frame. Raises the guest's ERROR, or connection_lost."""
        while not self._frames:
            if self.failure is not None:
                raise self.failure
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        frame = self._frames.popleft()
        if frame.type == Frame.ERROR:
            raise error_of(frame.payload, what=self.what)
        if frame.type in (Frame.DATA, Frame.ITEM, Frame.OUTPUT) and not self.finished:
            self.granted += len(frame.payload)
            if self.granted >= GRANT_BYTES:
                self.link.write(frames.encode_credit(self.id, self.granted))
                self.granted = 0
        return frame

    async def send(self, data: bytes | memoryview) -> bool:
        """Send as DATA, waiting for credit. False when the guest has ended the stream: the reason is the next frame."""
        view = memoryview(data)
        while view:
            while self.window <= 0 and not self.finished:
                self._sender = asyncio.get_running_loop().create_future()
                try:
                    await self._sender
                finally:
                    self._sender = None
            if self.finished:
                return False
            piece = view[: min(frames.MAX_DATA, self.window)]
            self.window -= len(piece)
            self.link.write(frames.encode_frame(Frame.DATA, self.id, bytes(piece)))
            await self.link.drain()
            view = view[len(piece) :]
        return not self.finished

    def close(self) -> None:
        """No more interest: CANCEL unless it is over."""
        self.link.streams.pop(self.id, None)
        if not self.finished:
            self.finished = True
            self.link.write(frames.encode_frame(Frame.CANCEL, self.id))


class Link(asyncio.Protocol):
    """The protocol object of the transport. `streams` by number; anything with receive() and fail() may be there."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.lost: DsecError | None = None
        self._reader = frames.FrameReader()
        self._transport: asyncio.Transport | None = None
        self._next_id = 1
        self._writable: asyncio.Event = asyncio.Event()
        self._writable.set()
        self._greeting: asyncio.Future[RawFrame] = asyncio.get_running_loop().create_future()

    # -- called by the transport
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; greet."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        self.write(frames.encode_frame(Frame.HELLO, 0, frames.encode_fields([(Tag.VERSION, frames.VERSION)])))

    def data_received(self, data: bytes) -> None:
        """Frames to their streams; those of streams that are gone fall away."""
        try:
            for frame in self._reader.feed(data):
                stream = self.streams.get(frame.stream)
                if stream is not None:
                    if frame.type in FINAL:
                        del self.streams[frame.stream]
                    stream.receive(frame)
                elif frame.stream == 0:
                    self._receive_own(frame)
        except ProtocolError as error:
            self._drop(error)

    def _receive_own(self, frame: RawFrame) -> None:
        if frame.type == Frame.HELLO_OK and not self._greeting.done():
            self._greeting.set_result(frame)
        elif frame.type == Frame.ERROR:
            self._drop(error_of(frame.payload))
        else:
            raise ProtocolError("bad_frame", f"frame type {frame.type:#x} on stream 0")

    def connection_lost(self, exc: Exception | None) -> None:
        """Everything in flight ends with an error."""
        self._drop(connection_lost(str(exc) if exc else "closed by the other side"))

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It has room again."""
        self._writable.set()

    # -- used by the channel
    def _drop(self, error: DsecError) -> None:
        if self.lost is None:
            self.lost = error
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.fail(self.lost)
        if not self._greeting.done():
            self._greeting.set_exception(self.lost)
            self._greeting.exception()  # nobody may be waiting for it
        self._writable.set()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()

    def write(self, data: bytes) -> None:
        """Hand bytes to the transport; dropped when the connection is gone, which the stream's reader is told."""
        if self.lost is None and self._transport is not None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait while the transport's buffer is full."""
        if not self._writable.is_set():
            await self._writable.wait()

    async def hello(self) -> Record:
        """The guest's greeting."""
        frame = await asyncio.shield(self._greeting)
        return Record(frame.payload)

    def number(self) -> int:
        """A stream number that is not in use."""
        number = self._next_id
        self._next_id = number + 1 if number < 0xFFFFFFFF else 1
        return number

    def open(self, frame_type: int, fields: Fields, *, what: str = "") -> Stream:
        """Send a request; the caller closes the stream. Raises what the connection was lost by."""
        if self.lost is not None:
            raise connection_lost(self.lost.message) if self.lost.code != "connection_lost" else self.lost
        stream = Stream(self, self.number(), what)
        frame = frames.encode_frame(frame_type, stream.id, frames.encode_fields(fields))
        self.streams[stream.id] = stream
        self.write(frame)
        return stream

    async def call(
        self, frame_type: int, fields: Fields, *, timeout_s: float | None, what: str = ""
    ) -> tuple[bytes, Sequence[RawFrame]]:
        """A request with a bounded answer: payload of OK, and the ITEM frames before it. DeadlineExceeded when late."""
        stream = self.open(frame_type, fields, what=what)
        items: list[RawFrame] = []
        try:
            async with asyncio.timeout(timeout_s):
                while (frame := await stream.next()).type != Frame.OK:
                    items.append(frame)
        except TimeoutError:
            raise late(what or Frame(frame_type).name.lower(), timeout_s) from None
        finally:
            stream.close()
        return frame.payload, items

    def close(self) -> None:
        """Drop the connection."""
        self._drop(connection_lost("closed by us"))


def late(what: str, timeout_s: float | None) -> DeadlineExceeded:
    """A wait of ours ended first; the sandbox may be fine."""
    return DeadlineExceeded("guest_deadline", f"{what}: no answer from dsec-init within {timeout_s} s")
