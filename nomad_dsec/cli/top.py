"""`dsec top`: nodes and sandboxes, live. Without a terminal, or with --once, one picture."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from libdsec.errors import DeniedError, DsecError
from libdsec.sandbox import AsyncSandbox
from libdsec.wire import LIVE_STATES, Metrics, NodeInfo, SandboxInfo
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nomad_dsec.cli.access import add_access, open_client
from nomad_dsec.cli.output import add_json, age, count, print_json, span

if TYPE_CHECKING:
    import argparse

    from libdsec.client import AsyncClient
    from rich.console import RenderableType

_STATE_STYLE = {"running": "green", "paused": "yellow", "creating": "cyan", "stopping": "magenta", "lost": "red"}
_MEASURED_AT_ONCE = 16


@dataclass(slots=True)
class View:
    """What one look found."""

    nodes: list[NodeInfo] = field(default_factory=list)
    sandboxes: list[SandboxInfo] = field(default_factory=list)
    metrics: dict[str, Metrics] = field(default_factory=dict)
    note: str = ""


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `dsec top`."""
    parser.add_argument("--interval-s", type=float, default=1.0, help="seconds between looks")
    parser.add_argument("--rows", type=int, default=20, help="most sandboxes to show")
    parser.add_argument("--once", action="store_true", help="one picture, then end")
    add_json(parser)
    add_access(parser)
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace) -> int:
    """Look until Ctrl-C."""
    async with open_client(args) as client:
        first = await look(client, args.rows)
        if args.json:
            print_json({"nodes": first.nodes, "sandboxes": first.sandboxes, "metrics": first.metrics})
            return 0
        if args.once or not sys.stdout.isatty():
            Console(width=None if sys.stdout.isatty() else 160).print(render(first, {}, args.rows))
            return 0
        with Live(render(first, {}, args.rows), screen=True, auto_refresh=False) as live:
            before = first
            while True:
                await asyncio.sleep(max(0.2, args.interval_s))
                now = await look(client, args.rows)
                live.update(render(now, before.metrics, args.rows), refresh=True)
                before = now


async def look(client: AsyncClient, rows: int) -> View:
    """Ask for everything; what can't be had is named in the note instead of ending the view."""
    view, namespace = View(), ""
    try:
        view.nodes = await client.nodes()
        namespace = "*"  # an admin key: what nodes hold is of all namespaces
    except DeniedError:
        view.note = "nodes are shown to admin keys only"
    except DsecError as error:
        view.note = str(error)
    try:
        found = await AsyncSandbox.list(namespace=namespace, client=client)
    except DsecError as error:
        view.note = str(error)
        return view
    view.sandboxes = sorted((i for i in found if i.state in LIVE_STATES), key=lambda i: -i.created_at)
    gate = asyncio.Semaphore(_MEASURED_AT_ONCE)

    async def measure(info: SandboxInfo) -> None:
        async with gate:
            try:
                view.metrics[info.id] = await AsyncSandbox(client, info).metrics()
            except DsecError:
                return  # it ended between the two questions

    await asyncio.gather(*(measure(info) for info in view.sandboxes[:rows]))
    return view


def render(view: View, before: dict[str, Metrics], rows: int) -> RenderableType:
    """The picture."""
    parts: list[RenderableType] = [_heading(view)]
    if view.nodes:
        parts.append(_nodes_table(view.nodes))
    parts.append(_sandboxes_table(view, before, rows))
    if len(view.sandboxes) > rows:
        parts.append(Text(f"and {len(view.sandboxes) - rows} more", style="dim"))
    return Group(*parts)


def _heading(view: View) -> Text:
    text = Text.assemble(
        ("dsec top", "bold"),
        f"  {time.strftime('%H:%M:%S')}  ",
        count(len(view.sandboxes), "sandbox", "sandboxes"),
        f" on {count(len(view.nodes), 'node', 'nodes')}" if view.nodes else "",
    )
    if view.note:
        text.append(f"  {view.note}", style="red")
    return text


def _nodes_table(nodes: list[NodeInfo]) -> Table:
    table = Table(box=None, header_style="bold dim", pad_edge=False)
    for column in ("node", "state", "sandboxes", "cpus promised", "memory promised", "starting"):
        table.add_column(column)
    for info in nodes:
        room = info.capacity
        state = "stale" if info.stale else "draining" if info.draining else "ready"
        table.add_row(
            info.node,
            Text(state, style="green" if state == "ready" else "yellow"),
            _meter(room.sandboxes, room.sandboxes_max),
            _meter(room.cpus_used, room.cpus_total),
            _meter(room.memory_mib_used, room.memory_mib_total),
            str(room.starting),
        )
    return table


def _meter(used: float, total: float) -> Text:
    share = used / total if total else 0.0
    filled = round(min(share, 1.0) * 12)
    style = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    return Text.assemble(("█" * filled, style), ("░" * (12 - filled), "dim"), f" {used:g}/{total:g}")


def _sandboxes_table(view: View, before: dict[str, Metrics], rows: int) -> Table:
    table = Table(box=None, header_style="bold dim", pad_edge=False)
    for column in ("sandbox", "state", "image", "age", "left", "cpu", "memory", "pids", "labels"):
        table.add_column(column, no_wrap=True)
    for info in view.sandboxes[:rows]:
        now, then = view.metrics.get(info.id), before.get(info.id)
        labels = " ".join(f"{key}={value}" for key, value in sorted(info.labels.items()))
        table.add_row(
            info.id,
            Text(info.state, style=_STATE_STYLE.get(info.state, "")),
            info.image[:24],
            age(info.created_at),
            span(info.expires_at - time.time()) if info.expires_at else "-",
            _cpu(now, then),
            f"{now.memory_mib:.0f}/{info.memory_mib}M" if now else "-",
            str(now.pids) if now else "-",
            labels[:40],
        )
    return table


def _cpu(now: Metrics | None, then: Metrics | None) -> str:
    if now is None or then is None or now.at <= then.at:
        return "-"
    return f"{(now.cpu_s - then.cpu_s) / (now.at - then.at) * 100:.0f}%"
