"""`dsec dev`: node daemon and gateway of this machine in one process tree; `dsec dev stop`, `status`, `env`."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from libdsec.errors import UsageError

from nomad_dsec.cli.access import add_data, layout_of
from nomad_dsec.cli.output import add_json, print_json, say
from nomad_dsec.dev import cluster, control
from nomad_dsec.dev.layout import DEFAULT_DATA
from nomad_dsec.dev.processes import is_alive
from nomad_dsec.dev.supervisor import DevOptions, Supervisor
from nomad_dsec.ids import check_node
from nomad_dsec.log import setup_logging

if TYPE_CHECKING:
    import argparse

    from nomad_dsec.dev.layout import DevState, Layout


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `dsec dev`."""
    parser.add_argument(
        "verb",
        nargs="?",
        choices=("run", "stop", "status", "env"),
        default="run",
        help='run is the default; env prints the variables of a running one: eval "$(dsec dev env)"',
    )
    add_data(parser)
    parser.add_argument("--detach", action="store_true", help="return when it is ready; it goes on in the background")
    parser.add_argument("--keep", action="store_true", help="at a stop, let sandboxes live; the next start adopts them")
    parser.add_argument("--host", default="127.0.0.1", help="address of the gateway")
    parser.add_argument("--port", type=int, default=0, help="port of the gateway; 0: that of before, else a free one")
    parser.add_argument("--images", type=Path, default=None, metavar="DIR", help="image store (default: <data>/images)")
    parser.add_argument("--node-id", default="", help="default: from the host name and the directory")
    parser.add_argument("--backends", default="", help="backends to offer, with commas between")
    parser.add_argument("--nomad", action="store_true", help="with Consul and Nomad agents, our drivers and a pool")
    parser.add_argument("--launcher", default="", help="container launcher: native or oci:<runtime>")
    add_json(parser)
    parser.set_defaults(run=run)


async def run(args: argparse.Namespace) -> int:
    """Start, stop or look."""
    layout = layout_of(args)
    if args.verb == "stop":
        ran = await control.stop(layout, keep=args.keep)
        say("stopped" if ran else f"nothing runs on {layout.data}")
        return 0
    if args.verb == "status":
        return _status(layout, as_json=args.json)
    if args.verb == "env":
        return _env(layout, as_json=args.json)
    if not 0 <= args.port <= 65_535:
        raise UsageError("bad_port", f"{args.port} is no port", field="--port", hint="0 to 65535")
    if args.nomad:
        cluster.check_tools()
    if args.detach:
        _print_env(await control.start_detached(layout, _argv(args, layout)), as_json=args.json)
        say(f"dsec dev is ready; stop it with `{_stop_of(layout)}`")
        return 0
    setup_logging(level="info", json_lines=not sys.stderr.isatty())
    await Supervisor(_options(args, layout), lambda state: _announce(state, layout, as_json=args.json)).run()
    return 0


def _options(args: argparse.Namespace, layout: Layout) -> DevOptions:
    flags = []
    for name, value in (("--backends", args.backends), ("--launcher", args.launcher)):
        flags += [name, value] if value else []
    node = check_node(args.node_id) if args.node_id else default_node(layout)
    return DevOptions(
        layout=layout,
        node=node,
        host=args.host,
        port=args.port,
        keep=args.keep,
        images=args.images,
        node_flags=flags,
        nomad=args.nomad,
    )


def _argv(args: argparse.Namespace, layout: Layout) -> list[str]:
    """The same command without --detach."""
    argv = ["dev", "run", "--data", str(layout.data), "--host", args.host, "--port", str(args.port)]
    for flag, value in (("--node-id", args.node_id), ("--backends", args.backends), ("--launcher", args.launcher)):
        argv += [flag, value] if value else []
    argv += ["--images", str(args.images.absolute())] if args.images else []
    argv += ["--nomad"] if args.nomad else []
    return [*argv, "--keep"] if args.keep else argv


def _announce(state: DevState, layout: Layout, *, as_json: bool) -> None:
    _print_env(state, as_json=as_json)
    say(f"dsec dev is ready; stop it with Ctrl-C or `{_stop_of(layout)}`")


def _stop_of(layout: Layout) -> str:
    """The command that stops this one, and not that of another directory."""
    return "dsec dev stop" if layout.data == DEFAULT_DATA else f"dsec dev stop --data {shlex.quote(str(layout.data))}"


def _print_env(state: DevState, *, as_json: bool) -> None:
    if as_json:
        print_json({"endpoint": state.endpoint, "api_key": state.api_key, "node": state.node})
    else:
        print(f"export DSEC_ENDPOINT={state.endpoint}\nexport DSEC_API_KEY={state.api_key}")
        if state.nomad:
            print(f"export NOMAD_ADDR={state.nomad}\nexport CONSUL_HTTP_ADDR={state.consul}")
    sys.stdout.flush()


def _env(layout: Layout, *, as_json: bool) -> int:
    state = layout.read_state()
    if state is None or not state.ready or not is_alive(state.supervisor):
        raise UsageError("not_running", f"nothing runs on {layout.data}", field="--data", hint="`dsec dev --detach`")
    _print_env(state, as_json=as_json)
    return 0


def _status(layout: Layout, *, as_json: bool) -> int:
    state = layout.read_state()
    alive = state is not None and is_alive(state.supervisor)
    if as_json:
        print_json({"running": alive, "data": str(layout.data), "state": state if alive else None})
    elif state is not None and alive:
        children = ", ".join(f"{name} pid {record.pid}" for name, record in state.children.items())
        print(f"{'ready' if state.ready else 'starting'} at {state.endpoint} ({children})")
    else:
        print(f"nothing runs on {layout.data}")
        left = [name for name, record in (state.children if state is not None else {}).items() if is_alive(record)]
        if left:
            say(f"its supervisor was killed; {' and '.join(left)} still run: start it again, or `dsec dev stop`")
    return 0 if alive else 1


def default_node(layout: Layout) -> str:
    """A node id from the host name and the directory: kernel names carry it, and a node sweeps what bears its own."""
    name = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().partition(".")[0].lower()).strip("-")[:20].strip("-")
    return f"{name or 'node'}-{hashlib.sha256(os.fsencode(layout.data)).hexdigest()[:6]}"
