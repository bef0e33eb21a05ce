"""A live command in a sandbox: its output as it comes, its stdin, signals, and re-attachment by exec id."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from libdsec._http import Cut, Persistence, encode
from libdsec.errors import DsecError, ErrorBody, PlatformError, ProtocolError, UsageError, error_from_body
from libdsec.results import ExecResult, Output, result_from_reply
from libdsec.wire import ExecReply, ExecRequest, Ok, SignalRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    import aiohttp

    from libdsec._http import Transport

_HEAD = 9  # one byte stream, eight bytes offset
_QUIET_S = 30.0
_UNREAD_BYTES = 1024 * 1024
_STDIN_CHUNK = 64 * 1024
_STREAMS: dict[int, Literal["stdout", "stderr"]] = {1: "stdout", 2: "stderr"}


class _Event(msgspec.Struct):
    """A text message of the server; which fields are set depends on `type`."""

    type: str
    exec_id: str = ""
    first: int = msgspec.field(name="from", default=0)
    to: int = 0
    error: ErrorBody | None = None


class AsyncProcess:
    """A command that runs in a sandbox, whether or not anybody listens.

    Output is pulled: while nobody reads, the node keeps the head and tail of it and the command is never held up.
    When the connection is cut, reading goes on from where it stopped; input that was on its way may be lost, so after a
    cut `write` raises instead of guessing. Use as an async context manager to detach at the end.
    """

    def __init__(
        self, transport: Transport, sandbox: str, exec_id: str, *, request: ExecRequest | None, since: int
    ) -> None:
        self.exec_id = exec_id
        self.sandbox_id = sandbox
        self.dropped_bytes = 0
        self._transport = transport
        self._request = request
        self._since = since
        self._stack: AsyncExitStack | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._pulling = asyncio.Lock()
        self._connecting = asyncio.Lock()
        self._faults: Persistence | None = None
        self._unread: deque[Output] = deque()
        self._unread_bytes = 0
        self._ended: ExecReply | None = None
        self._wrote = False
        self._input_lost = False

    @property
    def offset(self) -> int:
        """Where in the interleaved output we are; `attach(exec_id, since=offset)` goes on from here."""
        return self._since

    async def read(self) -> Output | None:
        """The next piece of output, or None when the command has ended and all was read."""
        while True:
            async with self._pulling:
                if self._unread:
                    piece = self._unread.popleft()
                    self._unread_bytes -= len(piece.data)
                    return piece
                if self._ended is not None:
                    return None
                piece_or_none = await self._pull()
                if piece_or_none is not None:
                    return piece_or_none

    async def output(self) -> AsyncIterator[Output]:
        """Every piece of output until the end."""
        while (piece := await self.read()) is not None:
            yield piece

    def __aiter__(self) -> AsyncIterator[Output]:
        return self.output()

    async def wait(self) -> ExecResult:
        """Wait for the end. Output not read by then is in the result (head and tail), and can still be read."""
        while self._ended is None:
            async with self._pulling:
                if self._ended is None and (piece := await self._pull()) is not None:
                    self._keep(piece)
        path = f"/v1/sandboxes/{self.sandbox_id}/execs/{self.exec_id}"
        return result_from_reply(await self._transport.request("GET", path, ExecReply))

    async def write(self, data: bytes | str) -> None:
        """Send to stdin; returns when it is handed to the network. PlatformError stdin_lost after a cut."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        for first in range(0, len(raw), _STDIN_CHUNK):
            await self._send(raw[first : first + _STDIN_CHUNK])

    async def close_stdin(self) -> None:
        """End of file for the command."""
        await self._send({"type": "close_stdin"})

    async def resize(self, *, rows: int, cols: int) -> None:
        """Tell the command's terminal its size."""
        await self._send({"type": "resize", "rows": rows, "cols": cols})

    async def signal(self, signal: int, *, tree: bool = True) -> None:
        """Send a signal to all processes of the command, or only to its first."""
        path = f"/v1/sandboxes/{self.sandbox_id}/execs/{self.exec_id}/signal"
        await self._transport.request("POST", path, Ok, body=SignalRequest(signal=int(signal), tree=tree))

    async def kill(self) -> None:
        """SIGKILL to all of its processes."""
        await self.signal(9)

    async def detach(self) -> None:
        """Stop listening; the command goes on."""
        stack, self._stack, self._socket = self._stack, None, None
        if stack is not None:
            await stack.aclose()

    async def __aenter__(self) -> AsyncProcess:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.detach()

    async def _start(self) -> AsyncProcess:
        """Connect for the first time: spawn or attach."""
        await self._connected()
        return self

    async def _connected(self) -> aiohttp.ClientWebSocketResponse:
        async with self._connecting:
            while self._socket is None:
                try:
                    self._socket = await self._connect()
                except BaseException as error:
                    await self.detach()
                    if not isinstance(error, PlatformError):
                        raise
                    await self._outlast(error)
            return self._socket

    async def _outlast(self, error: DsecError) -> None:
        """Pause before another try, or raise when the fault has lasted too long; data that arrives ends the count."""
        self._faults = self._faults or Persistence(self._transport.settings.reconnect_s)
        await self._faults.pause_or_raise(error, repeatable=True)

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        base = f"/v1/sandboxes/{self.sandbox_id}/execs"
        spawning = self._request is not None
        path = f"{base}/stream" if spawning else f"{base}/{self.exec_id}/stream?since={self._since}"
        self._stack = AsyncExitStack()
        socket = await self._stack.enter_async_context(self._transport.websocket(path))
        if spawning:
            await self._deliver(socket, encode(self._request).decode())
            message = await self._receive(socket)
            event = _event(message.data) if message is not None and message.type == _text() else None
            if event is None or event.type not in {"started", "error"}:
                raise Cut("the connection ended before the command was started", sent=True)
            if event.error is not None:
                raise error_from_body(event.error)
            self._request = None  # from here on it exists: reconnecting attaches
        return socket

    async def _pull(self) -> Output | None:
        """One message of the server; None when it was not output. Sets `_ended` at the end. Hold `_pulling`."""
        import aiohttp

        socket = await self._connected()
        try:
            message = await self._receive(socket)
        except Cut:
            message = None
        if message is None:
            await self._lost(socket)
            await self._outlast(Cut("the stream of the command's output was cut", sent=True))
            return None
        if message.type is aiohttp.WSMsgType.TEXT:
            await self._note(_event(message.data), message.data)
            return None
        return self._take(message.data)

    def _take(self, data: bytes) -> Output | None:
        if len(data) < _HEAD or data[0] not in _STREAMS:
            raise ProtocolError("bad_frame", "the server sent an output frame without a known stream")
        offset, body = int.from_bytes(data[1:_HEAD], "big"), data[_HEAD:]
        seen = max(0, self._since - offset)  # after a re-attach a frame may begin before what we have
        self._since = max(self._since, offset + len(body))
        self._faults = None
        body = body[seen:]
        return Output(_STREAMS[data[0]], body) if body else None

    async def _note(self, event: _Event, raw: str) -> None:
        if event.type == "exited":
            self._ended = msgspec.json.decode(raw, type=ExecReply)
            await self.detach()
        elif event.type == "gap":
            self.dropped_bytes += max(0, event.to - max(event.first, self._since))
            self._since = max(self._since, event.to)
        elif event.type == "error" and event.error is not None:
            await self.detach()
            self._input_lost = self._input_lost or self._wrote
            await self._outlast(error_from_body(event.error))

    async def _lost(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._input_lost = self._input_lost or self._wrote
        if self._socket is socket:  # a reader and a writer may both notice; only the first lets go
            await self.detach()

    def _keep(self, piece: Output) -> None:
        self._unread.append(piece)
        self._unread_bytes += len(piece.data)
        while self._unread_bytes > _UNREAD_BYTES:
            dropped = len(self._unread.popleft().data)
            self._unread_bytes -= dropped
            self.dropped_bytes += dropped

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> aiohttp.WSMessage | None:
        """The next data message, None when the connection ended or went silent (a ping stays unanswered)."""
        import aiohttp

        asked = False
        while True:
            try:
                message = await socket.receive(timeout=_QUIET_S)
            except TimeoutError:
                if asked or socket.closed:
                    return None
                asked = True
                await self._deliver(socket, None)
                continue
            if message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                return message
            if message.type is aiohttp.WSMsgType.PING:
                await socket.pong(message.data)
            elif message.type is not aiohttp.WSMsgType.PONG:
                return None
            asked = False

    async def _send(self, message: bytes | dict[str, Any]) -> None:
        if self._ended is not None:
            raise PlatformError("stdin_closed", "the command has ended", details={"exec_id": self.exec_id})
        if self._input_lost:
            raise PlatformError(
                "stdin_lost",
                "the connection was cut, and input may have been lost on the way",
                hint="attach(exec_id) gives a process that takes new input",
                details={"exec_id": self.exec_id},
            )
        socket = await self._connected()
        is_input = isinstance(message, bytes) or message["type"] == "close_stdin"
        self._wrote = self._wrote or is_input
        try:
            await self._deliver(socket, message if isinstance(message, bytes) else encode(message).decode())
        except Cut:
            await self._lost(socket)
            if is_input:
                raise

    @staticmethod
    async def _deliver(socket: aiohttp.ClientWebSocketResponse, message: bytes | str | None) -> None:
        import aiohttp

        try:
            if message is None:
                await socket.ping()
            elif isinstance(message, bytes):
                await socket.send_bytes(message)
            else:
                await socket.send_str(message)
        except (aiohttp.ClientError, ConnectionError, RuntimeError) as error:
            raise Cut(f"the stream broke: {error}", sent=True) from error


def _text() -> Any:
    import aiohttp

    return aiohttp.WSMsgType.TEXT


def _event(raw: str) -> _Event:
    try:
        return msgspec.json.decode(raw, type=_Event)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ProtocolError("bad_event", f"the server sent an event that can't be read: {error}") from error


def check_since(since: int) -> int:
    """The offset itself; UsageError when it is none."""
    if since < 0:
        raise UsageError(
            "bad_offset", f"{since} is before the beginning", field="since", hint="use an earlier process.offset"
        )
    return since
