"""Nomad's HTTP API, typed, over python-nomad: the only importer of that library."""

from __future__ import annotations

import asyncio
import base64
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import nomad
import requests
from libdsec.errors import DeniedError, NotFoundError, PlatformError, UsageError
from nomad.api import exceptions as faults

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nomad_dsec.cluster.settings import Endpoint

T = TypeVar("T")
PAYLOAD_BYTES = 16_384  # Nomad's own bound of a dispatch payload


@dataclass(frozen=True, slots=True, kw_only=True)
class NomadNode:
    """One client. drivers: name -> (detected, healthy, text)."""

    id: str
    name: str
    status: str
    eligible: bool
    draining: bool
    drivers: dict[str, tuple[bool, bool, str]]
    attributes: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
    """One agent. client: the id of its node, empty where it is a server only."""

    version: str
    plugin_dir: str
    client: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One allocation. tasks: name -> (state, failed, last event's text)."""

    id: str
    job: str
    node: str
    desired: str
    status: str
    tasks: dict[str, tuple[str, bool, str]]


class NomadClient:
    """One server or agent."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float = 10.0) -> None:
        tls = endpoint.tls
        self._session = requests.Session()
        self._api = nomad.Nomad(
            host=endpoint.host,
            port=endpoint.port,
            secure=endpoint.scheme == "https",
            token=endpoint.token or None,
            namespace=endpoint.namespace or None,
            verify=tls.trust,
            cert=tls.client_pair or (),
            timeout=timeout_s,
            session=self._session,
        )

    async def _call(self, what: str, work: Callable[[Any], T]) -> T:
        try:
            return await asyncio.to_thread(work, self._api)
        except faults.URLNotFoundNomadException as error:
            raise NotFoundError("not_in_nomad", f"Nomad knows nothing of {what}") from error
        except faults.URLNotAuthorizedNomadException as error:
            hint = "see policies/acl/ for the rules that each component needs"
            raise DeniedError("nomad_denied", f"Nomad refused {what}", hint=hint) from error
        except (faults.BadRequestNomadException, faults.InvalidParameters) as error:
            raise UsageError("nomad_refused", f"Nomad refused {what}: {_text(error)}") from error
        except (faults.BaseNomadException, requests.RequestException) as error:
            raise PlatformError(
                "nomad_unreachable", f"{what} by Nomad failed: {_text(error)}", retry_after_s=1.0
            ) from error

    async def version(self) -> str:
        """Of the agent, such as `1.6.5`."""
        return (await self.agent()).version

    async def agent(self) -> AgentFacts:
        """Of the agent that answers; needs agent:read."""
        answer = await self._call("its own state", lambda api: api.agent.get_agent())
        return AgentFacts(
            version=str(answer["config"]["Version"]["Version"]),
            plugin_dir=str(answer["config"].get("PluginDir") or ""),
            client=str((answer.get("stats") or {}).get("client", {}).get("node_id", "")),
        )

    async def node(self, node: str) -> NomadNode:
        """One client by its id."""
        return _node(await self._call(f"node {node}", functools.partial(_get_node, node)))

    async def nodes(self) -> list[NomadNode]:
        """All clients, with the health of their drivers."""
        rows = await self._call("its nodes", lambda api: api.nodes.get_nodes())
        return [_node(await self._call(f"node {row['ID']}", functools.partial(_get_node, row["ID"]))) for row in rows]

    async def parse(self, text: str) -> dict[str, Any]:
        """A job file as Nomad reads it; UsageError with its complaint."""
        parsed: dict[str, Any] = await self._call("a job file", lambda api: api.jobs.parse(text, canonicalize=True))
        return parsed

    async def register(self, job: Mapping[str, Any]) -> str:
        """Run a job; the id of its evaluation."""
        answer = await self._call(f"job {job['ID']}", lambda api: api.job.register_job(job["ID"], {"Job": dict(job)}))
        return str(answer.get("EvalID", ""))

    async def stop(self, job: str, *, purge: bool = False) -> None:
        """Stop a job; an unknown one is fine."""
        try:
            await self._call(f"job {job}", lambda api: api.job.deregister_job(job, purge=purge))
        except NotFoundError:
            return

    async def jobs(self) -> list[str]:
        """Ids of all jobs of the namespace."""
        rows = await self._call("its jobs", lambda api: api.jobs.get_jobs())
        return [str(row["ID"]) for row in rows]

    async def collect_garbage(self) -> None:
        """Forget what has ended, and let clients remove its directories."""
        await self._call("a garbage collection", lambda api: api.system.initiate_garbage_collection())

    async def dispatch(self, job: str, *, payload: bytes = b"", meta: Mapping[str, str] | None = None) -> str:
        """Run a parameterized job once; the id of the child job."""
        if len(payload) > PAYLOAD_BYTES:
            hint = "put larger input into an artifact"
            raise UsageError("payload_too_large", f"a payload holds {PAYLOAD_BYTES} bytes", field="payload", hint=hint)
        text = base64.b64encode(payload).decode("ascii")
        answer = await self._call(
            f"job {job}", lambda api: api.job.dispatch_job(job, payload=text, meta=dict(meta or {}))
        )
        return str(answer["DispatchedJobID"])

    async def allocations(self, job: str) -> list[Allocation]:
        """Of one job, the newest last."""
        rows = await self._call(f"job {job}", lambda api: api.job.get_allocations(job))
        return [_allocation(row) for row in sorted(rows, key=lambda row: row["CreateIndex"])]

    async def drain(self, node: str, *, on: bool, deadline_s: float = 3600.0) -> None:
        """Start or end the drain of a client."""
        spec = {"Deadline": int(deadline_s * 1e9), "IgnoreSystemJobs": False} if on else None
        body = {"DrainSpec": spec, "MarkEligible": not on}
        await self._call(f"node {node}", lambda api: api.node.drain_node_with_spec(node, body["DrainSpec"], not on))

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.to_thread(self._session.close)


def _get_node(node: str, api: Any) -> dict[str, Any]:
    found: dict[str, Any] = api.node.get_node(node)
    return found


def _text(error: Exception) -> str:
    response = getattr(error, "nomad_resp", None)
    return str(getattr(response, "text", "") or error)[:500]


def _node(row: dict[str, Any]) -> NomadNode:
    drivers = {
        name: (bool(info["Detected"]), bool(info["Healthy"]), str(info.get("HealthDescription") or ""))
        for name, info in (row.get("Drivers") or {}).items()
    }
    return NomadNode(
        id=row["ID"],
        name=row["Name"],
        status=row["Status"],
        eligible=row["SchedulingEligibility"] == "eligible",
        draining=bool(row.get("Drain") or row.get("DrainStrategy")),
        drivers=drivers,
        attributes=dict(row.get("Attributes") or {}),
    )


def _allocation(row: dict[str, Any]) -> Allocation:
    tasks = {}
    for name, state in (row.get("TaskStates") or {}).items():
        events = state.get("Events") or []
        text = str(events[-1].get("DisplayMessage") or "") if events else ""
        tasks[name] = (str(state["State"]), bool(state["Failed"]), text)
    return Allocation(
        id=row["ID"],
        job=row["JobID"],
        node=row["NodeID"],
        desired=row["DesiredStatus"],
        status=row["ClientStatus"],
        tasks=tasks,
    )
