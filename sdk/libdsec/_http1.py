"""One HTTP/1.1 connection: a request that is at hand goes out in one write, a reply comes back whole or piece by piece.

It exists because most of our calls are shorter than what a general client does for one. Nothing is repeated, redirected
or decoded here; WebSockets, TLS and bodies that are sent piece by piece stay with aiohttp. Pools are in _http1_pool.py.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final, cast

from libdsec._http1_parse import Malformed, ReplyParser

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    Option = tuple[int, int, int]  # level, name, value: setsockopt(2)

HELD_BYTES: Final = 256 * 1024  # of a reply that nobody takes, before its sender is held up


class Broken(Exception):
    """The exchange failed below HTTP. sent: the peer may have seen the request.

    reused: nothing of a reply came, on a connection that had carried another: the peer may have just ended it.
    """

    def __init__(self, message: str, *, sent: bool, reused: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        self.reused = reused


class TooLarge(Exception):
    """The reply is longer than the caller takes."""


class Connection(asyncio.Protocol):
    """One connection, and the exchange on it when there is one."""

    __slots__ = (
        "_exchanges",
        "_loop",
        "_silence",
        "_silence_s",
        "_touched",
        "_transport",
        "_waiter",
        "gone",
        "idle_since",
        "reply",
    )

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._silence_s = 0.0
        self._touched = 0.0
        self.reply: Reply | None = None
        self.gone: Exception | None = None
        self.idle_since = 0.0
        self._exchanges = 0

    # -- called by the transport
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep it."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of the reply."""
        reply = self.reply
        if reply is None:
            self._lose(Broken("it spoke unasked", sent=False))
            return
        try:
            reply.parser.feed(data)
        except Malformed as error:
            self._lose(error)
            return
        self._touched = self._loop.time()
        reply.arrived(len(data))
        self._wake()

    def eof_received(self) -> bool:
        """The peer sends no more: that may be the end of a body without a length."""
        if self.reply is not None and self.reply.parser.feed_eof():
            self._wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """What waits ends with an error."""
        why = str(exc) if exc else "the peer closed the connection"
        silent = self.reply is not None and not self.reply.has_begun
        self._lose(Broken(why, sent=True, reused=silent and self._exchanges > 1))

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _lose(self, why: Exception) -> None:
        self.gone = self.gone or why
        self.stop_timer()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()
        self._wake()

    # -- used by the pool and the reply
    def start(self, request: bytes, silence_s: float | None) -> Reply:
        """Send a request. silence_s: how long the peer may say nothing before the exchange is Broken."""
        assert self._transport is not None
        reply = self.reply = Reply(self)
        self._exchanges += 1
        if silence_s is not None:
            self._silence_s, self._touched = silence_s, self._loop.time()
            self._silence = self._loop.call_later(silence_s, self._check_silence)
        self._transport.write(request)
        return reply

    def _check_silence(self) -> None:
        left_s = self._touched + self._silence_s - self._loop.time()
        if left_s <= 0:
            self._lose(Broken(f"no word came within {self._silence_s:g} s", sent=True))
        else:
            self._silence = self._loop.call_later(left_s, self._check_silence)

    def stop_timer(self) -> None:
        """The exchange is over."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    async def wait(self) -> None:
        """Until something has come. Raises what the connection was lost by."""
        if self.gone is not None:
            raise self.gone
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def hold(self, *, on: bool) -> None:
        """Stop reading from the peer, or go on."""
        if self._transport is not None and not self._transport.is_closing():
            if on:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def finish(self) -> bool:
        """The caller has had enough of the reply; whether another exchange may follow on this connection."""
        self.stop_timer()
        reply, self.reply = self.reply, None
        unsent = self._transport is None or self._transport.get_write_buffer_size()
        return self.gone is None and reply is not None and reply.is_consumed and not unsent

    def abort(self) -> None:
        """Cut it."""
        self.reply = None
        self._lose(Broken("closed by us", sent=True))


class Reply:
    """What came back: `status`, `headers` with names in lower case, `content_length` (None: unknown), and the body."""

    __slots__ = ("_begun", "_held", "_holding", "connection", "parser")

    def __init__(self, connection: Connection) -> None:
        self.parser = ReplyParser()
        self.connection = connection
        self._begun = False
        self._held = 0
        self._holding = False

    @property
    def status(self) -> int:
        """Its status code."""
        return self.parser.status

    @property
    def headers(self) -> Mapping[str, str]:
        """Its headers by lower-case name."""
        return self.parser.headers

    @property
    def content_length(self) -> int | None:
        """Length of the body in bytes when it was told before."""
        return self.parser.length

    @property
    def is_consumed(self) -> bool:
        """It came whole, was taken whole, and its sender expects to be asked again."""
        parser = self.parser
        return parser.is_whole and parser.keeps and not parser.pieces and not self._holding

    @property
    def has_begun(self) -> bool:
        """Something of it came."""
        return self._begun

    def arrived(self, size: int) -> None:
        """Called with each piece; a sender that is far ahead of its reader is held up."""
        self._begun = True
        self._held += size
        if self._held > HELD_BYTES and not self._holding and not self.parser.is_whole:
            self._holding = True
            self.connection.hold(on=True)

    async def wait_head(self) -> None:
        """Until status and headers are there."""
        while not self.parser.status:
            await self.connection.wait()

    async def read(self, most: int) -> bytes:
        """The whole body; TooLarge when it has more than `most` bytes."""
        parser = self.parser
        if parser.length is not None and parser.length > most:
            raise TooLarge(f"a reply of {parser.length} bytes where at most {most} make sense")
        if parser.is_whole and len(parser.pieces) == 1 and len(parser.pieces[0]) <= most:
            return parser.pieces.pop()
        parts, size = [], 0
        async for piece in self.chunks():
            size += len(piece)
            if size > most:
                raise TooLarge(f"a reply of more than {most} bytes")
            parts.append(piece)
        return b"".join(parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Broken when it ends before its end."""
        parser = self.parser
        while True:
            pieces, parser.pieces, self._held = parser.pieces, [], 0
            for piece in pieces:
                yield piece
            if pieces:
                continue
            if parser.is_whole:
                return
            if self._holding:
                self._holding = False
                self.connection.hold(on=False)
            await self.connection.wait()


async def connect(
    host: str, port: int, *, unix_path: str = "", timeout_s: float, options: Sequence[Option] = ()
) -> Connection:
    """A connection to a TCP port, or to a Unix socket when a path is given. Broken (never sent) when there is none."""
    loop = asyncio.get_running_loop()
    transport: asyncio.BaseTransport
    try:
        async with asyncio.timeout(timeout_s):
            if unix_path:
                transport, made = await loop.create_unix_connection(Connection, unix_path)
            else:
                transport, made = await loop.create_connection(Connection, host, port)
    except TimeoutError as late:
        raise Broken(f"no connection within {timeout_s:g} s", sent=False) from late
    except OSError as error:
        raise Broken(str(error) or type(error).__name__, sent=False) from error
    sock = transport.get_extra_info("socket")
    if not unix_path and sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in options:
            sock.setsockopt(*option)
    return made
