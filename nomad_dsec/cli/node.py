"""`dsec node`: run the daemon of this machine, list nodes, drain one, look at what one can do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from libdsec._http import Transport
from libdsec._requests import checked
from libdsec._settings import load_settings
from libdsec.errors import PlatformError
from libdsec.wire import DrainRequest, NodeInfo, NodeList

from nomad_dsec.cli.access import add_access, add_data, layout_of, open_client
from nomad_dsec.cli.output import add_json, print_json, print_table, say

if TYPE_CHECKING:
    import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Verbs of `dsec node`."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verbs.add_parser("run", help="run it in the foreground; `dsec node run --help` lists its flags")  # see main.py
    ls = verbs.add_parser("ls", help="nodes that the gateway knows (needs an admin key)")
    add_json(ls)
    add_access(ls)
    ls.set_defaults(run=run_ls)
    drain = verbs.add_parser("drain", help="let a node take no new sandboxes (needs an admin key)")
    drain.add_argument("node", metavar="NODE", help="as `dsec node ls` prints it")
    drain.add_argument("--off", action="store_true", help="take new ones again")
    drain.add_argument("--deadline-s", type=float, default=None, help="end what still lives after so long")
    add_json(drain)
    add_access(drain)
    drain.set_defaults(run=run_drain)
    look = verbs.add_parser("fingerprint", help="what the node daemon of this machine can do, and why not the rest")
    look.add_argument("--socket", type=Path, default=None, metavar="PATH", help="default: that of `dsec dev`")
    add_data(look)
    add_json(look)
    look.set_defaults(run=run_fingerprint)


async def run_ls(args: argparse.Namespace) -> int:
    """One node a line."""
    async with open_client(args) as client:
        listing = await client.transport.request("GET", "/v1/nodes", NodeList)
    nodes = listing.nodes
    for note in listing.notes:
        say(f"note: {note}")
    if args.json:
        print_json(nodes)
    else:
        print_table(
            ("node", "state", "sandboxes", "cpus", "memory", "starting", "backends", "address"), map(_row, nodes)
        )
    return 0


def _row(info: NodeInfo) -> list[object]:
    state = "stale" if info.stale else "draining" if info.draining else "ready"
    room = info.capacity
    backends = ",".join(backend.name for backend in info.backends if backend.available)
    return [
        info.node,
        state,
        f"{room.sandboxes}/{room.sandboxes_max}",
        f"{room.cpus_used:g}/{room.cpus_total:g}",
        f"{room.memory_mib_used}/{room.memory_mib_total}M",
        room.starting,
        backends or "-",
        info.address,
    ]


async def run_drain(args: argparse.Namespace) -> int:
    """Switch draining on or off."""
    body = checked(DrainRequest, on=not args.off, deadline_s=args.deadline_s)
    async with open_client(args) as client:
        path = f"/v1/nodes/{quote(args.node, safe='')}/drain"
        info = await client.transport.request("POST", path, NodeInfo, body=body)
    if args.json:
        print_json(info)
    else:
        print(f"{info.node} {'draining' if info.draining else 'ready'}")
    return 0


async def run_fingerprint(args: argparse.Namespace) -> int:
    """Backends with reasons."""
    socket = args.socket or layout_of(args).node_socket
    transport = Transport(load_settings(f"unix:{socket}", "", reconnect_s=0.0))
    try:
        info = await transport.request("GET", "/v1/node", NodeInfo)
    except PlatformError as error:
        raise PlatformError(
            "no_node", f"no node daemon answers at {socket}", hint="run `dsec dev`, or `dsec doctor`"
        ) from error
    finally:
        await transport.close()
    if args.json:
        print_json(info)
        return 0
    for backend in info.backends:
        print(f"{backend.name}: {'available' if backend.available else f'not available: {backend.reason}'}")
        for feature in backend.features:
            print(f"  + {feature}")
        for key, value in sorted(backend.attributes.items()):
            print(f"  {key} = {value}")
    return 0
