"""The gateway in Consul: finds node daemons there, and is registered itself. Not imported where there is no Consul."""

from __future__ import annotations

import json
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from nomad_dsec.clock import SYSTEM
from nomad_dsec.cluster.configured import advertised, consul_endpoint, open_secrets
from nomad_dsec.cluster.consul import ConsulClient, Offer
from nomad_dsec.cluster.discovery import Discovery
from nomad_dsec.cluster.registration import Registration
from nomad_dsec.gateway.discovered import ConsulSource, NodeTokens
from nomad_dsec.gateway.endpoints import StaticSource, parse_endpoint
from nomad_dsec.gateway.nodes import Standing
from nomad_dsec.gateway.tasks import TaskRoom
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nomad_dsec.config import Settings
    from nomad_dsec.gateway.endpoints import NodeSource
    from nomad_dsec.gateway.server import Gateway

log = get_log(__name__)
NODES = "dsec-node"
SERVICE = "dsec-gateway"
TAGS = ("prometheus", "metrics-path=/metrics")
NOT_LOOKED_FOR = "nodes are not looked for in Consul: gateway.node_token is not set"


class Presence:
    """One gateway's dealings with Consul: `source` before it is made, `registered` around it."""

    def __init__(self, settings: Settings, client: ConsulClient, source: NodeSource, room: TaskRoom) -> None:
        self._settings = settings
        self._client = client
        self._room = room
        self.source = source

    @asynccontextmanager
    async def registered(self, gateway: Gateway) -> AsyncIterator[None]:
        """Registered inside, deregistered after. Consul away: not waited for."""
        host, port = advertised(self._settings, "gateway", gateway.address)
        offer = Offer(
            name=SERVICE,
            service_id=f"{SERVICE}-{_host_name()}-{port}",
            address=host,
            port=port,
            tags=TAGS,
            ttl_s=self._settings["consul.ttl_s"],
        )
        registration = Registration(self._client, offer, note=lambda: _note(gateway))
        gateway.metrics.in_consul.set_function(lambda: float(registration.registered))
        task = self._room.spawn(registration.run())
        log.info("the gateway registers in Consul", consul=self._client.endpoint.url, address=f"{host}:{port}")
        try:
            yield
        finally:
            task.cancel()
            await registration.close()


@asynccontextmanager
async def in_consul(settings: Settings) -> AsyncIterator[Presence]:
    """Discovery runs inside. Raises as `check_consul` does."""
    static = [parse_endpoint(text) for text in settings["gateway.nodes"]]
    template = settings["gateway.node_token"]
    async with AsyncExitStack() as stack:
        client = ConsulClient(await consul_endpoint(settings), refresh=lambda: consul_endpoint(settings))
        stack.push_async_callback(client.close)
        room = await stack.enter_async_context(TaskRoom())
        source: NodeSource
        if template:
            secrets = await open_secrets(settings)
            stack.push_async_callback(secrets.close)
            discovery = Discovery(client, NODES)
            source = ConsulSource(discovery, NodeTokens(template, secrets, SYSTEM), static=static)
            room.spawn(discovery.run())
        else:
            log.warning(NOT_LOOKED_FOR)
            source = StaticSource(static, notes=[NOT_LOOKED_FOR])
        yield Presence(settings, client, source, room)


def _note(gateway: Gateway) -> tuple[bool, str]:
    nodes = gateway.table.by_endpoint.values()
    standing = {one.value: sum(node.standing is one for node in nodes) for one in Standing}
    return bool(standing["live"]), json.dumps({"nodes": standing, "calls": gateway.calls.under_way})


def _host_name() -> str:
    return socket.gethostname().partition(".")[0].lower() or "host"
