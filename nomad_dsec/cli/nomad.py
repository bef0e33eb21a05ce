"""`dsec nomad`: the drivers' entry files for a Nomad client, and the settings of each driver."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dsec_plugins import install
from libdsec.errors import UsageError

from nomad_dsec.cli.output import add_json, print_json, print_table, say

if TYPE_CHECKING:
    import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Verbs of `dsec nomad`."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    put = verbs.add_parser("install-plugins", help="write the drivers' entry files into a Nomad client's plugin_dir")
    put.add_argument("--plugin-dir", type=Path, required=True, metavar="DIR", help="plugin_dir of the agent's config")
    put.add_argument(
        "--driver", action="append", choices=install.NAMES, default=None, help="only this one (repeat for more)"
    )
    put.add_argument("--interpreter", default="", metavar="PATH", help="Python to run them; default: this one")
    add_json(put)
    put.set_defaults(run=run_install)
    settings = verbs.add_parser("settings", help="what a task's config block may hold, by driver")
    settings.add_argument("driver", choices=[*install.NAMES, "plugin"], help="`plugin`: the agent's own plugin block")
    add_json(settings)
    settings.set_defaults(run=run_settings)


def run_install(args: argparse.Namespace) -> int:
    """Install, and look at what else lies there."""
    names = tuple(args.driver) if args.driver else install.NAMES
    try:
        paths = install.install(args.plugin_dir, names=names, interpreter=args.interpreter)
    except install.InstallError as error:
        raise UsageError("plugins_not_installed", str(error), field="--plugin-dir") from error
    if args.json:
        print_json({"installed": [str(path) for path in paths]})
    else:
        for path in paths:
            print(path)
    for problem in install.problems_in(args.plugin_dir):
        say(f"warning: {problem}")
    return 0


def run_settings(args: argparse.Namespace) -> int:
    """One setting a line."""
    from dsec_plugins.drivers.configs import PluginConfig
    from dsec_plugins.drivers.kinds import KINDS
    from dsec_plugins.drivers.schema import document

    rows = document(PluginConfig if args.driver == "plugin" else KINDS[args.driver].config)
    if args.json:
        print_json([dict(zip(("name", "type", "default", "help"), row)) for row in rows])
    else:
        print_table(("setting", "type", "default", "what"), rows)
    return 0
