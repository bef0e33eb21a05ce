"""What is handed in as a secret is seen by its sandbox and by nobody else: not a neighbour, not a listing, not a file.

Layers: the tmpfs is in the sandbox's own mount namespace, its files are mode 0400; the value passes from the gateway's
store to the launcher in request bodies and in memory that is given back, and enters no argv, environment, handle,
database, journal or log. Each search is tried on something that is there.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.attack.marks import IN_SANDBOX
from tests.kit.gateways import Caller, spawned_gateway, tenant_key
from tests.kit.node_daemon import NodeDaemon

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [*IN_SANDBOX, pytest.mark.timeout(120)]
GIVEN, KEPT = "given-4c1f7e02b9", "kept-93ab55d0e1"  # in no program text of ours but this
FOUND = re.compile(f"{GIVEN}|{KEPT}".encode())
SMALL = {"image": "small", "cpus": 0.1, "memory_mib": 64, "disk_mib": 16, "pids": 64}


@asynccontextmanager
async def stack(directory: Path) -> AsyncIterator[tuple[NodeDaemon, Caller, Caller]]:
    """A node daemon, and callers of two namespaces on a gateway that keeps a secret for the first."""
    daemon = NodeDaemon(directory, backend="container")
    kept = directory / "kept/team-a/hub"
    kept.parent.mkdir(parents=True)
    kept.write_text(KEPT + "\n")
    kept.chmod(0o600)
    daemon.start()
    try:
        flags = ["--nodes", f"unix:{daemon.data / 'node.sock'}", "--sandbox-secrets", f"file:{directory / 'kept'}"]
        async with spawned_gateway(directory / "gateway", *flags, DSEC_LOG_LEVEL="debug") as (_, admin):
            callers = [Caller(admin.session._base_url, await tenant_key(admin, f"team-{x}")) for x in "ab"]
            try:
                yield daemon, callers[0], callers[1]
            finally:
                for caller in callers:
                    await caller.session.close()
    finally:
        daemon.remove()


async def sh(caller: Caller, sandbox: str, script: str, **more: Any) -> str:
    reply = await caller.ok("POST", f"/v1/sandboxes/{sandbox}/execs", {"cmd": script, **more})
    return base64.b64decode(reply.get("stdout", "")).decode()


def files_with(directory: Path, wanted: re.Pattern[bytes], *, but: str = "") -> list[str]:
    """Files below the directory that hold it; mounts and `but` are left out."""
    found = []
    for root, names, files in os.walk(directory):
        names[:] = [name for name in names if name != but and not os.path.ismount(os.path.join(root, name))]
        for name in files:
            path = Path(root, name)
            if path.is_file() and not path.is_symlink() and wanted.search(path.read_bytes()):
                found.append(str(path.relative_to(directory)))
    return sorted(found)


def processes_with(wanted: re.Pattern[bytes]) -> list[str]:
    """`pid/environ` and `pid/cmdline` of the host that hold it."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline"):
            with suppress(OSError):
                if wanted.search(Path(f"/proc/{pid}/{name}").read_bytes()):
                    found.append(f"{pid}/{name}")
    return found


def memory_has(pid: int, wanted: re.Pattern[bytes]) -> bool:
    """Whether a process has it in its own writable memory; proc(5), /proc/pid/mem."""
    with open(f"/proc/{pid}/maps", encoding="utf-8") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, mode = line.split()[:2]
            if "w" not in mode:
                continue
            first, last = (int(part, 16) for part in span.split("-"))
            with suppress(OSError, OverflowError):
                memory.seek(first)
                if wanted.search(memory.read(last - first)):
                    return True
    return False


def keepers(daemon: NodeDaemon) -> dict[int, str]:
    """The daemon's launcher, and PID 1 of its sandboxes."""
    assert daemon.process is not None
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            launcher = name == "dsec-launch" and int(parent) == daemon.process.pid
            if launcher or (name == "dsec-init" and daemon.node in Path(f"/proc/{pid}/cgroup").read_text()):
                found[int(pid)] = name
    return found


async def test_a_secret_is_its_sandboxs_alone(tmp_path):
    async with stack(tmp_path) as (daemon, one, other):
        wanted = SMALL | {"secrets": {"given": GIVEN}, "secret_refs": {"kept": "hub"}, "user": "1000"}
        (mine,) = (await one.ok("POST", "/v1/sandboxes", wanted))["sandboxes"]
        (neighbour,) = (await one.ok("POST", "/v1/sandboxes", SMALL))["sandboxes"]
        (foreign,) = (await other.ok("POST", "/v1/sandboxes", SMALL))["sandboxes"]
        inits = keepers(daemon)
        assert sorted(inits.values()) == ["dsec-init"] * 3 + ["dsec-launch"], inits
        assert [pid for pid in inits if memory_has(pid, FOUND)] == []  # a neighbour's PID 1 is its copy
        assert memory_has(os.getpid(), FOUND)

        assert await sh(one, mine["id"], "cat /run/secrets/given /run/secrets/kept") == GIVEN + KEPT
        assert (await sh(one, mine["id"], "cat /run/secrets/given 2>&1", user="1001")).endswith("Permission denied\n")

        search = "cat /run/secrets/* /proc/*/environ /proc/*/cmdline /etc/* /tmp/* 2>/dev/null"
        for caller, sandbox in ((one, neighbour["id"]), (other, foreign["id"])):
            said = await sh(caller, sandbox, f"{search}; echo ran; ls /run/secrets 2>&1")
            assert not FOUND.search(said.encode())
            assert "No such file" in said.partition("ran")[2]  # the layer: there is no such mount in its namespace
        assert FOUND.search((await sh(one, mine["id"], search)).encode())

        assert not FOUND.search(repr(await one.ok("GET", f"/v1/sandboxes/{mine['id']}")).encode())
        assert not FOUND.search(repr(await one.ok("GET", f"/v1/sandboxes/{mine['id']}/plan")).encode())
        assert await other.error("GET", f"/v1/sandboxes/{mine['id']}")

        assert processes_with(FOUND) == []
        child = subprocess.Popen([sys.executable, "-c", "input()"], env={"X": GIVEN}, stdin=subprocess.PIPE)
        try:
            async with asyncio.timeout(10):  # until it has executed the program
                while processes_with(FOUND) != [f"{child.pid}/environ"]:
                    await asyncio.sleep(0.02)
        finally:
            child.communicate(b"\n")

        daemon.kill9()
        daemon.start()
        assert await sh(one, mine["id"], "cat /run/secrets/given") == GIVEN  # they live in the sandbox
        assert files_with(tmp_path, FOUND, but="kept") == []
        assert files_with(tmp_path, re.compile(mine["id"].encode()), but="kept")  # the same search does find
        assert files_with(tmp_path, FOUND) == ["kept/team-a/hub"]
        await one.ok("DELETE", f"/v1/sandboxes/{mine['id']}")
        assert files_with(tmp_path, FOUND, but="kept") == []


async def test_refusals_tell_names_and_no_values(tmp_path):
    async with stack(tmp_path) as (_, one, other):
        wrong = [
            (one, {"secrets": {"a/b": GIVEN}}, "secrets.a/b"),
            (one, {"secrets": {"big": GIVEN * 20_000}}, "secrets.big"),
            (one, {"secrets": {"n": 7, "m": GIVEN}}, "secrets"),
            (one, {"secrets": {"a": GIVEN}, "image": "unknown"}, ""),
            (one, {"secrets": {"a": GIVEN}, "user": "no-such-user", "policy": {"no": "such"}}, ""),
            (one, {"secrets": {"a": GIVEN}, "secret_refs": {"a": "hub"}}, "secret_refs.a"),
            (one, {"secret_refs": {"a": "../team-b/hub"}}, "secret_refs"),
            (other, {"secret_refs": {"a": "hub"}}, "secret_refs"),
            (other, {"secret_refs": {"a": "../team-a/hub"}}, "secret_refs"),
        ]
        for caller, more, field in wrong:
            error = await caller.error("POST", "/v1/sandboxes", SMALL | more | {"wait_s": 1.0})
            assert error.field.startswith(field), (more, error)
            assert not FOUND.search(repr(error).encode())
        assert files_with(tmp_path, FOUND, but="kept") == []
        (made,) = (await one.ok("POST", "/v1/sandboxes", SMALL | {"secret_refs": {"a": "hub"}}))["sandboxes"]
        assert await sh(one, made["id"], "cat /run/secrets/a") == KEPT
