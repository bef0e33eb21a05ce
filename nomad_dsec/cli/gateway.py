"""`dsec gateway run`, which main.py hands to the gateway's own parser."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Its one verb, for `--help`."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verbs.add_parser("run", help="run it in the foreground; `dsec gateway run --help` lists its flags")
