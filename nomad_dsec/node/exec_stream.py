"""Execs over a WebSocket: both directions at once, each with the other side's backpressure."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import WSMsgType, web
from libdsec.errors import DeadlineExceeded, DsecError, PlatformError, ProtocolError
from libdsec.wire import ExecRequest

from nomad_dsec.httpd import decode_json
from nomad_dsec.node.execs import GUEST_S, exec_spec
from nomad_dsec.node.foreign import to_dsec

if TYPE_CHECKING:
    from nomad_dsec.guest.execution import GuestExec
    from nomad_dsec.node.core import Entry
    from nomad_dsec.node.execs import Execs

FIRST_MESSAGE_S = 30.0
HEARTBEAT_S = 20.0
MAX_MESSAGE = 4 * 1024 * 1024
_HEAD = struct.Struct(">BQ")


class ClientMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text message from the client, after the first."""

    type: str
    signal: int = 15
    tree: bool = True
    rows: int = 24
    cols: int = 80


async def spawn(request: web.Request, execs: Execs, entry: Entry) -> web.WebSocketResponse:
    """Start the exec that the first message describes, then relay until it ends or the client leaves."""
    await execs.open(entry)  # a sandbox that can't run it is told by the HTTP status
    ws = await _upgrade(request)
    async with _Reported(ws, execs, entry):
        async with asyncio.timeout(FIRST_MESSAGE_S):
            first = await ws.receive()
        if first.type is not WSMsgType.TEXT:
            raise ProtocolError("bad_message", "the first message must be an ExecRequest as text")
        wanted = decode_json(first.data.encode(), ExecRequest)
        channel = await execs.open(entry)
        running = await channel.exec(exec_spec(entry.row, wanted), timeout_s=GUEST_S)
        await _relay(ws, execs, entry, running, since=0, stdin=wanted.stdin, keep_open=wanted.stdin_open)
    return ws


async def attach(request: web.Request, execs: Execs, entry: Entry, exec_id: str, since: int) -> web.WebSocketResponse:
    """Follow an exec from an offset of its log; what the guest has dropped is told as a gap."""
    channel = await execs.open(entry)
    running = await channel.attach(exec_id, since=since, timeout_s=GUEST_S)
    try:
        ws = await _upgrade(request)
    except BaseException:
        await running.detach()
        raise
    async with _Reported(ws, execs, entry):
        await _relay(ws, execs, entry, running, since=since, stdin=b"", keep_open=True)
    return ws


async def _upgrade(request: web.Request) -> web.WebSocketResponse:
    ws = web.WebSocketResponse(max_msg_size=MAX_MESSAGE, heartbeat=HEARTBEAT_S, compress=False)
    await ws.prepare(request)
    return ws


class _Reported:
    """Inside a WebSocket an error is a message: there is no status any more."""

    def __init__(self, ws: web.WebSocketResponse, execs: Execs, entry: Entry) -> None:
        self._ws = ws
        self._execs = execs
        self._entry = entry

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ConnectionError):
            return True  # the client left
        if isinstance(error, TimeoutError):
            error = DeadlineExceeded("stream_timeout", "the peer did not answer in time")
        if isinstance(error, Exception):
            shown = await self._execs.explained(self._entry, to_dsec(error))
            await self._send({"type": "error", "error": msgspec.to_builtins(shown.to_body())})
        elif error is not None:
            return False
        await self._ws.close()
        return True

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            await self._ws.send_str(msgspec.json.encode(message).decode())
        except ConnectionError:
            return


async def _relay(
    ws: web.WebSocketResponse,
    execs: Execs,
    entry: Entry,
    running: GuestExec,
    *,
    since: int,
    stdin: bytes,
    keep_open: bool,
) -> None:
    await _send(ws, {"type": "started", "exec_id": running.exec_id})
    try:
        async with asyncio.TaskGroup() as pumps:
            incoming = pumps.create_task(_incoming(ws, running, stdin, keep_open=keep_open))
            outgoing = pumps.create_task(_outgoing(ws, execs, entry, running, since))
            await asyncio.wait((incoming, outgoing), return_when=asyncio.FIRST_COMPLETED)
            for pump in (incoming, outgoing):
                pump.cancel()
    finally:
        await _detach(running)


async def _detach(running: GuestExec) -> None:
    try:
        async with asyncio.timeout(GUEST_S):
            await running.detach()
    except (TimeoutError, DsecError):
        return  # the channel is gone, and with it the attachment


async def _outgoing(ws: web.WebSocketResponse, execs: Execs, entry: Entry, running: GuestExec, since: int) -> None:
    expected = since
    async for chunk in running:
        if chunk.offset > expected:
            await _send(ws, {"type": "gap", "from": expected, "to": chunk.offset})
        await ws.send_bytes(_HEAD.pack(chunk.stream, chunk.offset) + chunk.data)
        expected = chunk.offset + len(chunk.data)
    outcome = await running.wait(timeout_s=GUEST_S)
    reply = await execs.reply(entry, outcome)
    reply.stdout = reply.stderr = b""
    if reply.total_bytes > expected:
        await _send(ws, {"type": "gap", "from": expected, "to": reply.total_bytes})
    await _send(ws, {"type": "exited", **msgspec.to_builtins(reply)})


async def _incoming(ws: web.WebSocketResponse, running: GuestExec, stdin: bytes, *, keep_open: bool) -> None:
    """Client to guest; returns when the client has left. A program that does not read holds its sender up."""
    if stdin:
        await _to_stdin(running, stdin)
        if not keep_open:
            await running.close_stdin()
    async for message in ws:
        if message.type is WSMsgType.BINARY:
            await _to_stdin(running, message.data)
        elif message.type is WSMsgType.TEXT:
            await _control(running, decode_json(message.data.encode(), ClientMessage))


async def _to_stdin(running: GuestExec, data: bytes) -> None:
    """What a program does not want any more (it closed its stdin, or ended) is no fault of the sender."""
    try:
        await running.write(data)
    except PlatformError:
        raise
    except DsecError:
        return


async def _control(running: GuestExec, message: ClientMessage) -> None:
    if message.type == "close_stdin":
        await running.close_stdin()
    elif message.type == "signal":
        await running.signal(message.signal, tree=message.tree)
    elif message.type == "resize":
        await running.resize(message.rows, message.cols)
    else:
        raise ProtocolError("bad_message", f"there is no message type {message.type[:40]!r}")


async def _send(ws: web.WebSocketResponse, message: dict[str, Any]) -> None:
    await ws.send_str(msgspec.json.encode(message).decode())
