"""`dsec gateway run`."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Its one verb."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    run = verbs.add_parser(
        "run", help="run the gateway in the foreground; `dsec gateway run --help` lists its flags", add_help=False
    )
    run.add_argument("flags", nargs=argparse.REMAINDER)
    run.set_defaults(run=run_gateway)


def run_gateway(args: argparse.Namespace) -> int:
    """The gateway itself."""
    from nomad_dsec.gateway.__main__ import main

    return main(list(args.flags))
