"""`dsec config show`: every setting, its value and where that came from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nomad_dsec import config
from nomad_dsec.cli.output import add_json, print_json, print_table

if TYPE_CHECKING:
    import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Verbs of `dsec config`."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    show = verbs.add_parser("show", help="all settings, with the flag and variable that set each")
    show.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    add_json(show)
    show.set_defaults(run=run_show)


def run_show(args: argparse.Namespace) -> int:
    """Print the table."""
    settings = config.load(file=args.config)
    rows = []
    for row in config.TABLE:
        value = settings[row.key]
        shown = "(set)" if row.secret and value else value
        rows.append(
            {"key": row.key, "value": shown, "origin": settings.origins[row.key], "env": row.env, "help": row.help}
        )
    if args.json:
        print_json(rows)
    else:
        print_table(
            ("setting", "value", "from", "variable"),
            ([row["key"], _text(row["value"]), row["origin"], row["env"]] for row in rows),
        )
    return 0


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list) else str(value) if value != "" else '""'
