"""HTTP to one node daemon: keep-alive connections, typed calls with deadlines and size bounds, raw ones for relays.

Faults are told apart here: an error that the node speaks passes through unchanged; what is not its protocol is a
ProtocolError; a connection that fails is a PlatformError node_unreachable, with `details["sent"]` false when the node
can't have seen the request.
"""

from __future__ import annotations

import asyncio
import io
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from libdsec._http1 import Broken, Connection, Reply, TooLarge, connect
from libdsec._http1_parse import Malformed
from libdsec._http1_pool import Pool
from libdsec.errors import DeadlineExceeded, DsecError, ErrorBody, PlatformError, ProtocolError, error_from_body
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from nomad_dsec.gateway.endpoints import Endpoint

T = TypeVar("T")
CONNECT_TIMEOUT_S = 3.0
IDLE_CONNECTION_S = 30.0
MAX_ERROR_BYTES = 256 * 1024
RETRY_AFTER_S = 1.0
WS_MESSAGE_BYTES = 4 * 1024 * 1024
_ONE_GO_BYTES = 512 * 1024
_JSON = {"Content-Type": "application/json"}
_NONE: dict[str, str] = {}
_TWICE = frozenset({"GET", "DELETE"})  # sent again when a kept connection turns out to be closed
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
_KEEPALIVE = (  # a host that vanished without a word is noticed within half a minute: tcp(7)
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
)


class Cut(ConnectionResetError):
    """One side of a relay is gone in the middle; the other was cut too. Passes the error middleware as it is."""


class _ErrorReply(msgspec.Struct):
    error: ErrorBody


_error_decoder: msgspec.json.Decoder[_ErrorReply] = msgspec.json.Decoder(_ErrorReply)


class NodeClient:
    """Connections to one endpoint. `close` cuts what is under way; the next call connects anew."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._base = endpoint.url or "http://node"
        self._headers = {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}
        self._session: aiohttp.ClientSession | None = None
        self._pool: Pool | None = None

    @property
    def pool(self) -> Pool:
        """For whole requests, made at first use."""
        if self._pool is None or self._pool.closed:
            host = urlsplit(self._base).netloc
            self._pool = Pool(self._connect, host=host, headers=self._headers, limit=0, idle_s=IDLE_CONNECTION_S)
        return self._pool

    async def _connect(self) -> Connection:
        where = urlsplit(self._base)
        return await connect(
            where.hostname or "",
            where.port or 80,
            unix_path=self.endpoint.unix_path,
            timeout_s=CONNECT_TIMEOUT_S,
            options=_KEEPALIVE,
        )

    @property
    def session(self) -> aiohttp.ClientSession:
        """For WebSockets and bodies in pieces, made at first use."""
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                connector=_connector(self.endpoint),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                auto_decompress=False,
                timeout=_NO_TIMEOUT,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            )
        return self._session

    async def close(self) -> None:
        """Cut every connection; waiting calls end with node_unreachable."""
        if self._pool is not None:
            self._pool.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def open(
        self, method: str, path: str, *, data: Any = None, headers: Mapping[str, str] = _NONE
    ) -> AsyncIterator[NodeReply]:
        """One raw exchange; path is already quoted. Leaving by an error cuts the connection."""
        try:
            if data is None or (isinstance(data, bytes) and len(data) <= _ONE_GO_BYTES):
                reply = await self._ask(method, path, data, headers)
                try:
                    self._check(reply.status)
                    yield reply
                finally:
                    self.pool.release(reply)
            else:
                async with self._stream(method, path, data, headers) as streamed:
                    self._check(streamed.status)
                    yield streamed
        except Cut:
            raise
        except (Broken, Malformed, aiohttp.ClientError, ConnectionError, RuntimeError) as error:
            raise self.fault(error) from error

    async def _ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        try:
            return await self.pool.request(method, path, body, headers)
        except Broken as broken:
            if not broken.sent or not broken.reused or method not in _TWICE:
                raise
        return await self.pool.request(method, path, body, headers)

    @asynccontextmanager
    async def _stream(
        self, method: str, path: str, data: Any, headers: Mapping[str, str]
    ) -> AsyncIterator[_StreamedReply]:
        url = URL(self._base + path, encoded=True)
        body = io.BytesIO(data) if isinstance(data, bytes) else data  # aiohttp sends a file object in turns
        async with self.session.request(method, url, data=body, headers=headers, allow_redirects=False) as reply:
            yield _StreamedReply(reply)

    def _check(self, status: int) -> None:
        if status == 401:
            raise PlatformError(
                "node_refused_gateway",
                f"node {self.endpoint.name} does not accept the gateway's token",
                hint="put the node's token into gateway.nodes",
            )

    @asynccontextmanager
    async def websocket(self, path: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket; the handshake refused by the node raises what the node said."""
        url = URL(self._base + path, encoded=True)
        timeout = aiohttp.ClientWSTimeout(ws_close=5.0)
        try:
            async with self.session.ws_connect(
                url, max_msg_size=WS_MESSAGE_BYTES, autoclose=False, autoping=True, timeout=timeout, heartbeat=20.0
            ) as ws:
                yield ws
        except aiohttp.WSServerHandshakeError as error:
            raise await self._refusal(path, error) from error
        except (aiohttp.ClientError, ConnectionError, RuntimeError) as error:
            raise self.fault(error) from error

    async def _refusal(self, path: str, error: aiohttp.WSServerHandshakeError) -> Exception:
        """Aiohttp drops the body of a refused handshake; the same request without the upgrade is refused alike."""
        if error.status < 400:
            return self.fault(error)
        async with asyncio.timeout(CONNECT_TIMEOUT_S * 2), self.open("GET", path) as reply:
            if reply.status < 400:
                return self.fault(error)
            return error_of(await self.read(reply, MAX_ERROR_BYTES), reply.status, self.endpoint.name)

    async def call(
        self, method: str, path: str, kind: type[T], *, body: bytes | None = None, timeout_s: float, max_bytes: int
    ) -> T:
        """A typed exchange, bounded in time and size. Raises as the module says, DeadlineExceeded node_timeout too."""
        return (await self.call_with_headers(method, path, kind, body=body, timeout_s=timeout_s, max_bytes=max_bytes))[
            0
        ]

    async def call_with_headers(
        self, method: str, path: str, kind: type[T], *, body: bytes | None = None, timeout_s: float, max_bytes: int
    ) -> tuple[T, Mapping[str, str]]:
        """The same, with the reply's headers by lower-case name."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.open(method, path, data=body, headers=_JSON if body is not None else _NONE) as reply,
            ):
                if reply.status >= 400:
                    raise error_of(await self.read(reply, MAX_ERROR_BYTES), reply.status, self.endpoint.name)
                if reply.status != 200:
                    raise self._strange(f"it answered {method} {path} with status {reply.status}")
                raw = await self.read(reply, max_bytes)
                headers = reply.headers
        except TimeoutError as late:
            raise DeadlineExceeded(
                "node_timeout",
                f"node {self.endpoint.name} did not answer {method} within {timeout_s:g} s",
                retry_after_s=RETRY_AFTER_S,
            ) from late
        return self.decode(raw, kind), headers

    async def read(self, reply: NodeReply, max_bytes: int) -> bytes:
        """The whole body, or ProtocolError when it is larger than anything we asked for."""
        try:
            return await reply.read(max_bytes)
        except TooLarge as error:
            raise self._strange(str(error)) from error

    def decode(self, raw: bytes, kind: type[T]) -> T:
        """Typed JSON of a node; ProtocolError when it is not."""
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._strange(f"what should be a {kind.__name__} is not: {error}") from error

    def fault(self, error: Exception) -> Exception:
        """Our error for a failed exchange; what stopped the request's own body comes first."""
        if isinstance(error.__cause__, DsecError | Cut):
            return error.__cause__
        if isinstance(error, aiohttp.ClientResponseError | aiohttp.http_exceptions.HttpProcessingError | ValueError):
            return self._strange(str(error)[:300])
        sent = error.sent if isinstance(error, Broken) else not isinstance(error, aiohttp.ClientConnectorError)
        why = str(error)[:300] or type(error).__name__
        return PlatformError(
            "node_unreachable",
            f"node {self.endpoint.name} can't be reached: {why}",
            hint="its sandboxes go on; repeat the call when the node daemon is back",
            retry_after_s=RETRY_AFTER_S,
            details={"sent": sent},
        )

    def _strange(self, what: str) -> ProtocolError:
        return ProtocolError("bad_node_reply", f"node {self.endpoint.name} broke the protocol: {what}")


class NodeReply(Protocol):
    """What a node answered: Reply of libdsec._http1, whatever carried it."""

    @property
    def status(self) -> int:
        """Its status code."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """By lower-case name."""
        ...

    @property
    def content_length(self) -> int | None:
        """Length of the body when it was told before."""
        ...

    async def read(self, most: int) -> bytes:
        """The whole body; TooLarge when it has more than `most` bytes."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        ...


class _StreamedReply:
    """A NodeReply to a body that was sent in pieces, by aiohttp."""

    def __init__(self, reply: aiohttp.ClientResponse) -> None:
        self._reply = reply
        self.status = reply.status
        self.headers = {name.lower(): value for name, value in reply.headers.items()}
        self.content_length = reply.content_length

    async def read(self, most: int) -> bytes:
        """See NodeReply."""
        parts, size = [], 0
        async for chunk in self.chunks():
            size += len(chunk)
            if size > most:
                raise TooLarge(f"a reply of more than {most} bytes")
            parts.append(chunk)
        return b"".join(parts)

    def chunks(self) -> AsyncIterator[bytes]:
        """See NodeReply."""
        return self._reply.content.iter_any()


def error_of(raw: bytes, status: int, name: str) -> DsecError:
    """The node's own error, unchanged; ProtocolError when the body is none."""
    try:
        return error_from_body(_error_decoder.decode(raw).error)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return ProtocolError("bad_node_reply", f"node {name} answered {status} with a body that is no error: {error}")


def _connector(endpoint: Endpoint) -> aiohttp.BaseConnector:
    if endpoint.unix_path:
        return aiohttp.UnixConnector(path=endpoint.unix_path, limit=0, keepalive_timeout=IDLE_CONNECTION_S)
    return aiohttp.TCPConnector(
        limit=0, keepalive_timeout=IDLE_CONNECTION_S, ttl_dns_cache=10, socket_factory=_make_socket
    )


def _make_socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family=family, type=kind, proto=protocol)
    for level, option, value in _KEEPALIVE:
        sock.setsockopt(level, option, value)
    return sock
