"""What the commands print: data on stdout as tables or JSON, words on stderr."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def say(text: str) -> None:
    """A line of talk on stderr."""
    print(text, file=sys.stderr, flush=True)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Give a verb --json."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def print_json(value: Any) -> None:
    """One JSON value on stdout, indented."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns on stdout; the same on a terminal and in a pipe."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(column), *(len(row[at]) for row in texts), 0) for at, column in enumerate(columns)]
    for line in [[column.upper() for column in columns], *texts]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def size(count: float) -> str:
    """Bytes for people."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def count(number: int, one: str, many: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number:,} {one if number == 1 else many}"


def age(at: float | None, now: float | None = None) -> str:
    """How long ago, for people."""
    if not at:
        return "-"
    return span((time.time() if now is None else now) - at)


def span(seconds: float) -> str:
    """A length of time for people."""
    seconds = max(0, round(seconds))
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            rest = seconds % length // {"d": 3_600, "h": 60, "m": 1}[unit]
            return f"{seconds // length}{unit}{rest:02}"
    return f"{seconds}s"
