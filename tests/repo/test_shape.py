"""File sizes, banned names, and files that must be there."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 600
# path -> why it may be longer
LONG_FILES = {
    "sdk/libdsec/sync.py": "generated",
    "plugins/dsec_plugins/proto/driver_pb2_grpc.py": "generated",
}
BANNED = re.compile(r"(^|_)(utils?|commons?|helpers?|managers?|misc)(_|$)", re.IGNORECASE)
REQUIRED = (
    "README.md ARCHITECTURE.md SPECIFICATION.md SECURITY.md CONTRIBUTING.md CHANGELOG.md LICENSE Makefile "
    "pyproject.toml .ci/run sdk/pyproject.toml constraints.txt"
).split()
ROOMS = ["nomad_dsec", "jobspecs", "plugins", "imagefs", "policies", "sdk", "terraform", "tests"]


def _tracked(*patterns: str) -> list[Path]:
    done = subprocess.run(["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).exists()]


def test_no_file_is_too_long() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in _tracked("*.py", "*.c", "*.h")
        if (lines := len(path.read_text().splitlines())) > LIMIT
    }
    assert set(long) <= set(LONG_FILES), long


def test_no_banned_names() -> None:
    found = []
    for path in _tracked("*.py"):
        if BANNED.search(path.stem):
            found.append(str(path))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                words = "_".join(re.findall(r"[A-Z][a-z]*", node.name))
                if BANNED.search(words):
                    found.append(f"{path}: class {node.name}")
    assert not found, found


def test_required_files() -> None:
    missing = [name for name in REQUIRED if not (ROOT / name).is_file()]
    missing += [name for name in ROOMS if not (ROOT / name).is_dir()]
    assert not missing


def test_no_binaries_are_committed() -> None:
    bad = [str(path) for path in _tracked() if path.is_file() and b"\0" in path.read_bytes()[:4096]]
    assert not bad


def test_pure_modules_import_nothing_of_the_world() -> None:
    """Specs, placement, codecs and compilers are data in, data out."""
    world = {"asyncio", "socket", "subprocess", "os"}
    pure = _tracked(
        "nomad_dsec/placement/*.py",
        "nomad_dsec/backends/container/spec.py",
        "nomad_dsec/backends/container/plan*.py",
        "nomad_dsec/backends/fncall/checkers.py",
        "nomad_dsec/backends/fncall/verdicts.py",
        "nomad_dsec/backends/fncall/languages.py",
        "nomad_dsec/backends/fncall/lane_*.py",
        "nomad_dsec/backends/fncall/outcome.py",
        "nomad_dsec/backends/fncall/program.py",
        "nomad_dsec/guest/frames.py",
        "nomad_dsec/node/states.py",
        "policies/dsec_policies/model.py",
        "policies/dsec_policies/profiles.py",
        "policies/dsec_policies/bpf.py",
    )
    found = []
    for path in pure:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names.append(node.module)
            found += [f"{path.name} imports {name}" for name in names if name.split(".")[0] in world]
    assert not found, found
