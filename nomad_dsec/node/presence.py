"""The node daemon in Consul: registered with a TTL check whose note is a digest, unhealthy sandboxes as keys under a
session, and those sandboxes that asked for it as services.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from libdsec.errors import UsageError

from nomad_dsec.cluster import health
from nomad_dsec.cluster.configured import advertised, consul_endpoint
from nomad_dsec.cluster.consul import ConsulClient, Offer
from nomad_dsec.cluster.registration import Registration
from nomad_dsec.cluster.services import SandboxServices
from nomad_dsec.log import get_log
from nomad_dsec.node.consul_label import asked_service
from nomad_dsec.node.health import HealthWatch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nomad_dsec.config import Settings
    from nomad_dsec.node.assemble import Assembled
    from nomad_dsec.node.core import Node

log = get_log(__name__)
SERVICE = "dsec-node"
TAGS = ("prometheus", "metrics-path=/metrics")


class Presence:
    """What is told to Consul with each heartbeat."""

    def __init__(
        self, node: Node, watch: HealthWatch, transitions: health.Transitions, services: SandboxServices, host: str
    ) -> None:
        self._node = node
        self._watch = watch
        self._transitions = transitions
        self._services = services
        self._host = host

    def note(self) -> tuple[bool, str]:
        """Before each heartbeat: bring what is wanted up to date, and give the check's state and text."""
        node, unwell = self._node, self._watch.unwell()
        self._transitions.want(unwell)
        self._services.want(self._offers(), unwell)
        node.metrics.unhealthy.set(len(unwell))
        node.metrics.untold.labels("unhealthy").set(self._transitions.untold)
        node.metrics.untold.labels("service").set(self._services.refused)
        if node.journal.broken:
            return False, f"the journal can't be written: {node.journal.broken}"
        return node.ready, self._watch.digest()

    def _offers(self) -> dict[str, Offer]:
        offers = {}
        for entry in self._node.live():
            if not entry.row.labels or entry.row.state not in ("running", "pausing", "paused", "resuming"):
                continue
            with suppress(UsageError):  # of a create before labels were checked
                if (asked := asked_service(entry.row.labels)) is not None:
                    name, port = asked
                    offers[entry.row.id] = self._services.offer(entry.row.id, name=name, address=self._host, port=port)
        return offers


@asynccontextmanager
async def in_consul(parts: Assembled, settings: Settings) -> AsyncIterator[None]:
    """Registered inside, deregistered after. Consul away: not waited for."""
    endpoint = await consul_endpoint(settings)
    node = parts.node
    host, port = advertised(settings, "node", parts.fingerprint.address)
    me = f"{SERVICE}-{node.id}"
    offer = Offer(
        name=SERVICE,
        service_id=me,
        address=host,
        port=port,
        tags=TAGS,
        meta={"node": node.id, "version": node.version},
        ttl_s=settings["consul.ttl_s"],
    )
    client = ConsulClient(endpoint, refresh=lambda: consul_endpoint(settings))
    watch = HealthWatch(node, parts.execs, every_s=settings["consul.probe_s"])
    transitions = health.Transitions(node=node.id)
    services = SandboxServices(client, owner=me, limit=settings["consul.sandbox_services_max"])
    told = Presence(node, watch, transitions, services, host)
    registration = Registration(client, offer, note=told.note, transitions=transitions, services=services)
    node.metrics.in_consul.set_function(lambda: float(registration.registered))
    tasks = [node.room.spawn("ask sandboxes", watch.run()), node.room.spawn("Consul", registration.run())]
    log.info("the node registers in Consul", node=node.id, consul=endpoint.url, address=f"{host}:{port}")
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await registration.close()
        await client.close()
