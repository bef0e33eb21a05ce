"""The transport under py-consul: its paths and parsing, on our own aiohttp session.

The library's own asyncio client forgets the token in transactions, can't be given a client certificate alone, and takes
CONSUL_HTTP_TOKEN over what it was told; so only its `base` is used. A cancelled call closes its connection at once: no
thread outlives a stop in a blocking query.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

import aiohttp
from consul import base
from libdsec.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nomad_dsec.cluster.settings import Endpoint, Tls

MAX_REPLY_BYTES = 64 * 1024 * 1024
CONNECTIONS = 8


class _Adapter(base.HTTPClient):  # type: ignore[misc]  # the library is not typed
    """What py-consul calls; each verb gives a coroutine, which its callers pass on."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint.host, endpoint.port, endpoint.scheme)
        self.base_uri = endpoint.url
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            token = self._endpoint.token
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS, ssl=_context(self._endpoint.tls)),
                headers={"X-Consul-Token": token} if token else {},
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),  # the caller's deadline is the only one
            )
        return self._session

    async def _ask(self, callback: Callable[[Any], Any], method: str, path: str, params: Any, data: Any = None) -> Any:
        # a redirect would carry the token to another host
        async with self._open().request(
            method, self.uri(path, params), data=data or None, allow_redirects=False
        ) as reply:
            body = await _read_all(reply)
            return callback(base.Response(reply.status, reply.headers, body.decode("utf-8", "replace")))

    def get(self, callback: Any, path: str, params: Any = None, headers: Any = None, **_more: Any) -> Any:
        """See the library."""
        return self._ask(callback, "GET", path, params)

    def put(self, callback: Any, path: str, params: Any = None, data: Any = "", headers: Any = None, **_m: Any) -> Any:
        """See the library."""
        return self._ask(callback, "PUT", path, params, data)

    def delete(
        self, callback: Any, path: str, params: Any = None, data: Any = "", headers: Any = None, **_m: Any
    ) -> Any:
        """See the library."""
        return self._ask(callback, "DELETE", path, params, data)

    def post(self, callback: Any, path: str, params: Any = None, data: Any = "", headers: Any = None, **_m: Any) -> Any:
        """See the library."""
        return self._ask(callback, "POST", path, params, data)

    async def close(self) -> None:
        """Cut every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class Api(base.Consul):  # type: ignore[misc]  # the library is not typed
    """py-consul's API of one agent; every method gives a coroutine."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        super().__init__(host=endpoint.host, port=endpoint.port, scheme=endpoint.scheme, verify=True)
        self.token = endpoint.token or None  # the library prefers CONSUL_HTTP_TOKEN

    def http_connect(self, *_given: Any, **_more: Any) -> _Adapter:
        """Called by the library's constructor."""
        return _Adapter(self._endpoint)

    async def close(self) -> None:
        """Cut every connection."""
        await self.http.close()


async def _read_all(reply: aiohttp.ClientResponse) -> bytes:
    chunks, had = [], 0
    async for chunk in reply.content.iter_chunked(256 * 1024):
        had += len(chunk)
        if had > MAX_REPLY_BYTES:
            raise aiohttp.ClientPayloadError(f"a reply of Consul is over {MAX_REPLY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _context(tls: Tls) -> ssl.SSLContext | bool:
    """For aiohttp: a context of our own where files are given or trust is off."""
    if tls.verify and not (tls.ca_file or tls.cert_file):
        return True
    try:
        context = ssl.create_default_context(cafile=tls.ca_file or None)
        if not tls.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if tls.client_pair is not None:
            context.load_cert_chain(*tls.client_pair)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            "bad_config", f"the TLS files can't be used: {error}", field="consul.ca_file", hint="PEM files are wanted"
        ) from error
    return context
