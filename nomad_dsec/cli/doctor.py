"""`dsec doctor`: what this host can and can't do, and how to fix it. Exit code 1 when something required is missing."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from nomad_dsec import config
from nomad_dsec.cli.access import add_data, layout_of
from nomad_dsec.cli.output import add_json, print_json
from nomad_dsec.dev.processes import is_alive
from nomad_dsec.doctor.checks import Subject, examine

if TYPE_CHECKING:
    import argparse

    from nomad_dsec.doctor.row import Check

_STYLE = {"ok": "green", "FAIL": "bold red", "note": "yellow"}


def add(parser: argparse.ArgumentParser) -> None:
    """Flags of `dsec doctor`."""
    parser.add_argument("--sandboxes", type=int, default=3200, help="how many at once the limits should allow")
    add_data(parser)
    config.add_flags(parser, ("consul", "nomad"))
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """One line a check, its fix below it."""
    layout = layout_of(args)
    state = layout.read_state() if layout.data.is_dir() else None
    nodes = (state.node,) if state is not None and is_alive(state.supervisor) else ()
    settings = config.from_args(args)
    checks = examine(Subject(data=layout.node, nodes=nodes, sandboxes=args.sandboxes, settings=settings))
    if args.json:
        print_json([asdict(check) | {"mark": check.mark} for check in checks])
    else:
        console = Console(soft_wrap=True)
        for check in checks:
            console.print(_line(check))
    return 1 if any(check.mark == "FAIL" for check in checks) else 0


def _line(check: Check) -> Text:
    text = Text.assemble((f"{check.mark:4}", _STYLE.get(check.mark, "")), "  ", (check.name, "bold"))
    if check.reason:
        text.append(f"  {check.reason}")
    if check.fix and not check.ok:
        text.append(f"\n      fix: {check.fix}", style="cyan")
    return text
