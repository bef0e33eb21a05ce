"""What the gateway counts, for Prometheus. Step names are those of logs and errors; no namespace is in a label."""

from __future__ import annotations

from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2, 5, 15, 60)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class GatewayMetrics:
    """One registry a gateway, so that several can live in one process of tests."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._requests = Counter(
            "dsec_gateway_requests_total", "Requests by route and status", ["route", "status"], registry=registry
        )
        self._steps = Histogram(
            "dsec_gateway_create_step_seconds", "Steps of a create", ["step"], registry=registry, buckets=_SECONDS
        )
        self._creates = Counter(
            "dsec_gateway_creates_total", "Creates by outcome (ok or an error code)", ["outcome"], registry=registry
        )
        self._refusals = Counter(
            "dsec_gateway_refusals_total",
            "Nodes not taken, by reason",
            ["reason"],
            registry=registry,
        )
        self._reaped = Counter(
            "dsec_gateway_reaped_total",
            "Ids of undone creates, by whether they existed",
            ["existed"],
            registry=registry,
        )
        self.inflight = Gauge("dsec_gateway_creates_inflight", "Creates under way", registry=registry)
        self.calls = Gauge("dsec_gateway_fncalls_inflight", "Stateless calls under way", registry=registry)
        self.nodes = Gauge("dsec_gateway_nodes", "Nodes by standing", ["standing"], registry=registry)
        self.nodes_stale = Gauge(
            "dsec_gateway_nodes_stale",
            "1 while Consul is away and the list of nodes is the last good one",
            registry=registry,
        )
        self.nodes_age = Gauge(
            "dsec_gateway_nodes_age_seconds",
            "Since Consul last confirmed the list of nodes; -1: never",
            registry=registry,
        )
        self.in_consul = Gauge("dsec_gateway_in_consul", "1 while Consul's agent knows this gateway", registry=registry)
        self.cuts = Counter("dsec_gateway_relays_cut_total", "Relays cut, by side", ["side"], registry=registry)
        self._request_of: dict[tuple[str, int], Counter] = {}

    def request(self, route: str, status: int) -> None:
        """Count one request."""
        child = self._request_of.get((route, status))
        if child is None:
            child = self._request_of[route, status] = self._requests.labels(route, str(status))
        child.inc()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time one step of a create, failed ones too."""
        began = perf_counter()
        try:
            yield
        finally:
            self._steps.labels(name).observe(perf_counter() - began)

    def created(self, outcome: str) -> None:
        """Count one create."""
        self._creates.labels(outcome).inc()

    def refused(self, refusals: Mapping[str, int]) -> None:
        """Count nodes by the reason they were not taken."""
        for reason, number in refusals.items():
            self._refusals.labels(reason).inc(number)

    def reaped(self, *, existed: bool) -> None:
        """Count one id removed by the reaper."""
        self._reaped.labels("yes" if existed else "no").inc()

    def render(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)
