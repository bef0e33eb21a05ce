"""Kept connections to one peer, for exchanges one after the other on each."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from libdsec._http1 import Broken
from libdsec.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from libdsec._http1 import Connection, Reply

_WITHOUT_BODY = frozenset({"GET", "DELETE"})


class Pool:
    """Connections to one peer, at most `limit` at once (0: any number); who finds none waits, in order.

    host: the Host header. idle_s: a connection unused for so long is closed. connect: makes one; it raises Broken with
    sent False when it can't.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        *,
        host: str,
        headers: Mapping[str, str],
        limit: int,
        idle_s: float,
    ) -> None:
        self._connect = connect
        self._limit = limit
        self._idle_s = idle_s
        self._idle: deque[Connection] = deque()  # the longest unused first
        self._busy: set[Connection] = set()
        self._making = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._fixed = f" HTTP/1.1\r\nHost: {host}\r\n" + render_headers(headers)
        self.closed = False

    async def request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], *, silence_s: float | None = None
    ) -> Reply:
        """Send it and wait for the head of the reply. `release` must follow. path is quoted.

        Raises Broken, Malformed, UsageError for a path or header that would be more than its line.
        """
        message = self._render(method, path, body, headers)
        connection = await self._take()
        reply = connection.start(message, silence_s)
        try:
            await reply.wait_head()
        except BaseException:
            self._drop(connection)
            raise
        return reply

    def release(self, reply: Reply) -> None:
        """The caller has had enough of it; its connection is kept when the reply was read to its end."""
        connection = reply.connection
        if not connection.finish() or self.closed:
            self._drop(connection)
            return
        self._busy.discard(connection)
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._idle_s, self._close_old)
        self._next()

    def close(self) -> None:
        """Cut everything; who waits is Broken."""
        self.closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()
        self._busy.clear()
        while self._queue:
            self._next()

    def _render(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        if not path.startswith("/") or not path.isascii() or not path.isprintable() or " " in path:
            raise UsageError(
                "bad_path", f"{path[:80]!r} can't be in a request line", field="path", hint="quote it as URLs do"
            )
        own = render_headers(headers) if headers else ""
        if body is None and method in _WITHOUT_BODY:
            return f"{method} {path}{self._fixed}{own}\r\n".encode("utf-8", "surrogateescape")
        body = body or b""
        head = f"{method} {path}{self._fixed}{own}Content-Length: {len(body)}\r\n\r\n"
        return head.encode("utf-8", "surrogateescape") + body

    async def _take(self) -> Connection:
        if self._queue or not self._has_room():
            await self._turn(first=False)
        while not self._has_room():
            await self._turn(first=True)  # somebody was quicker
        if self.closed:
            raise Broken("closed by us", sent=False)
        while self._idle:
            connection = self._idle.pop()
            if connection.gone is None:
                self._busy.add(connection)
                return connection
        self._making += 1
        try:
            connection = await self._connect()
        except BaseException:
            self._making -= 1
            self._next()
            raise
        self._making -= 1
        if self.closed:
            connection.abort()
            raise Broken("closed by us", sent=False)
        self._busy.add(connection)
        return connection

    def _has_room(self) -> bool:
        return not self._limit or self.closed or len(self._busy) + self._making < self._limit

    async def _turn(self, *, first: bool) -> None:
        turn = asyncio.get_running_loop().create_future()
        if first:
            self._queue.appendleft(turn)
        else:
            self._queue.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._next()  # it was ours; pass it on
            raise

    def _next(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _drop(self, connection: Connection) -> None:
        connection.abort()
        self._busy.discard(connection)
        self._next()

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweep = None
        while self._idle and (self._idle[0].gone or loop.time() - self._idle[0].idle_since >= self._idle_s):
            self._idle.popleft().abort()
        if self._idle:
            self._sweep = loop.call_at(self._idle[0].idle_since + self._idle_s, self._close_old)


def render_headers(headers: Mapping[str, str]) -> str:
    """Header lines. UsageError when one would be more than its line."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or "\0" in lines:
        raise UsageError("bad_header", "a header holds a line break", field="headers", hint="leave it out")
    return lines
