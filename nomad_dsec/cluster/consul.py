"""Consul, typed and asynchronous, over py-consul (paths and parsing) and our own transport. Its exceptions stop here.

Every call has a deadline; a cancelled one ends at once.
"""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import consul
from consul.callback import CB
from consul.exceptions import ACLDisabled, ACLPermissionDenied, ConsulException, NotFound
from libdsec.errors import DeadlineExceeded, DeniedError, DsecError, PlatformError, ProtocolError

from nomad_dsec.cluster.consul_http import Api

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from nomad_dsec.cluster.rights import Right
    from nomad_dsec.cluster.settings import Endpoint

T = TypeVar("T")
TXN_LIMIT = 64  # operations in one transaction, by Consul's own bound
NOTE_BYTES = 4096  # of a check's output, by Consul's own bound
REFRESH_S = 10.0  # between looks for a new token
GONE_AFTER_MIN_S = 60.0  # Consul takes no less


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What is registered at the agent: where it is, and what says that it is well.

    ttl_s: a check of its own that must be renewed so often; 0 with alias_of: as well as that service of the same agent.
    gone_after_s: Consul removes it when it is critical for so long (60 s at least).
    """

    name: str
    service_id: str
    address: str
    port: int
    tags: tuple[str, ...] = ()
    meta: dict[str, str] = field(default_factory=dict)
    ttl_s: float = 0.0
    alias_of: str = ""
    gone_after_s: float = GONE_AFTER_MIN_S


class ConsulClient:
    """One agent. Close it when done; it opens itself anew when used again.

    refresh: gives the endpoint with the token as it is now; asked when Consul refuses the one at hand, since those that
    Vault or Nomad hand out are replaced from time to time.
    """

    def __init__(
        self, endpoint: Endpoint, *, timeout_s: float = 5.0, refresh: Callable[[], Awaitable[Endpoint]] | None = None
    ) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._refresh = refresh
        self._refresh_at = 0.0
        self._api = Api(endpoint)

    async def _call(self, what: str, work: Callable[[Any], Awaitable[T]], *, timeout_s: float | None = None) -> T:
        limit_s = timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await work(self._api)
        except TimeoutError as error:
            raise DeadlineExceeded("consul_timeout", f"Consul did not answer to {what} within {limit_s:g} s") from error
        except (ACLDisabled, ACLPermissionDenied) as error:
            if await self._has_new_token():
                return await self._call(what, work, timeout_s=timeout_s)
            hint = "see policies/acl/ for the rules that each component needs"
            raise DeniedError("consul_denied", f"Consul refused {what}: {error}", hint=hint) from error
        except (ConsulException, aiohttp.ClientError, OSError) as error:
            raise PlatformError("consul_unreachable", f"{what} by Consul failed: {error}", retry_after_s=1.0) from error

    async def _has_new_token(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._refresh is None or now < self._refresh_at:
            return False
        self._refresh_at = now + REFRESH_S
        try:
            fresh = await self._refresh()
        except DsecError:
            return False
        if fresh.token == self.endpoint.token:
            return False
        former, self.endpoint, self._api = self._api, fresh, Api(fresh)
        await former.close()
        return True

    async def version(self) -> str:
        """Of the agent, such as `1.8.7`."""
        answer = await self._call("its own state", lambda api: api.agent.self())
        return str(answer["Config"]["Version"])

    async def leader(self) -> str:
        """The address of the servers' leader, empty when there is none."""
        return str(await self._call("who leads", lambda api: api.status.leader()))

    async def may(self, rights: Sequence[Right]) -> dict[Right, bool] | None:
        """Which of these our token has, by the question that Consul's own pages ask (1.7 and later); None: no ACLs."""
        body = [{"Resource": one.resource, "Access": one.access, "Segment": one.segment} for one in rights]

        async def work(api: Any) -> Any:
            try:
                return await api.http.post(
                    CB.json(allow_404=False), "/v1/internal/acl/authorize", data=json.dumps(body)
                )
            except ACLDisabled:
                return None

        answer = await self._call("which rights we have", work)
        if answer is None:
            return None
        return {one: bool(row["Allow"]) for one, row in zip(rights, answer, strict=True)}

    async def register(self, offer: Offer, *, healthy: bool = True) -> None:
        """Register a service, or change it. A TTL check begins as `healthy` says, so that nothing flaps."""
        check: dict[str, Any] = {"DeregisterCriticalServiceAfter": _seconds(max(GONE_AFTER_MIN_S, offer.gone_after_s))}
        if offer.ttl_s:
            check |= consul.Check.ttl(_seconds(offer.ttl_s)) | {"Status": "passing" if healthy else "critical"}
        else:
            check |= {"AliasService": offer.alias_of, "Name": f"as well as {offer.alias_of}"}

        def work(api: Any) -> Awaitable[Any]:
            return api.agent.service.register(  # type: ignore[no-any-return]
                offer.name,
                service_id=offer.service_id,
                address=offer.address,
                port=offer.port,
                tags=list(offer.tags),
                meta=offer.meta,
                check=check,
            )

        await self._call(f"registering {offer.service_id}", work)

    async def heartbeat(self, service_id: str, *, healthy: bool, note: str) -> None:
        """Renew a TTL check; raises when the agent does not know the service (register again then)."""

        async def work(api: Any) -> None:
            verb = api.agent.check.ttl_pass if healthy else api.agent.check.ttl_fail
            if not await verb(f"service:{service_id}", note[:NOTE_BYTES]):
                raise NotFound(service_id)

        await self._call(f"the heartbeat of {service_id}", work)

    async def maintenance(self, service_id: str, *, on: bool, reason: str = "") -> None:
        """Call a service critical for this reason, or take that back."""

        def work(api: Any) -> Awaitable[Any]:
            return api.agent.service.maintenance(  # type: ignore[no-any-return]
                service_id, "true" if on else "false", reason=reason[:NOTE_BYTES]
            )

        await self._call(f"the state of {service_id}", work)

    async def deregister(self, service_id: str) -> None:
        """Remove a service; an unknown one is fine."""
        await self._call(f"removing {service_id}", lambda api: api.agent.service.deregister(service_id))

    async def registered(self, prefix: str) -> dict[str, dict[str, str]]:
        """Services at this agent whose id begins so: id -> meta."""
        rows = await self._call("listing the agent's services", lambda api: api.agent.services())
        return {name: dict(row.get("Meta") or {}) for name, row in rows.items() if name.startswith(prefix)}

    async def services(self, name: str, *, index: int = 0, wait_s: float = 0.0) -> tuple[int, list[Service]]:
        """All instances and the index for the next blocking query (0: answer at once)."""
        blocking: dict[str, Any] = {"index": str(index), "wait": _seconds(wait_s)} if index and wait_s else {}
        # Consul adds up to a sixteenth of jitter to the wait
        limit_s = wait_s * 1.1 + self._timeout_s if blocking else None
        answer = await self._call(
            f"listing {name}", lambda api: api.health.service(name, **blocking), timeout_s=limit_s
        )
        try:
            return int(answer[0]), [_service(row) for row in answer[1]]
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError("bad_consul_reply", f"what Consul sent of {name} is no list of services") from error

    async def write(self, puts: Sequence[Put]) -> None:
        """KV writes, 64 to a transaction; each transaction is whole or not at all."""
        for start in range(0, len(puts), TXN_LIMIT):
            await self._put_batch([_operation(put) for put in puts[start : start + TXN_LIMIT]])

    async def _put_batch(self, payload: list[dict[str, Any]]) -> None:
        await self._call("a batch of writes", lambda api: api.txn.put(payload))

    async def read(self, prefix: str) -> dict[str, bytes]:
        """All keys below a prefix."""
        answer = await self._call(f"reading {prefix}", lambda api: api.kv.get(prefix, recurse=True))
        return {row["Key"]: row["Value"] or b"" for row in answer[1] or []}

    async def open_session(self, name: str, *, ttl_s: float, delete: bool) -> str:
        """A session that ends when not renewed for ttl_s (10 s at least); `delete` removes its keys then."""

        def work(api: Any) -> Awaitable[str]:
            return api.session.create(  # type: ignore[no-any-return]
                name, ttl=round(max(10.0, ttl_s)), behavior="delete" if delete else "release", lock_delay=0
            )

        return str(await self._call("opening a session", work))

    async def sessions(self, name: str) -> list[str]:
        """Ids of the sessions of this name."""
        rows = (await self._call("listing sessions", lambda api: api.session.list()))[1]
        return [str(row["ID"]) for row in rows or [] if row.get("Name") == name]

    async def renew_session(self, session: str) -> bool:
        """False when the session is gone."""

        async def work(api: Any) -> bool:
            try:
                await api.session.renew(session)
            except NotFound:
                return False
            return True

        return await self._call("renewing a session", work)

    async def end_session(self, session: str) -> None:
        """End it; its keys are removed or released."""
        await self._call("ending a session", lambda api: api.session.destroy(session))

    async def try_lock(self, key: str, value: bytes, session: str) -> bool:
        """Whether this session holds the key now."""
        return bool(await self._call(f"locking {key}", lambda api: api.kv.put(key, value, acquire=session)))

    async def unlock(self, key: str, session: str) -> None:
        """Give a lock back."""
        await self._call(f"unlocking {key}", lambda api: api.kv.put(key, b"", release=session))

    async def close(self) -> None:
        """Cut every connection; a call that still waits ends with an error."""
        await self._api.close()


def _seconds(value: float) -> str:
    return f"{value:g}s"


def _operation(put: Put) -> dict[str, Any]:
    if put.value is None:
        return {"KV": {"Verb": "delete", "Key": put.key}}
    value = base64.b64encode(put.value).decode("ascii")
    if put.session:
        return {"KV": {"Verb": "lock", "Key": put.key, "Value": value, "Session": put.session}}
    return {"KV": {"Verb": "set", "Key": put.key, "Value": value}}


def _service(row: dict[str, Any]) -> Service:
    checks = row.get("Checks") or []
    unwell = [check for check in checks if check["Status"] != "passing"]
    return Service(
        node=row["Node"]["Node"],
        service_id=row["Service"]["ID"],
        address=row["Service"]["Address"] or row["Node"]["Address"],
        port=int(row["Service"]["Port"]),
        tags=tuple(row["Service"].get("Tags") or ()),
        meta=dict(row["Service"].get("Meta") or {}),
        passing=not unwell,
        # maintenance has its reason in the notes
        output=" ".join(check.get("Output") or check.get("Notes", "") for check in unwell).strip(),
    )
