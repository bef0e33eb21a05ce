"""The HTTP side of the SDK: a bounded keep-alive pool, errors by kind, and repeats of what may be repeated.

A call that is safe to send twice (reads, kills, execs with their id, creates with their key) survives a cut connection
or a restarting node daemon; anything else ends as a PlatformError that says that its outcome is unknown.
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from libdsec._http1 import Broken, Connection, TooLarge, connect
from libdsec._http1_parse import Malformed
from libdsec._http1_pool import Pool
from libdsec.errors import DsecError, ErrorBody, PlatformError, ProtocolError, error_from_body
from libdsec.wire import MAX_JSON_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    import aiohttp

    from libdsec._settings import Settings

_log = logging.getLogger("libdsec")
T = TypeVar("T")
MAX_ERROR_BYTES = 256 * 1024
IDLE_S = 300.0  # silence after which a waiting call is sent again: a peer that vanished without a FIN is noticed
_ONE_GO_BYTES = 512 * 1024
_QUICK_CONNECTIONS = 64
_KEPT_S = 30.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_TELL_AFTER_S = 2.0
_PROXY_STATUS = frozenset({502, 503, 504})


class _ErrorReply(msgspec.Struct):
    error: ErrorBody


class Cut(PlatformError):
    """The connection failed. `sent` is false when the server can't have seen the request."""

    def __init__(self, message: str, *, sent: bool) -> None:
        hint = "its outcome is unknown" if sent else "is the gateway up? `dsec doctor` and `dsec config show` help"
        super().__init__("connection_lost", message, hint=hint, retry_after_s=1.0)
        self.sent = sent


@dataclass(slots=True)
class Persistence:
    """Decides whether a failed attempt is worth another one, and waits before it."""

    window_s: float
    pause_s: float = _FIRST_PAUSE_S
    give_up_at: float | None = None
    began: float = field(default_factory=time.monotonic)
    told: bool = False

    async def pause_or_raise(self, error: DsecError, *, repeatable: bool) -> None:
        """Sleep before the next attempt, or raise the error when there is to be none."""
        if not self.may_retry(error, repeatable=repeatable):
            raise error
        now = time.monotonic()
        if self.give_up_at is None or now - self.began > self.window_s:
            self.give_up_at = now + self.window_s  # a new fault after a long good stretch has its own window
            self.pause_s = _FIRST_PAUSE_S
            self.told = False
        if now >= self.give_up_at:
            raise error
        if not self.told and now - (self.give_up_at - self.window_s) > _TELL_AFTER_S:
            self.told = True  # a wait that nobody explains looks like a hang
            _log.warning("%s; trying again for up to %.0f s", error, self.give_up_at - now)
        await asyncio.sleep(self.pause_s * (0.5 + random.random()))  # noqa: S311 - jitter
        self.pause_s = min(self.pause_s * 2, _LONGEST_PAUSE_S)
        self.began = time.monotonic()

    @staticmethod
    def may_retry(error: DsecError, *, repeatable: bool) -> bool:
        """Never-sent requests always; sent ones when a repeat does no harm and the fault is said to pass."""
        if isinstance(error, Cut):
            return repeatable or not error.sent
        return repeatable and isinstance(error, PlatformError) and error.retry_after_s is not None


class Transport:
    """One gateway as seen from one event loop. Not safe to share between loops; `close()` ends its connections.

    Calls whose request is at hand go by our own client; streams, WebSockets and TLS by aiohttp.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        unix = settings.endpoint.startswith("unix:")
        self.base = "http://localhost" if unix else settings.endpoint
        self._unix_path = settings.endpoint.removeprefix("unix:") if unix else ""
        self._headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._where = urlsplit(self.base)
        self._is_plain = self._where.scheme == "http" and self._where.username is None
        self._long: aiohttp.ClientSession | None = None
        self._quick: aiohttp.ClientSession | None = None
        self._pools: dict[bool, Pool] = {}
        self._closed = False

    async def request(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: Any = None,
        repeatable: bool = True,
        quick: bool = True,
        timeout_s: float = 60.0,
        max_bytes: int = MAX_JSON_BYTES,
    ) -> T:
        """Send JSON, decode JSON. timeout_s is the longest silence; raises the DsecError that the server names."""
        data = b"" if body is None else encode(body)
        decoder = decoder_of(kind)

        async def once() -> T:
            if self._is_plain and len(data) <= _ONE_GO_BYTES:
                return decode(await self._exchange(method, path, data, quick, timeout_s, max_bytes), decoder)
            # aiohttp sends bytes in one go and warns when they are many; a file object it sends in turns
            sent = io.BytesIO(data) if len(data) > _ONE_GO_BYTES else data or None
            async with self.open(method, path, data=sent, quick=quick, timeout_s=timeout_s) as reply:
                raw = await read_bounded(reply, max_bytes)
            return decode(raw, decoder)

        return await self.repeat(once, repeatable=repeatable)

    async def _exchange(
        self, method: str, path: str, data: bytes, quick: bool, timeout_s: float, max_bytes: int
    ) -> bytes:
        pool = self._pool(quick=quick)
        try:
            reply = await pool.request(method, self._where.path + path, data or None, _NONE, silence_s=timeout_s)
            try:
                if reply.status >= 300:
                    raise error_from(reply.status, await reply.read(MAX_ERROR_BYTES))
                return await reply.read(max_bytes)
            finally:
                pool.release(reply)
        except Broken as error:
            raise self._cut(method, path, error, sent=error.sent) from error
        except Malformed as error:
            raise ProtocolError("bad_reply", f"what answers at {self.settings.endpoint} is no HTTP: {error}") from error
        except TooLarge as error:
            raise ProtocolError("reply_too_large", f"the server's reply is over {max_bytes} bytes") from error

    def _pool(self, *, quick: bool) -> Pool:
        """As `_session`."""
        if self._closed:
            raise RuntimeError("this client is closed")
        pool = self._pools.get(quick)
        if pool is None:
            limit = self._limit(quick=quick)
            pool = Pool(self._connect, host=self._where.netloc, headers=self._headers, limit=limit, idle_s=_KEPT_S)
            self._pools[quick] = pool
        return pool

    async def _connect(self) -> Connection:
        where, timeout_s = self._where, self.settings.connect_timeout_s
        return await connect(where.hostname or "", where.port or 80, unix_path=self._unix_path, timeout_s=timeout_s)

    async def repeat(self, once: Callable[[], Awaitable[T]], *, repeatable: bool) -> T:
        """Run attempts until one ends the call."""
        try:
            return await once()
        except DsecError as error:
            first = error
        persistence = Persistence(self.settings.reconnect_s)
        await persistence.pause_or_raise(first, repeatable=repeatable)
        while True:
            try:
                return await once()
            except DsecError as error:
                await persistence.pause_or_raise(error, repeatable=repeatable)

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        data: Any = None,
        headers: Mapping[str, str] | None = None,
        quick: bool = False,
        timeout_s: float = IDLE_S,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One attempt; yields the reply with its body unread. timeout_s is the longest silence of the server."""
        import aiohttp
        from yarl import URL

        session = self._session(quick=quick)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.settings.connect_timeout_s, sock_read=timeout_s)
        try:
            url = URL(self.base + path, encoded=True)
            async with session.request(method, url, data=data, headers=headers, timeout=timeout) as reply:
                if reply.status >= 400:
                    raise await error_of(reply)
                yield reply
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._cut(method, path, error, sent=_was_sent(error)) from error

    @asynccontextmanager
    async def websocket(self, path: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket; a refused handshake raises the server's error."""
        import aiohttp
        from yarl import URL

        session = self._session(quick=False)
        url = URL(self.base + path, encoded=True)
        try:
            connecting = session.ws_connect(url, autoping=False, max_msg_size=16 * 1024 * 1024, compress=0)
            async with asyncio.timeout(self.settings.connect_timeout_s + 20):
                socket = await connecting
        except aiohttp.WSServerHandshakeError as error:
            # aiohttp drops the body of a refused handshake: the same URL without the upgrade tells the reason
            async with self.open("GET", path, timeout_s=20):
                pass
            raise ProtocolError("no_websocket", f"{path} refused a WebSocket with HTTP {error.status}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._cut("GET", path, error, sent=_was_sent(error)) from error
        try:
            yield socket
        finally:
            await socket.close()

    async def close(self) -> None:
        """Close every connection; later calls raise."""
        self._closed = True
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()
        sessions, self._long, self._quick = (self._long, self._quick), None, None
        for session in sessions:
            if session is not None:
                await session.close()
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    def _session(self, *, quick: bool) -> aiohttp.ClientSession:
        """Two pools, so that hundreds of waiting execs never hold up the kill that would end them."""
        if self._closed:
            raise RuntimeError("this client is closed")
        session = self._quick if quick else self._long
        if session is None:
            session = self._new_session(self._limit(quick=quick))
            if quick:
                self._quick = session
            else:
                self._long = session
        return session

    def _limit(self, *, quick: bool) -> int:
        return min(_QUICK_CONNECTIONS, self.settings.max_connections) if quick else self.settings.max_connections

    def _new_session(self, limit: int) -> aiohttp.ClientSession:
        import aiohttp

        connector: aiohttp.BaseConnector
        if self._unix_path:
            connector = aiohttp.UnixConnector(self._unix_path, limit=limit, keepalive_timeout=_KEPT_S)
        else:
            connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=_KEPT_S, ttl_dns_cache=60)
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            auto_decompress=False,
        )
        # aiohttp sends every PUT again after a cut, which would append twice; it has no public switch for that
        session._retry_connection = False
        return session

    def _cut(self, method: str, path: str, error: Exception, *, sent: bool) -> Cut:
        what = str(error) or type(error).__name__
        return Cut(f"{method} {path.partition('?')[0]} at {self.settings.endpoint}: {what}", sent=sent)


def _was_sent(error: Exception) -> bool:
    """Whether aiohttp may have sent the request."""
    import aiohttp

    return not isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))


_NONE: dict[str, str] = {}
_encoder = msgspec.json.Encoder()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def encode(body: Any) -> bytes:
    """JSON; UsageError when a text has no UTF-8 form."""
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError as error:
        from libdsec.errors import UsageError

        raise UsageError(
            "not_unicode",
            f"a text holds bytes that are not UTF-8: {error.object[:60]!r}",
            hint="pass such data by files or stdin",
        ) from error


def decoder_of(kind: type[T]) -> msgspec.json.Decoder[T]:
    """A decoder, made once for each type."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    return decoder


def decode(raw: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a reply; ProtocolError when it is not what was promised."""
    try:
        return decoder.decode(raw)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ProtocolError("bad_reply", f"the server's reply can't be read: {error}") from error


async def read_bounded(reply: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body, at most `most` bytes; ProtocolError reply_too_large beyond."""
    if reply.content_length is not None and reply.content_length <= most:
        return await reply.read()
    parts, size = [], 0
    async for chunk in reply.content.iter_any():
        size += len(chunk)
        if size > most:
            raise ProtocolError("reply_too_large", f"the server's reply is over {most} bytes")
        parts.append(chunk)
    return b"".join(parts)


async def error_of(reply: aiohttp.ClientResponse) -> DsecError:
    """The DsecError that an HTTP error reply carries."""
    return error_from(reply.status, await read_bounded(reply, MAX_ERROR_BYTES))


def error_from(status: int, raw: bytes) -> DsecError:
    """The DsecError in the body of a reply that is no success."""
    try:
        return error_from_body(decoder_of(_ErrorReply).decode(raw).error)
    except (msgspec.ValidationError, msgspec.DecodeError):
        text = raw[:200].decode("utf-8", "replace")
        if status in _PROXY_STATUS:
            return PlatformError("gateway_unavailable", f"HTTP {status} from a proxy: {text}", retry_after_s=1.0)
        return ProtocolError("bad_error_reply", f"HTTP {status} without an error of ours: {text}")
