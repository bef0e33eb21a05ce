"""The connection to one gateway, shared by all sandboxes of an event loop, and the renewal of their leases."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from libdsec._http import Transport
from libdsec._settings import load_settings
from libdsec.errors import DsecError
from libdsec.wire import ImageInfo, ImageList, LeaseRequest, NodeInfo, NodeList, SandboxInfo

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from types import TracebackType

_LEASE_PARTS = 3  # a lease is renewed three times in its length, so one lost renewal ends nothing
_RENEWALS_AT_ONCE = 16


class AsyncClient:
    """A connection pool to one gateway for one event loop.

    Most programs never make one: `AsyncSandbox.create` uses a default client made from DSEC_ENDPOINT and DSEC_API_KEY.
    Use as an async context manager, or call `close()`.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        api_key: str | None = None,
        *,
        max_connections: int | None = None,
        connect_timeout_s: float = 10.0,
        reconnect_s: float = 60.0,
    ) -> None:
        settings = load_settings(
            endpoint,
            api_key,
            max_connections=max_connections,
            connect_timeout_s=connect_timeout_s,
            reconnect_s=reconnect_s,
        )
        self.transport = Transport(settings)
        self._leases: dict[str, tuple[float, float]] = {}
        self._renewer: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        """Where the gateway is."""
        return self.transport.settings.endpoint

    async def nodes(self) -> list[NodeInfo]:
        """The nodes that the gateway knows; needs an admin key."""
        return (await self.transport.request("GET", "/v1/nodes", NodeList)).nodes

    async def images(self) -> list[ImageInfo]:
        """The images that some node has."""
        return (await self.transport.request("GET", "/v1/images", ImageList)).images

    async def whoami(self) -> dict[str, Any]:
        """Namespace, scopes and quotas of the key in use."""
        return await self.transport.request("GET", "/v1/whoami", dict[str, Any])

    async def close(self) -> None:
        """Stop renewing leases and close every connection. Sandboxes go on until their lease or TTL ends."""
        if self._renewer is not None:
            self._renewer.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewer
            self._renewer = None
        await self.transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def keep_lease(self, sandbox: str, lease_s: float) -> None:
        """Renew this sandbox's lease until `drop_lease`, or until this process or loop ends."""
        self._leases[sandbox] = (lease_s, asyncio.get_running_loop().time() + lease_s / _LEASE_PARTS)
        if self._renewer is None:
            self._renewer = asyncio.get_running_loop().create_task(self._renew_leases(), name="libdsec-leases")

    def drop_lease(self, sandbox: str) -> None:
        """Renew no more."""
        self._leases.pop(sandbox, None)

    async def _renew_leases(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            due = [name for name, (_, at) in self._leases.items() if at <= now]
            for first in range(0, len(due), _RENEWALS_AT_ONCE):
                await asyncio.gather(*(self._renew(name) for name in due[first : first + _RENEWALS_AT_ONCE]))
            nearest = min((at for _, at in self._leases.values()), default=now + 1.0)
            await asyncio.sleep(min(1.0, max(0.05, nearest - loop.time())))

    async def _renew(self, sandbox: str) -> None:
        lease = self._leases.get(sandbox)
        if lease is None:
            return
        lease_s, loop = lease[0], asyncio.get_running_loop()
        try:
            async with asyncio.timeout(lease_s):
                path = f"/v1/sandboxes/{sandbox}/lease"
                await self.transport.request("PUT", path, SandboxInfo, body=LeaseRequest(lease_s=lease_s), timeout_s=10)
        except (DsecError, TimeoutError) as error:
            if isinstance(error, DsecError) and error.kind in {"not_found", "state", "denied"}:
                self._leases.pop(sandbox, None)  # it ended: the next call on it tells the user why
                return
        if sandbox in self._leases:
            self._leases[sandbox] = (lease_s, loop.time() + lease_s / _LEASE_PARTS)


_default_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncClient] = weakref.WeakKeyDictionary()
_closers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = weakref.WeakKeyDictionary()


async def default_client() -> AsyncClient:
    """The client of the running loop, made from the environment at first use and closed when the loop shuts down."""
    loop = asyncio.get_running_loop()
    client = _default_clients.get(loop)
    if client is None:
        client = _default_clients[loop] = AsyncClient()
        # asyncio.run() finalises the async generators of its loop: the one hook by which we close without being asked
        closer = _close_with_loop(client)
        await anext(closer)
        _closers[loop] = closer
    return client


async def _close_with_loop(client: AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.close()
