"""The node daemon's Unix socket as the drivers see it: JSON over HTTP, a deadline on every call.

aiohttp is a third of what a plugin's start costs, and two of an agent's three starts never call the daemon: it is
imported at the first call.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from libdsec.errors import DeadlineExceeded, ErrorBody, PlatformError, ProtocolError, error_from_body

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
_REPLY_BYTES = 128 * 1024 * 1024


class _ErrorReply(msgspec.Struct):
    error: ErrorBody


class NodeApi:
    """One session; connections are made on demand and kept until close()."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            connector = aiohttp.UnixConnector(path=self.socket_path, limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    async def call(self, method: str, path: str, kind: type[T], body: Any = None, *, timeout_s: float = 10.0) -> T:
        """One request. Raises the node's own error, PlatformError node_unreachable, or DeadlineExceeded."""
        from aiohttp import ClientError

        data = msgspec.json.encode(body) if body is not None else None
        try:
            async with asyncio.timeout(timeout_s):
                async with self._open().request(method, f"http://node{path}", data=data) as reply:
                    raw = await reply.content.read(_REPLY_BYTES)
                    return self._decode(reply.status, raw, kind)
        except TimeoutError as error:
            raise DeadlineExceeded("node_timeout", f"the node daemon did not answer within {timeout_s:g} s") from error
        except (ClientError, OSError) as error:
            raise self.unreachable(error) from error

    async def websocket(self, path: str, *, timeout_s: float = 10.0) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket of the node daemon; the caller closes it."""
        from aiohttp import ClientError

        try:
            async with asyncio.timeout(timeout_s):
                return await self._open().ws_connect(f"http://node{path}", max_msg_size=16 * 1024 * 1024)
        except TimeoutError as error:
            raise DeadlineExceeded("node_timeout", f"the node daemon did not answer within {timeout_s:g} s") from error
        except (ClientError, OSError) as error:
            raise self.unreachable(error) from error

    def unreachable(self, error: Exception) -> PlatformError:
        """The error for a node daemon that is not there."""
        return PlatformError(
            "node_unreachable",
            f"the node daemon does not answer at {self.socket_path}: {error}",
            hint="start it (`dsec node run`), or set node_socket in the plugin's config",
            retry_after_s=1.0,
        )

    @staticmethod
    def _decode(status: int, raw: bytes, kind: type[T]) -> T:
        try:
            if status >= 400:
                raise error_from_body(msgspec.json.decode(raw, type=_ErrorReply).error)
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ProtocolError("bad_node_reply", f"the node daemon's reply can't be read: {error}") from error
