"""`dsec doctor`: what this host can and can't do, and how to fix it. Exit code 1 when containers can't start here."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from nomad_dsec.cli.access import add_data, layout_of
from nomad_dsec.cli.output import add_json, print_json, print_table, say

if TYPE_CHECKING:
    import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """The noun has no verbs."""
    add_data(parser)
    add_json(parser)
    parser.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="ID",
        help="a node of this machine, whose cgroups, links and tables are no leftovers (repeatable)",
    )
    parser.add_argument(
        "--sandboxes", type=int, default=3200, metavar="N", help="how many at once the limits must allow"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, print, judge."""
    from nomad_dsec.doctor import Subject, examine

    rows = examine(Subject(data=layout_of(args).data / "node", nodes=tuple(args.node), sandboxes=args.sandboxes))
    if args.json:
        print_json([asdict(row) | {"mark": row.mark} for row in rows])
    else:
        print_table(("", "check", "seen"), ((row.mark, row.name, row.reason) for row in rows))
        fixes = [row for row in rows if row.fix]
        if fixes:
            say("")
        for row in fixes:
            say(f"{row.name}: {row.fix}")
    return 1 if any(row.mark == "FAIL" for row in rows) else 0
