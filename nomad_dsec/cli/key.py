"""`dsec key`: API keys, in the gateway's database on this machine; a running gateway sees a change within a second."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from libdsec.errors import UsageError

from nomad_dsec.cli.access import add_data, layout_of
from nomad_dsec.cli.output import add_json, age, print_json, print_table, say
from nomad_dsec.clock import SYSTEM
from nomad_dsec.gateway.db import open_database
from nomad_dsec.gateway.keys import Keyring

if TYPE_CHECKING:
    import argparse

    from nomad_dsec.gateway.db import Database


def add(parser: argparse.ArgumentParser) -> None:
    """Verbs of `dsec key`."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    create = verbs.add_parser("create", help="make a key and print it, this once")
    create.add_argument("--namespace", default="default", help="whose sandboxes it sees")
    create.add_argument("--admin", action="store_true", help="sees all namespaces, and nodes")
    create.add_argument("--label", default="", help="a note for `ls`")
    ls = verbs.add_parser("ls", help="list keys, without their secrets")
    revoke = verbs.add_parser("revoke", help="end a key")
    revoke.add_argument("key", metavar="KEY_ID", help="as `ls` prints it")
    for verb, run in ((create, run_create), (ls, run_ls), (revoke, run_revoke)):
        verb.add_argument("--gateway-data", type=Path, metavar="DIR", help="the gateway's (default: <data>/gateway)")
        add_data(verb)
        add_json(verb)
        verb.set_defaults(run=run)


def _database(args: argparse.Namespace) -> Database:
    directory = args.gateway_data or layout_of(args).gateway
    if not directory.is_dir():
        raise UsageError(
            "no_gateway", f"no gateway has run on {directory}", field="--gateway-data", hint="run `dsec dev` first"
        )
    return open_database(directory)


async def run_create(args: argparse.Namespace) -> int:
    """Print the secret."""
    with closing(_database(args)) as database:
        row, secret = await Keyring(database, SYSTEM).create(args.namespace, admin=args.admin, label=args.label)
    if args.json:
        print_json({**asdict(row), "key": secret})
    else:
        print(secret)
        say(f"key {row.id} of namespace {row.namespace}; it is shown this once")
    return 0


async def run_ls(args: argparse.Namespace) -> int:
    """One key a line."""
    with closing(_database(args)) as database:
        rows = Keyring(database, SYSTEM).rows()
    if args.json:
        print_json([asdict(row) for row in rows])
        return 0
    print_table(
        ("key", "namespace", "scope", "age", "state", "label"),
        (
            [
                row.id,
                row.namespace,
                "admin" if row.admin else "namespace",
                age(row.created_at),
                "revoked" if row.revoked_at else "active",
                row.label,
            ]
            for row in rows
        ),
    )
    return 0


async def run_revoke(args: argparse.Namespace) -> int:
    """End it; harmless when it has ended."""
    with closing(_database(args)) as database:
        row = await Keyring(database, SYSTEM).revoke(args.key)
    if args.json:
        print_json(asdict(row))
    else:
        print(f"{row.id} revoked")
    return 0
