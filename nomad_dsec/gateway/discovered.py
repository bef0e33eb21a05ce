"""Nodes that Consul tells of, together with those of the settings. Consul away: the last good view, called stale.

Consul says where a node listens and what it is called; never its token, which comes from a secret source of our own. A
node that Consul has lost is asked as long as it answers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from libdsec.errors import DeadlineExceeded, DsecError, UsageError

from nomad_dsec.cluster.configured import resolve
from nomad_dsec.cluster.secrets import is_reference
from nomad_dsec.gateway.endpoints import Endpoint, node_url
from nomad_dsec.ids import NODE_PATTERN
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nomad_dsec.clock import Clock
    from nomad_dsec.cluster.consul import Service
    from nomad_dsec.cluster.discovery import Discovery
    from nomad_dsec.cluster.secrets import SecretSource

log = get_log(__name__)
TOKEN_KEPT_S = 60.0
FAILURE_KEPT_S = 4.0  # so that one look-up that hangs is not made for each of a hundred nodes
LOOK_UP_S = 2.0
NODE_MARK = "{node}"
PROBLEMS_SHOWN = 10
_KEY = "gateway.node_token"


class NodeTokens:
    """The token of each node, by the template of `gateway.node_token`; looked up again after a minute, so that a
    changed one is taken up. What was good stays while its source is away.
    """

    def __init__(self, template: str, source: SecretSource, clock: Clock) -> None:
        self._template = template
        self._source = source
        self._clock = clock
        self._known: dict[str, tuple[float, str]] = {}
        self._failed: dict[str, tuple[float, DsecError]] = {}

    async def of(self, node: str) -> str:
        """Raises what SecretSource.resolve does, UsageError when it is empty. The node's id is a checked one."""
        text = self._template.replace(NODE_MARK, node) if is_reference(self._template) else self._template
        now = self._clock.monotonic()
        until, token = self._known.get(text, (now, ""))
        if until > now:
            return token
        failed_until, failure = self._failed.get(text, (now, None))
        if failure is None or failed_until <= now:
            try:
                token = await self._look_up(text, node)
            except DsecError as error:
                failure = error
                self._failed[text] = (now + FAILURE_KEPT_S, error)
            else:
                self._failed.pop(text, None)
                self._known[text] = (now + TOKEN_KEPT_S, token)
                return token
        if token:
            return token
        raise failure

    async def _look_up(self, text: str, node: str) -> str:
        try:
            async with asyncio.timeout(LOOK_UP_S):
                token = await resolve(self._source, text, field=_KEY)
        except TimeoutError as error:
            raise DeadlineExceeded("secret_timeout", f"no answer within {LOOK_UP_S:g} s", field=_KEY) from error
        if not token:
            raise UsageError("empty_token", f"the token of node {node} is empty", field=_KEY)
        return token


class ConsulSource:
    """A NodeSource. `discovery.run()` is somebody else's task."""

    def __init__(self, discovery: Discovery, tokens: NodeTokens, *, static: Sequence[Endpoint] = ()) -> None:
        self._discovery = discovery
        self._tokens = tokens
        self._static = tuple(dict.fromkeys(static))
        self._remembered: dict[str, str] = {}
        self._problems: dict[str, str] = {}
        self._answered = False

    @property
    def changed(self) -> asyncio.Event:
        """Set when `endpoints` may give something else."""
        return self._discovery.changed

    def remember(self, nodes: Mapping[str, str]) -> None:
        """Nodes of a former run (id -> endpoint name): they stand in until Consul has answered once."""
        static = {endpoint.name for endpoint in self._static}
        self._remembered = {node: url for node, url in nodes.items() if url.startswith("http://") and url not in static}

    async def endpoints(self) -> Sequence[Endpoint]:
        """Those of the settings first. A node whose token can't be had is left out and named in `notes`."""
        view = self._discovery.view
        self._answered = self._answered or not view.stale
        problems: dict[str, str] = {}
        places = _places(view.services, problems) if self._answered else self._remembered
        found = []
        for node, url in places.items():
            try:
                found.append(Endpoint(url=url, token=await self._tokens.of(node), node=node))
            except DsecError as error:
                problems[node] = f"the token of {node} can't be had: {error}"
        for node, problem in problems.items():
            if self._problems.get(node) != problem:
                log.warning("a node of Consul can't be used", node=node, why=problem)
        self._problems = problems
        return [*self._static, *found]

    @property
    def stale(self) -> bool:
        """Whether there may be nodes that are not known."""
        return self._discovery.view.stale

    def age_s(self) -> float | None:
        """Seconds since Consul last confirmed the view."""
        return self._discovery.age_s()

    def notes(self) -> list[str]:
        """What an operator should know of the list of nodes; empty when all is well."""
        said = []
        if self.stale:
            age_s = self._discovery.age_s()
            since = "has not answered yet" if age_s is None else f"does not answer (last {age_s:.0f} s ago)"
            why = self._discovery.view.error
            said.append(f"Consul {since}: the list of nodes is the last good one{f'; {why}' if why else ''}")
        problems = list(self._problems.values())
        said += problems[:PROBLEMS_SHOWN]
        if len(problems) > PROBLEMS_SHOWN:
            said.append(f"and {len(problems) - PROBLEMS_SHOWN} more")
        return said


def _places(services: Sequence[Service], problems: dict[str, str]) -> dict[str, str]:
    """Node id -> URL. Critical ones too: whether a node answers is for our own heartbeats to say."""
    places: dict[str, str] = {}
    # of two instances of one name the one that passes counts
    for row in sorted(services, key=lambda row: row.passing):
        node = row.meta.get("node", "")
        if NODE_PATTERN.fullmatch(node) is None:
            problems[row.service_id] = f"Consul's {row.service_id} names no node: {node[:60]!r}"
            continue
        try:
            places[node] = node_url(row.address, row.port)
        except ValueError:
            problems[node] = f"Consul's {row.service_id} has no usable address: {row.address[:60]!r}, {row.port}"
    return places
