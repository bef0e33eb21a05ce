"""The C reader of operation lists, under sanitizers: thousands of damaged lists, each refused or read within bounds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nomad_dsec.backends.container.plan import plan_container
from nomad_dsec.guest import build
from tests.kit.abilities import needs
from tests.unit.container.samples import container

pytestmark = needs("cc")
PARTS = ("launch_plan.c", "launch_ops.c", "launch_mount.c", "launch_files.c", "launch_lock.c", "launch_path.c")
ROUNDS = 20_000


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    files = [build.SOURCES / name for name in ("fuzz_plan.c", *PARTS)]
    out = tmp_path_factory.mktemp("fuzz") / "fuzz_plan"
    return build.compile_program(out, files, (*build.SANITIZED, "-DFUZZ_MAIN"))


def run(reader: Path, seed: Path, rounds: int, number: int) -> str:
    done = subprocess.run([reader, seed, str(rounds), str(number)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("number", [1, 2])
def test_damaged_lists_are_read_within_bounds(reader, tmp_path, number):
    seed = tmp_path / "plan"
    made = plan_container(
        container({"protected_paths": ["/bin/bash"]}, secrets={"a": "b"}), controllers=("cpu",), unified=True
    )
    seed.write_bytes(made.packed)
    accepted = int(run(reader, seed, ROUNDS, number).split()[0])
    assert 0 < accepted < ROUNDS  # both the readers of good lists and the refusals were exercised


def test_nothing_is_accepted_of_a_torn_list(reader, tmp_path):
    made = plan_container(container(), controllers=("cpu",), unified=True)
    seed = tmp_path / "torn"
    seed.write_bytes(made.packed[: len(made.packed) // 2])
    assert int(run(reader, seed, 2000, 5).split()[0]) == 0
