"""CASES.md names a test for every field case, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([EFLIPB]\d+) \|", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
# P: the drivers of a cluster. B: bugs of image tools; B24 is of a mechanism that is not here (fanotify).
CASES = [f"E{n}" for n in range(1, 12)] + [f"F{n}" for n in range(1, 6)] + [f"L{n}" for n in range(1, 13)]
CASES += [f"I{n}" for n in range(1, 5)] + [f"P{n:02}" for n in range(1, 41)]
CASES += [f"B{n:02}" for n in range(1, 28) if n != 24]


def _rows() -> dict[str, str]:
    lines = (ROOT / "tests/CASES.md").read_text().splitlines()
    return {found[1]: line for line in lines if (found := ROW.match(line))}


def _tests_of(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_case_has_a_test() -> None:
    rows = _rows()
    assert [case for case in CASES if case not in rows] == []
    assert [case for case, line in rows.items() if not NAMED.search(line)] == []


def test_every_named_test_exists() -> None:
    missing = []
    for case, line in _rows().items():
        for file, name in NAMED.findall(line):
            path = ROOT / file
            if not (path.is_file() and name.startswith("test_") and name in _tests_of(path)):
                missing.append(f"{case}: {file}::{name}")
    assert missing == []
