"""The doctor on this machine: it tells the truth about what a test just made."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from dsec_policies.abilities import HostAbilities

from nomad_dsec.doctor import Check, Subject, examine, kernel
from nomad_dsec.doctor.leftovers import check_leftovers
from nomad_dsec.doctor.limits import check_limits
from nomad_dsec.doctor.tools import ask_docker
from nomad_dsec.linux.cgroup import CgroupRoot
from tests.kit.abilities import needs


def test_every_row_says_what_was_seen_and_failures_say_what_to_do(tmp_path: Path) -> None:
    rows = examine(Subject(data=tmp_path / "not" / "there"))
    assert len(rows) > 25
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.reason for row in rows)
    assert not [row for row in rows if not row.ok and row.required and not row.fix]
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_breaks_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Check]:
        raise PermissionError(13, "Permission denied", "/sys/fs/cgroup/cgroup.controllers")

    monkeypatch.setattr(kernel, "check_cgroups", broken)
    rows = {row.name: row for row in examine(Subject(abilities=HostAbilities.assumed()))}
    assert "Permission denied" in rows["cgroups"].reason
    assert "kvm" in rows


@needs("root", "cgroup")
async def test_leftovers_are_those_of_other_nodes() -> None:
    node = f"d{os.getpid()}"
    root = CgroupRoot.detect(node)
    try:
        assert f"dsec-{node}" in check_leftovers(())[0].reason
        assert f"dsec-{node}" not in check_leftovers((node,))[0].reason
    finally:
        await root.remove()


def test_more_sandboxes_than_the_machine_takes() -> None:
    rows = {row.name: row for row in check_limits(10_000_000)}
    assert not rows["kernel.pid_max"].ok
    assert rows["kernel.pid_max"].fix.startswith("sysctl -w kernel.pid_max=")
    assert check_limits(1)[0].ok


def test_docker_is_asked_and_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    assert "not there" in ask_docker(path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def answer() -> None:
            for reply in (b"HTTP/1.1 200 OK\r\n\r\nOK", b"HTTP/1.1 500 no\r\n\r\n"):
                peer, _ = server.accept()
                peer.recv(1000)
                peer.sendall(reply)
                peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        assert ask_docker(path) == "OK"
        assert "gave" in ask_docker(path)
        thread.join(timeout=5)
    assert str(path) in ask_docker(path)  # bound once, nobody listens
