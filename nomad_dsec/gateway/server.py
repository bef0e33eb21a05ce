"""One gateway put together: what it opens is closed in reverse, what it started is ended."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from nomad_dsec.clock import SYSTEM
from nomad_dsec.gateway.calls import Calls
from nomad_dsec.gateway.creates import Creates
from nomad_dsec.gateway.db import lock_directory, open_database
from nomad_dsec.gateway.endpoints import StaticSource, parse_endpoint
from nomad_dsec.gateway.failpoints import Failpoints
from nomad_dsec.gateway.groups import Engine
from nomad_dsec.gateway.heartbeat import Heartbeats
from nomad_dsec.gateway.images import ImageIndex
from nomad_dsec.gateway.intents import Reaper
from nomad_dsec.gateway.keys import ADMIN_NAMESPACE, Keyring, write_secret
from nomad_dsec.gateway.metrics import GatewayMetrics
from nomad_dsec.gateway.nodes import NodeTable, Pace
from nomad_dsec.gateway.quotas import Quotas
from nomad_dsec.gateway.roster import Roster
from nomad_dsec.gateway.routes import Routes
from nomad_dsec.gateway.sandboxes import Sandboxes
from nomad_dsec.gateway.shares import Shares
from nomad_dsec.gateway.tasks import TaskRoom
from nomad_dsec.httpd import error_middleware, listen_tcp
from nomad_dsec.log import get_log
from nomad_dsec.placement.ledger import Ledger

if TYPE_CHECKING:
    from pathlib import Path

    from nomad_dsec.clock import Clock
    from nomad_dsec.gateway.db import Database
    from nomad_dsec.gateway.endpoints import NodeSource
    from nomad_dsec.gateway.secret_refs import NamespaceSecrets
    from nomad_dsec.httpd import Running

log = get_log(__name__)
ADMIN_KEY_FILE = "admin.key"
FIRST_HEARD_S = 2.0
PURGE_EVERY_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Settings of section `gateway`. failpoint is for crash tests. fusion_namespace "": its door wants keys."""

    data: Path
    source: NodeSource
    host: str = "127.0.0.1"
    port: int = 0
    admin_key: str = ""
    create_inflight_max: int = 4096
    fncall_inflight_max: int = 4096
    fusion_namespace: str = ""
    fusion_image: str = ""
    failpoint: str = ""
    secrets: NamespaceSecrets | None = None
    pace: Pace = field(default_factory=Pace)


def static_source(texts: list[str]) -> StaticSource:
    """The nodes of a settings list."""
    return StaticSource([parse_endpoint(text) for text in texts])


class Gateway:
    """An async context manager: inside it, the gateway serves at `address`."""

    keys: Keyring
    quotas: Quotas
    creates: Creates
    sandboxes: Sandboxes
    calls: Calls
    table: NodeTable
    running: Running

    def __init__(self, options: GatewayOptions, *, clock: Clock = SYSTEM) -> None:
        self.options = options
        self.clock = clock
        self.metrics = GatewayMetrics()
        self._stack = AsyncExitStack()

    @property
    def address(self) -> str:
        """`http://host:port`."""
        return self.running.address

    async def __aenter__(self) -> Gateway:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _open(self, stack: AsyncExitStack) -> None:
        options, clock = self.options, self.clock
        failpoints = Failpoints(options.failpoint)
        stack.callback(lock_directory(options.data).close)
        db = open_database(options.data)
        stack.callback(db.close)
        self.keys = Keyring(db, clock, configured=options.admin_key)
        await self._ensure_admin_key()
        ledger, roster = Ledger(), Roster()
        table = self.table = NodeTable(
            clock=clock, ledger=ledger, roster=roster, images=ImageIndex(), pace=options.pace
        )
        table.remembered = dict(db.read("SELECT node, endpoint FROM nodes"))
        options.source.remember(table.remembered)
        table.is_partial = lambda: options.source.stale
        stack.push_async_callback(table.close)
        room = await stack.enter_async_context(TaskRoom())
        reaper = Reaper(db, table, clock, self.metrics, room.spawn)
        engine = Engine(
            table=table,
            ledger=ledger,
            db=db,
            reaper=reaper,
            clock=clock,
            rng=random.Random(),  # noqa: S311 - spreads load, guards nothing
            metrics=self.metrics,
            failpoints=failpoints,
        )
        self.quotas = Quotas(db, roster, table.refresh_rosters)
        if options.secrets is not None:
            stack.push_async_callback(options.secrets.close)
            room.spawn(options.secrets.keep_forever())
        self.creates = Creates(
            engine,
            self.quotas,
            inflight_max=options.create_inflight_max,
            spawn=room.spawn,
            secrets=options.secrets,
        )
        self.sandboxes = Sandboxes(table)
        self.calls = Calls(table, Shares(options.fncall_inflight_max))
        room.spawn(Heartbeats(table, options.source, on_seen=lambda *seen: self._remember(db, *seen)).run())
        reaper.recover()
        room.spawn(self._keep_house())
        await table.wait_heard(timeout_s=FIRST_HEARD_S)
        app = web.Application(middlewares=[error_middleware], client_max_size=0)
        Routes(self).add_to(app)
        self.running = await listen_tcp(app, options.host, options.port)
        stack.push_async_callback(self.running.close)
        log.info("the gateway serves", address=self.address, nodes=len(table.by_endpoint))

    async def _ensure_admin_key(self) -> None:
        """A first key, in a file that only this user may read; never again once it was revoked."""
        if self.options.admin_key or any(row.admin for row in self.keys.rows()):
            return
        row, token = self.keys.mint(ADMIN_NAMESPACE, admin=True, label="made at the first start")
        write_secret(self.options.data / ADMIN_KEY_FILE, token)  # first, so that no key exists that nobody knows
        await self.keys.add(row, token)

    def _remember(self, db: Database, node: str, endpoint: str) -> None:
        db.write_nowait(
            (
                "INSERT OR REPLACE INTO nodes (node, endpoint, seen_at) VALUES (?, ?, ?)",
                (node, endpoint, self.clock.now()),
            )
        )

    async def _keep_house(self) -> None:
        """Each second: keys and quotas that another process changed; now and then: old replies."""
        purged_at = self.clock.monotonic()
        while True:
            await asyncio.sleep(1.0)
            self.keys.refresh()
            self.quotas.reload()
            if self.clock.monotonic() - purged_at >= PURGE_EVERY_S:
                purged_at = self.clock.monotonic()
                self.creates.purge()
