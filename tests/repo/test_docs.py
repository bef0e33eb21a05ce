"""Documents name files that are there and commands that parse; tests/system/test_readme.py runs the README."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from nomad_dsec.cli.main import DAEMONS, NOUNS, build_parser
from tests.kit.documents import REPO, blocks, dsec_calls, named_files

DOCUMENTS = sorted(path.name for path in REPO.glob("*.md"))
# Files that documents speak of without their being here: a user's own, and those of a program inside.
NOT_OURS = {"spec.py", "backend.py", "solution.py", "hello.py"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_files_it_names_are_there(document) -> None:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    known = ["/" + line for line in done.stdout.splitlines()]
    gone = [name for name in named_files(document) - NOT_OURS if not any(path.endswith("/" + name) for path in known)]
    assert gone == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_its_links_lead_somewhere(document) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", (REPO / document).read_text("utf-8"))
    assert [target for target in targets if "://" not in target and not Path(REPO, target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_its_commands_parse(document, capsys) -> None:
    wrong = []
    for argv in dsec_calls(document):
        if argv[0] not in NOUNS or tuple(argv[:2]) in DAEMONS:
            wrong += [argv] if argv[0] not in NOUNS else []
            continue
        if len(argv) == 1 or argv[-1] == "...":  # `dsec dev`, or a verb named without what it takes
            continue
        try:
            build_parser([argv[0]]).parse_args(argv)
        except SystemExit as stopped:
            told = capsys.readouterr().err
            if stopped.code != 0 and "arguments are required" not in told:
                wrong.append([*argv, told])
    assert wrong == []


def test_its_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (REPO / "Makefile").read_text("utf-8"), re.MULTILINE))
    asked = {
        command.split()[1] for block in blocks("README.md") for command in block.commands if command.startswith("make ")
    }
    assert asked
    assert asked <= targets
