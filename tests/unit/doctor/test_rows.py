"""Rows are data: marks, versions, and what a host that lacks something is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from dsec_policies.abilities import HostAbilities

from nomad_dsec.doctor.kernel import check_isolation, check_network, release
from nomad_dsec.doctor.leftovers import running_nodes
from nomad_dsec.doctor.row import Check


@pytest.mark.parametrize(
    ("text", "version"), [("6.18.44-fc-v657", (6, 18)), ("5.15.0-91-generic", (5, 15)), ("6.1rc3", (6, 1))]
)
def test_release(text: str, version: tuple[int, int]) -> None:
    assert release(text)[0] == version[0]
    if "rc" not in text:
        assert release(text) == version


def test_marks() -> None:
    assert Check(name="x", ok=True, required=True).mark == "ok"
    assert Check(name="x", ok=False, required=True).mark == "FAIL"
    assert Check(name="x", ok=False).mark == "note"


def test_what_is_missing_has_a_fix_and_what_is_there_has_none() -> None:
    rows = check_isolation(HostAbilities.assumed(without=("landlock_scopes", "user_namespaces")))
    assert {row.name: row.mark for row in rows if not row.ok} == {"landlock scopes": "note", "user namespaces": "FAIL"}
    assert all(bool(row.fix) != row.ok for row in rows)


def test_open_network_is_optional() -> None:
    rows = {row.name: row for row in check_network(HostAbilities.assumed(without=("nftables",)))}
    assert rows["nftables"].mark == "note"
    assert "network=open" in rows["nftables"].fix
    assert rows["veth"].ok


def test_a_node_runs_when_the_process_of_its_file_holds_its_lock(tmp_path: Path) -> None:
    for pid, told in ((10, 10), (11, 999), (12, None)):  # alive; the file of a former one; no file
        data = tmp_path / f"data{pid}"
        data.mkdir()
        if told is not None:
            (data / "node.json").write_text(f'{{"node": "n{pid}", "pid": {told}}}')
        process = tmp_path / "proc" / str(pid)
        (process / "fd").mkdir(parents=True)
        (process / "cmdline").write_bytes(b"python\0-m\0nomad_dsec.node")
        (process / "fd" / "5").symlink_to(data / "lock")
    (tmp_path / "proc" / "self").mkdir()
    assert running_nodes(tmp_path / "proc") == {"n10"}
