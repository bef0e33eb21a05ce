"""Consul, typed and asynchronous, over py-consul: the only importer of that library.

The library blocks, so calls run on a small pool of threads of their own; each has a deadline. Its exceptions stop here.
"""

from __future__ import annotations

import asyncio
import base64
import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import consul
import requests
from consul.exceptions import ACLDisabled, ACLPermissionDenied, ConsulException, NotFound
from libdsec.errors import DeadlineExceeded, DeniedError, PlatformError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nomad_dsec.cluster.settings import Endpoint

T = TypeVar("T")
_THREADS = 4
TXN_LIMIT = 64  # operations in one transaction, by Consul's own bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One healthy or unhealthy instance in the catalogue."""

    node: str
    service_id: str
    address: str
    port: int
    tags: tuple[str, ...]
    meta: dict[str, str]
    passing: bool
    output: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """One write of a batch. value None deletes."""

    key: str
    value: bytes | None
    session: str = ""


class ConsulClient:
    """One agent. Close it when done."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float = 5.0) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="consul")
        self._api = self._make(timeout_s)

    def _make(self, timeout_s: float) -> Any:
        tls = self.endpoint.tls
        return consul.Consul(
            host=self.endpoint.host,
            port=self.endpoint.port,
            token=self.endpoint.token or None,
            scheme=self.endpoint.scheme,
            verify=tls.trust,
            cert=tls.client_pair,
            connections_timeout=timeout_s,
        )

    async def _call(self, what: str, work: Callable[[Any], T], *, timeout_s: float | None = None) -> T:
        limit_s = timeout_s or self._timeout_s
        # a blocking query needs a longer read timeout than the pool's own client has
        api = self._api if timeout_s is None else self._make(timeout_s)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s + 1):
                return await loop.run_in_executor(self._threads, work, api)
        except (TimeoutError, requests.Timeout) as error:
            raise DeadlineExceeded("consul_timeout", f"Consul did not answer to {what} within {limit_s:g} s") from error
        except (ACLDisabled, ACLPermissionDenied) as error:
            hint = "see policies/acl/ for the rules that each component needs"
            raise DeniedError("consul_denied", f"Consul refused {what}: {error}", hint=hint) from error
        except (ConsulException, requests.RequestException, OSError) as error:
            raise PlatformError("consul_unreachable", f"{what} by Consul failed: {error}", retry_after_s=1.0) from error

    async def register(
        self,
        *,
        name: str,
        service_id: str,
        address: str,
        port: int,
        ttl_s: float,
        tags: Sequence[str] = (),
        meta: dict[str, str] | None = None,
        gone_after_s: float = 60.0,
    ) -> None:
        """Register a service with a TTL check that Consul itself removes when it is critical for gone_after_s."""
        check = consul.Check.ttl(f"{ttl_s:g}s") | {"DeregisterCriticalServiceAfter": f"{max(60.0, gone_after_s):g}s"}
        await self._call(
            f"registering {service_id}",
            lambda api: api.agent.service.register(
                name, service_id=service_id, address=address, port=port, tags=list(tags), meta=meta or {}, check=check
            ),
        )

    async def heartbeat(self, service_id: str, *, healthy: bool, note: str) -> None:
        """Renew a TTL check; raises when the agent does not know the service (register again then)."""

        def work(api: Any) -> None:
            verb = api.agent.check.ttl_pass if healthy else api.agent.check.ttl_fail
            if not verb(f"service:{service_id}", note[:4096]):
                raise NotFound(service_id)

        await self._call(f"the heartbeat of {service_id}", work)

    async def deregister(self, service_id: str) -> None:
        """Remove a service; an unknown one is fine."""
        await self._call(f"removing {service_id}", lambda api: api.agent.service.deregister(service_id))

    async def services(self, name: str, *, index: int = 0, wait_s: float = 0.0) -> tuple[int, list[Service]]:
        """All instances and the index for the next blocking query (0: answer at once)."""
        blocking: dict[str, Any] = {"index": str(index), "wait": f"{wait_s:g}s"} if index and wait_s else {}
        # Consul adds up to a sixteenth of jitter to the wait
        limit_s = wait_s * 1.1 + self._timeout_s if blocking else None
        answer = await self._call(
            f"listing {name}", lambda api: api.health.service(name, **blocking), timeout_s=limit_s
        )
        found, rows = int(answer[0]), answer[1]
        return found, [_service(row) for row in rows]

    async def write(self, puts: Sequence[Put]) -> None:
        """KV writes, 64 to a transaction; each transaction is whole or not at all."""
        for start in range(0, len(puts), TXN_LIMIT):
            payload = [_operation(put) for put in puts[start : start + TXN_LIMIT]]
            await self._call("a batch of writes", functools.partial(_put_batch, payload))

    async def read(self, prefix: str) -> dict[str, bytes]:
        """All keys below a prefix."""
        answer = await self._call(f"reading {prefix}", lambda api: api.kv.get(prefix, recurse=True))
        return {row["Key"]: row["Value"] or b"" for row in answer[1] or []}

    async def open_session(self, name: str, *, ttl_s: float, delete: bool) -> str:
        """A session that ends when not renewed for ttl_s (10 s at least); `delete` removes its keys then."""

        def work(api: Any) -> str:
            return str(
                api.session.create(
                    name, ttl=round(max(10.0, ttl_s)), behavior="delete" if delete else "release", lock_delay=0
                )
            )

        return await self._call("opening a session", work)

    async def renew_session(self, session: str) -> bool:
        """False when the session is gone."""

        def work(api: Any) -> bool:
            try:
                api.session.renew(session)
            except NotFound:
                return False
            return True

        return await self._call("renewing a session", work)

    async def end_session(self, session: str) -> None:
        """End it; its keys are removed or released."""
        await self._call("ending a session", lambda api: api.session.destroy(session))

    async def try_lock(self, key: str, value: bytes, session: str) -> bool:
        """Whether this session holds the key now."""
        return await self._call(f"locking {key}", lambda api: bool(api.kv.put(key, value, acquire=session)))

    async def unlock(self, key: str, session: str) -> None:
        """Give a lock back."""
        await self._call(f"unlocking {key}", lambda api: api.kv.put(key, b"", release=session))

    async def close(self) -> None:
        """Let go of the threads; a call that still blocks ends by its own timeout."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(_close_http, self._api)


def _put_batch(payload: list[dict[str, Any]], api: Any) -> None:
    api.txn.put(payload)


def _close_http(api: Any) -> None:
    session = getattr(api.http, "session", None)
    if session is not None:
        session.close()


def _operation(put: Put) -> dict[str, Any]:
    if put.value is None:
        return {"KV": {"Verb": "delete", "Key": put.key}}
    value = base64.b64encode(put.value).decode("ascii")
    if put.session:
        return {"KV": {"Verb": "lock", "Key": put.key, "Value": value, "Session": put.session}}
    return {"KV": {"Verb": "set", "Key": put.key, "Value": value}}


def _service(row: dict[str, Any]) -> Service:
    checks = row.get("Checks") or []
    return Service(
        node=row["Node"]["Node"],
        service_id=row["Service"]["ID"],
        address=row["Service"]["Address"] or row["Node"]["Address"],
        port=int(row["Service"]["Port"]),
        tags=tuple(row["Service"].get("Tags") or ()),
        meta=dict(row["Service"].get("Meta") or {}),
        passing=all(check["Status"] == "passing" for check in checks),
        output=" ".join(check.get("Output", "") for check in checks if check["Status"] != "passing").strip(),
    )
