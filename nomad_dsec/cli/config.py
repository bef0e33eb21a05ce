"""`dsec config show`: every setting, its value and where that came from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nomad_dsec import config
from nomad_dsec.cli.output import add_json, print_json, print_table
from nomad_dsec.cluster.secrets import is_reference

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
        shown = _shown(row, settings[row.key])
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


def _shown(row: config.Setting, value: config.Value) -> config.Value:
    """Without what is secret; where a secret is to be found may be seen."""
    if row.secret and isinstance(value, str):
        return _hidden(value)
    if isinstance(value, list):  # http://host:port#token
        parts = [item.partition("#") for item in value]
        return [
            f"{head}#{_hidden(token)}" if token and "://" in head else head + hash_ + token
            for head, hash_, token in parts
        ]
    return value


def _hidden(secret: str) -> str:
    return secret if not secret or is_reference(secret) else "(set)"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list) else str(value) if value != "" else '""'
