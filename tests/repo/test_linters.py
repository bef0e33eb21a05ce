"""The same linters that a laptop runs: style, types, import layers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def _run(*argv: str) -> None:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"


def test_ruff_check() -> None:
    _run(str(BIN / "ruff"), "check", "--no-cache", ".")


def test_ruff_format() -> None:
    _run(str(BIN / "ruff"), "format", "--no-cache", "--check", ".")


@pytest.mark.timeout(600)
def test_types() -> None:
    _run(sys.executable, "-m", "mypy", "--cache-dir=/dev/null")


def test_import_layers() -> None:
    _run(str(BIN / "lint-imports"), "--no-cache")
