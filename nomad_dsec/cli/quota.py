"""`dsec quota`: how much a namespace may hold at once. Set with an admin key; what runs already stays."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from libdsec._requests import checked
from libdsec.errors import UsageError

from nomad_dsec.cli.access import add_access, open_client
from nomad_dsec.cli.output import add_json, print_json, print_table
from nomad_dsec.gateway.api import WhoAmI
from nomad_dsec.gateway.quotas import Quota

if TYPE_CHECKING:
    import argparse

_BOUNDS = (
    ("sandboxes", int, "sandboxes at once"),
    ("cpus", float, "cores in all"),
    ("memory_mib", int, "MiB of memory in all"),
    ("disk_mib", int, "MiB of writable layers in all"),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Verbs of `dsec quota`."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    show = verbs.add_parser("show", help="bounds and use of the key's own namespace, or bounds of another")
    show.add_argument("namespace", nargs="?", default="", metavar="NAMESPACE", help="another one (needs an admin key)")
    put = verbs.add_parser("set", help="replace a namespace's bounds; what is not given has none")
    put.add_argument("namespace", metavar="NAMESPACE", help="whose; keys are made for one by `dsec key create`")
    for name, kind, text in _BOUNDS:
        put.add_argument("--" + name.replace("_", "-"), type=kind, default=None, help=text)
    put.add_argument("--unlimited", action="store_true", help="no bounds at all")
    for verb, run in ((show, run_show), (put, run_set)):
        add_json(verb)
        add_access(verb)
        verb.set_defaults(run=run)


async def run_show(args: argparse.Namespace) -> int:
    """Use is known of the key's own namespace only."""
    async with open_client(args) as client:
        if args.namespace:
            quota, use = await client.transport.request("GET", _path(args.namespace), Quota), None
        else:
            use = await client.transport.request("GET", "/v1/whoami", WhoAmI)
            quota = use.quota
    if args.json:
        print_json(use or quota)
    else:
        _print(args.namespace or (use.namespace if use else ""), quota, use)
    return 0


async def run_set(args: argparse.Namespace) -> int:
    """Replace all bounds."""
    given = {name: getattr(args, name) for name, _, _ in _BOUNDS if getattr(args, name) is not None}
    if bool(given) == args.unlimited:
        raise UsageError("no_bounds", "give at least one bound, or --unlimited alone", field="--sandboxes")
    async with open_client(args) as client:
        body = checked(Quota, **given)
        quota = await client.transport.request("PUT", _path(args.namespace), Quota, body=body)
    if args.json:
        print_json(quota)
    else:
        _print(args.namespace, quota, None)
    return 0


def _print(namespace: str, quota: Quota, use: WhoAmI | None) -> None:
    rows = []
    for name, _, _ in _BOUNDS:
        bound = getattr(quota, name)
        shown = "unlimited" if bound is None else f"{bound:g}"
        rows.append([namespace, name, "-" if use is None else f"{getattr(use, name):g}", shown])
    print_table(("namespace", "what", "used", "bound"), rows)


def _path(namespace: str) -> str:
    return f"/v1/namespaces/{quote(namespace, safe='')}/quota"
