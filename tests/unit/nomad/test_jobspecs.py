"""Job files and ACL policies: each parses, names only settings that the drivers have, and stands in its README."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import hcl2
import pytest
from dsec_plugins.drivers.kinds import KINDS

ROOT = Path(__file__).parents[3]
JOBS = sorted((ROOT / "jobspecs").glob("*.hcl"))
POLICIES = sorted((ROOT / "policies/acl").glob("*.hcl"))


def load(path: Path) -> dict:
    with path.open() as file:
        return hcl2.load(file)


def plain(name: str) -> str:
    """hcl2 keeps the quotes of labels and strings."""
    return name.strip('"')


def blocks(parent: dict, kind: str):
    """(label, body) of labelled blocks."""
    for block in parent.get(kind, []):
        for label, body in block.items():
            if not label.startswith("__"):
                yield plain(label), body


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_a_job_file_is_sound(path: Path) -> None:
    ((name, job),) = blocks(load(path), "job")
    assert name.startswith("dsec-")
    assert plain(job["type"]) in ("service", "batch", "system")
    tasks = [body for _, group in blocks(job, "group") for _, body in blocks(group, "task")]
    assert tasks
    for task in tasks:
        driver = plain(task["driver"])
        assert driver in (*KINDS, "raw_exec")
        if driver in KINDS:
            known = {row.name for row in fields(KINDS[driver].config)}
            given = {key for key in task["config"][0] if not key.startswith("__")}
            assert given <= known, f"{driver} has no setting {given - known}"
        resources = task["resources"][0]
        assert "memory" in resources
        assert "cpu" in resources or "cores" in resources


def test_every_file_is_listed_and_commented() -> None:
    listed = (ROOT / "jobspecs/README.md").read_text()
    for path in JOBS:
        assert f"`{path.name}`" in listed, f"{path.name} is missing in jobspecs/README.md"
    for path in [*JOBS, *POLICIES]:
        assert path.read_text().startswith("# "), f"{path.name} does not say what it is for"


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_a_policy_grants_no_more_than_its_kind_may(path: Path) -> None:
    rules = load(path)
    kind = path.suffixes[0]
    text = path.read_text()
    if kind == ".nomad":
        assert set(rules) - {"__comments__"} <= {"namespace", "node", "agent"}
        assert "alloc-node-exec" not in [
            w.strip('",') for line in text.splitlines() if "#" not in line for w in line.split()
        ]
    elif kind == ".consul":
        assert not {"operator", "acl", "agent_prefix"} & set(rules)
    else:
        assert kind == ".vault"
        for name, body in blocks(rules, "path"):
            assert not name.endswith("sys/*")
            assert [plain(c) for c in body["capabilities"]] in (["read"], ["update"])
