"""What the node daemon counts, for Prometheus. Step names are those of timings, logs and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2, 5, 15, 60)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class NodeMetrics:
    """One registry a daemon, so that several can live in one process of tests."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._steps = Histogram(
            "dsec_node_step_seconds",
            "Wall time of a named step",
            ["backend", "step"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._creates = Counter(
            "dsec_node_creates_total",
            "Creates by outcome (ok or an error code)",
            ["backend", "outcome"],
            registry=registry,
        )
        self._ended = Counter("dsec_node_ended_total", "Ends by reason", ["backend", "reason"], registry=registry)
        self._exec = Histogram("dsec_node_exec_seconds", "Wall time of execs", registry=registry, buckets=_SECONDS)
        self._refused = Counter("dsec_node_refusals_total", "Refused creates by code", ["code"], registry=registry)
        self._exec_faults = Counter("dsec_node_exec_faults_total", "Execs with no result", ["code"], registry=registry)
        self.state = Gauge("dsec_node_sandboxes", "Sandboxes by state", ["state"], registry=registry)
        self.starting = Gauge("dsec_node_starting", "Starts under way", registry=registry)
        self.waiting = Gauge("dsec_node_waiting", "Creates waiting for a start slot", registry=registry)
        self._calls = Counter("dsec_node_calls_total", "Stateless calls by verdict", ["verdict"], registry=registry)
        self._call_wait = Histogram(
            "dsec_node_call_queue_seconds", "Wait of calls for their turn", registry=registry, buckets=_SECONDS
        )
        self._calls_refused = Counter(
            "dsec_node_call_refusals_total", "Calls without a result by code", ["code"], registry=registry
        )
        self.lanes = Gauge("dsec_node_lanes", "Lanes of stateless calls", registry=registry)
        self.calls_running = Gauge("dsec_node_calls_running", "Stateless calls under way", registry=registry)
        self.calls_waiting = Gauge("dsec_node_calls_waiting", "Stateless calls in the queue", registry=registry)
        self.lanes_replaced = Gauge(
            "dsec_node_lanes_replaced", "Lanes given up since the start, since a call broke them", registry=registry
        )
        self.unhealthy = Gauge("dsec_node_unhealthy", "Unhealthy sandboxes that Consul is told of", registry=registry)
        self.untold = Gauge(
            "dsec_node_consul_untold",
            "Unhealthy sandboxes, and those that asked to be services, beyond what Consul is told of",
            ["what"],
            registry=registry,
        )
        self.in_consul = Gauge("dsec_node_in_consul", "1 while Consul's agent knows this node", registry=registry)
        # Those below must stay zero: each is a fault of ours.
        self.orphans = Counter("dsec_node_orphans_found_total", "Live things that no handle owned", registry=registry)
        self.stop_failures = Counter("dsec_node_stop_failures_total", "Removals that failed", registry=registry)
        self.lost = Counter("dsec_node_lost_total", "Sandboxes gone while the machine stayed up", registry=registry)
        self._step_of: dict[tuple[str, str], Histogram] = {}

    def observe_steps(self, backend: str, steps_ms: Mapping[str, float]) -> None:
        """Record the steps of one start."""
        for step, took_ms in steps_ms.items():
            child = self._step_of.get((backend, step))
            if child is None:
                child = self._step_of[backend, step] = self._steps.labels(backend, step)
            child.observe(took_ms / 1000)

    def created(self, backend: str, outcome: str) -> None:
        """Count one create."""
        self._creates.labels(backend, outcome).inc()

    def refused(self, code: str) -> None:
        """Count one refusal of admission."""
        self._refused.labels(code).inc()

    def ended(self, backend: str, reason: str) -> None:
        """Count one end; `error(step)` is counted as error."""
        self._ended.labels(backend, reason.partition("(")[0]).inc()

    def exec_took(self, seconds: float) -> None:
        """Record one exec that has a result."""
        self._exec.observe(seconds)

    def exec_fault(self, code: str) -> None:
        """Count one exec that has none."""
        self._exec_faults.labels(code).inc()

    def call_done(self, verdict: str, queue_s: float) -> None:
        """Count one stateless call that has a result."""
        self._calls.labels(verdict).inc()
        self._call_wait.observe(queue_s)

    def call_refused(self, code: str) -> None:
        """Count one that has none."""
        self._calls_refused.labels(code).inc()

    def render(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)
