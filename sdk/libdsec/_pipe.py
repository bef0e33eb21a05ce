"""Bridges between blocking file code in a thread and async byte streams, with a bounded amount in between."""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

T = TypeVar("T")
_PIECES = 8
_POLL_S = 0.5


class _Stopped(Exception):
    """The async side is gone; unwinds the thread."""


class _Sink(io.RawIOBase):
    """What the thread writes to; blocks while the async side is behind."""

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[bytes | None]) -> None:
        self._loop = loop
        self._queue = queue
        self.stopped = False

    def writable(self) -> bool:
        return True

    def write(self, data: object, /) -> int:
        piece = bytes(cast(bytes, data))
        if piece:
            self.put(piece)
        return len(piece)

    def put(self, piece: bytes | None) -> None:
        if self.stopped:
            raise _Stopped
        waiting = asyncio.run_coroutine_threadsafe(self._queue.put(piece), self._loop)
        while True:
            try:
                waiting.result(_POLL_S)
                return
            except concurrent.futures.TimeoutError:
                if self.stopped:
                    waiting.cancel()
                    raise _Stopped from None


async def bytes_from_writer(write: Callable[[BinaryIO], None]) -> AsyncIterator[bytes]:
    """What `write(sink)`, running in a thread, writes; its exception is raised here."""
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(_PIECES)
    sink = _Sink(asyncio.get_running_loop(), queue)

    def run() -> None:
        try:
            write(cast(BinaryIO, sink))
        except _Stopped:
            return
        finally:
            with suppress(_Stopped):
                sink.put(None)

    thread = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        while (piece := await queue.get()) is not None:
            yield piece
        await thread
    finally:
        sink.stopped = True
        while not queue.empty():
            queue.get_nowait()
        if not thread.done():
            with suppress(Exception):
                await thread


class _Source(io.RawIOBase):
    """What the thread reads from; pulls the next piece on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pieces: AsyncIterator[bytes]) -> None:
        self._loop = loop
        self._pieces = pieces
        self._rest = b""
        self.stopped = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object, /) -> int:
        view = memoryview(cast(bytearray, buffer)).cast("B")
        if not self._rest:
            self._rest = self._next()
        size = min(len(view), len(self._rest))
        view[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def _next(self) -> bytes:
        if self.stopped:
            raise _Stopped
        waiting = asyncio.run_coroutine_threadsafe(_piece(self._pieces), self._loop)
        while True:
            try:
                return waiting.result(_POLL_S)
            except concurrent.futures.TimeoutError:
                if self.stopped:
                    waiting.cancel()
                    raise _Stopped from None


async def _piece(pieces: AsyncIterator[bytes]) -> bytes:
    return await anext(pieces, b"")


async def reader_of(pieces: AsyncIterator[bytes], read: Callable[[BinaryIO], T]) -> T:
    """Run `read(source)` in a thread on the bytes of an async stream; when cancelled, the thread is ended first."""
    source = _Source(asyncio.get_running_loop(), pieces)
    buffered = io.BufferedReader(source, 256 * 1024)
    thread = asyncio.ensure_future(asyncio.to_thread(read, cast(BinaryIO, buffered)))
    try:
        return await asyncio.shield(thread)
    finally:
        source.stopped = True
        if not thread.done():
            with suppress(Exception):
                await thread
