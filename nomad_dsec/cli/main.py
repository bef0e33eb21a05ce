"""The `dsec` command: a noun, a verb. stdout is data, stderr is talk.

Exit codes: 0 ok, 1 fault, 2 usage, 3 no capacity, 4 denied; `dsec sandbox exec|shell` give the program's own, and 125
for a fault of the platform.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import importlib
import inspect
import os
import re
import sys
from typing import TYPE_CHECKING, NoReturn

from libdsec.errors import DsecError

from nomad_dsec.cli.output import say

if TYPE_CHECKING:
    from collections.abc import Sequence

NOUNS = {
    "dev": "run everything on this machine",
    "sandbox": "create, use and end sandboxes",
    "fncall": "stateless calls: run a program, judge a submission",
    "image": "images of this machine's store",
    "node": "node daemons",
    "gateway": "the gateway",
    "key": "API keys",
    "quota": "how much a namespace may hold at once",
    "nomad": "task drivers for a Nomad client",
    "doctor": "what this host can and can't do, and how to fix it",
    "top": "live view of nodes and sandboxes",
    "config": "settings and where each came from",
    "demo": "the guided tour: groups of agents, a killed daemon, a report",
}
# Daemons have parsers of their own, made from the table of settings.
DAEMONS = {("node", "run"): "nomad_dsec.node.main", ("gateway", "run"): "nomad_dsec.gateway.__main__"}
_EXIT = {"usage": 2, "not_found": 2, "capacity": 3, "denied": 4}


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors that name the flag and the nearest word; the parser that was reached says them."""

    def error(self, message: str) -> NoReturn:
        """Say it on stderr and exit with 2."""
        message = message.removeprefix("argument ")
        say(f"{self.prog}: {message}")
        wrong, _, known = message.partition(" (choose from ")
        near = difflib.get_close_matches(wrong.rpartition(": ")[2].strip("'"), re.findall(r"'([^']*)'", known), n=1)
        say((f"did you mean {near[0]!r}? " if near else "") + f"see: {self.prog} --help")
        sys.exit(2)

    def parse_known_args(  # type: ignore[override]  # narrower: argparse's own is generic in the namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Words too many are told by the verb they were given to, whose --help lists what it takes."""
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            hint = getattr(found, "hint_extra", "")
            self.error(f"unrecognized arguments: {' '.join(extra)}" + (f"; {hint}" if hint else ""))
        return found, extra


def build_parser(nouns: Sequence[str]) -> Parser:
    """The parser, with the verbs of the given nouns only (each noun's file is imported)."""
    parser = Parser(prog="dsec", description="Sandboxes for agentic RL: one machine or a cluster.")
    parser.add_argument("--version", action="version", version=f"dsec {_version()}")
    found = parser.add_subparsers(dest="noun", metavar="NOUN", required=True, parser_class=Parser)
    for noun, text in NOUNS.items():
        child = found.add_parser(noun, help=text, description=text[:1].upper() + text[1:] + ".")
        if noun in nouns:
            importlib.import_module(f"nomad_dsec.cli.{noun}").add(child)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the boundary at which every error becomes a sentence and an exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    daemon = DAEMONS.get(tuple(given[:2]))  # type: ignore[arg-type]  # any length may be asked for
    if daemon is not None:
        return int(importlib.import_module(daemon).main(given[2:]))
    nouns = [word for word in given[:1] if word in NOUNS]
    args = build_parser(nouns).parse_args(given)
    fault_code, fault_codes = getattr(args, "fault_code", None), getattr(args, "fault_codes", {})
    try:
        outcome = args.run(args)
        code = asyncio.run(outcome) if inspect.iscoroutine(outcome) else outcome
        sys.stdout.flush()
        return int(code or 0)
    except (DsecError, BrokenPipeError, ExceptionGroup) as raised:  # under a TaskGroup ours comes in a group
        error = _first(raised)
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0  # the reader has what it wanted: `dsec ... | head`
        if not isinstance(error, DsecError):
            raise
        say_error(error)
        return fault_codes.get(error.code) or fault_code or _EXIT.get(error.kind, 1)
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _first(error: Exception) -> Exception:
    """The first error that is no group."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def say_error(error: DsecError) -> None:
    """An error for people: what, which flag, what to do."""
    where = f"{error.field}: " if error.field else ""
    say(f"dsec: {where}{error.message}")
    for key, value in error.details.items():
        if isinstance(value, dict):
            say(f"  {key}: " + ", ".join(f"{name}={count}" for name, count in value.items()))
        elif value not in ("", None):
            say(f"  {key}: {value}")
    if error.hint:
        say(f"  {error.hint}")


def _version() -> str:
    from libdsec import __version__

    return __version__
