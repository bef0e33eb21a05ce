"""Out of the network that a sandbox has: host, metadata, neighbours, other sandboxes' sockets.

Layers: `none` is a network namespace with lo alone; `open` one whose only link the node's nftables table fences.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from dsec_policies.abilities import Ability

from tests.attack.marks import IN_SANDBOX
from tests.kit.abilities import needs
from tests.kit.attacker import run_bare

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.kit.sandbox import Box, Machine

pytestmark = [*IN_SANDBOX, needs("nft", "ip")]
#: Nothing else may be the answer: a connection that hangs would be a dropped packet, and a slow refusal.
REFUSED = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM}
SPECIAL = (
    "169.254.169.254", "168.63.129.16", "100.100.100.200", "10.0.0.1", "172.16.0.1", "172.17.0.1", "192.168.0.1",
    "192.168.1.1", "100.64.0.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "0.0.0.1",
)  # fmt: skip


def addresses_of_host() -> list[str]:
    """Every IPv4 address of the machine but loopback's."""
    shown = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True, timeout=10).stdout
    found = [line.split()[3].partition("/")[0] for line in shown.splitlines()]
    return [address for address in found if not address.startswith("127.")]


@pytest.fixture
def listener() -> Iterator[int]:
    """A port that is open on every address of the host."""
    with socket.create_server(("0.0.0.0", 0), backlog=64) as server:
        yield int(server.getsockname()[1])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def opened(machine: Machine, image: str) -> AsyncIterator[Box]:
    """A sandbox with the open network."""
    async with machine.sandbox(image, {"network": "open"}) as running:
        yield running


def pairs(addresses: list[str] | tuple[str, ...], port: int) -> list[str]:
    """The arguments of `attack connect`."""
    return [word for address in addresses for word in (address, str(port))]


def own_address(box: Box) -> str:
    record = box.started.handle.data["net"]
    return str(record["address"])


async def test_the_host_is_refused_on_every_address(opened: Box, listener: int) -> None:
    """CVE-2025-9074's kind: an engine's interface reachable from inside without any socket passed in."""
    gateway = str(opened.started.handle.data["net"]["gateway"])
    got = await opened.attack("connect", 2000, *pairs([gateway, *addresses_of_host()], listener))
    assert {address: code for address, code in got.items() if code not in REFUSED} == {}


def test_twin_the_host_s_port_is_open(attacker: Path, listener: int) -> None:
    got = run_bare(attacker, "connect", 2000, *pairs(["127.0.0.1", *addresses_of_host()], listener))
    assert set(got.values()) == {0}


async def test_special_addresses_are_refused_at_once(opened: Box) -> None:
    """Metadata, private ranges, CGNAT, test nets, multicast: whatever they are on this host's network."""
    for port in (80, 443):
        got = await opened.attack("connect", 2000, *pairs(SPECIAL, port))
        allowed = REFUSED | {errno.EINVAL, errno.EADDRNOTAVAIL}
        assert {address: code for address, code in got.items() if code not in allowed} == {}


async def test_a_scan_of_the_host_finds_nothing(opened: Box, listener: int) -> None:
    gateway = str(opened.started.handle.data["net"]["gateway"])
    got = await opened.attack("scan", gateway, 1, 2000)
    assert got["open"] == 0
    got = await opened.attack("scan", addresses_of_host()[0], listener - 100, listener + 100)
    assert got["open"] == 0


def test_twin_a_scan_of_the_host_from_outside_finds_the_port(attacker: Path, listener: int) -> None:
    assert run_bare(attacker, "scan", addresses_of_host()[0], listener - 100, listener + 100)["open"] >= 1


async def test_neighbours_are_refused(machine: Machine, image: str, opened: Box) -> None:
    """And the twin: the neighbour reaches its own port by the same address, so it listens."""
    async with machine.sandbox(image, {"network": "open"}) as neighbour:
        address = own_address(neighbour)
        async with serving(neighbour, 8080):
            got = await opened.attack("connect", 2000, *pairs([address], 8080))
            assert got[f"{address}:8080"] in REFUSED
            assert (await opened.attack("scan", address, 8000, 8100))["open"] == 0
            got = await neighbour.attack("connect", 2000, *pairs([address], 8080))
            assert got == {f"{address}:8080": 0}


class serving:
    """A listener inside a sandbox for the block."""

    def __init__(self, box: Box, port: int) -> None:
        self._box, self._port = box, port

    async def __aenter__(self) -> None:
        run = self._box.run("/usr/bin/attack", "serve", self._port, timeout_s=20)
        self._task = asyncio.ensure_future(run)
        for _ in range(100):
            await asyncio.sleep(0.02)
            got = await self._box.attack("connect", 200, "127.0.0.1", self._port)
            if got[f"127.0.0.1:{self._port}"] == 0:
                return
        raise AssertionError("the listener inside never came up")

    async def __aexit__(self, *_: object) -> None:
        await self._box.shell("for p in /proc/[0-9]*; do [ $p != /proc/1 ] && kill -9 ${p#/proc/}; done 2>/dev/null")
        await self._task


async def test_none_reaches_nothing(box: Box, listener: int) -> None:
    got = await box.attack("connect", 2000, *pairs([*SPECIAL, *addresses_of_host(), "1.1.1.1"], listener))
    assert set(got.values()) <= {errno.ENETUNREACH, errno.EINVAL, errno.EACCES}
    assert (await box.attack("udp", "1.1.1.1", 53))["errno"] == errno.ENETUNREACH


async def test_none_keeps_its_loopback(box: Box) -> None:
    """Test suites start servers; only the way out is closed."""
    async with serving(box, 8080):
        assert (await box.attack("connect", 2000, "127.0.0.1", 8080)) == {"127.0.0.1:8080": 0}


async def test_abstract_sockets_of_the_host_are_out_of_reach(box: Box, opened: Box, attacker: Path) -> None:
    """CVE-2020-15257. Layers: the network namespace, in which names live, and a Landlock scope."""
    name = f"dsec-attack-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + name)
        server.listen(8)
        for sandbox in (box, opened):
            got = await sandbox.attack("abstract", name)
            assert got["errno"] in {errno.ECONNREFUSED, errno.EPERM}
        assert run_bare(attacker, "abstract", name) == {"errno": 0}, "the twin: it listens"


LISTEN_ABSTRACT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.bind("\\0" + sys.argv[1])
    server.listen(8)
    print("listening", flush=True)
    sys.stdin.read()
"""


@contextmanager
def stranger_in_its_network(box: Box, name: str) -> Iterator[None]:
    """A process of the host's, outside every Landlock domain, that listens in the sandbox's network namespace."""
    argv = ["nsenter", f"--net=/proc/{box.pid}/ns/net", sys.executable, "-S", "-c", LISTEN_ABSTRACT, name]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listening:
        assert listening.stdout is not None
        assert listening.stdin is not None
        assert listening.stdout.readline() == b"listening\n"
        yield
        listening.stdin.close()


@needs("landlock-scopes")
async def test_the_landlock_scope_holds_where_the_namespace_is_shared(
    machine: Machine, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer alone: whoever shares the network namespace is still out of reach. And the twin without it."""
    name = "dsec-stranger"
    async with machine.sandbox(image) as box:
        with stranger_in_its_network(box, name):
            assert await box.attack("abstract", name) == {"errno": errno.EPERM}
    host = machine.backend._host
    gone = Ability(ok=False, detail="taken away by the test")
    items = tuple((key, gone if key == "landlock_scopes" else item) for key, item in host.abilities.items)
    monkeypatch.setattr(host, "abilities", replace(host.abilities, items=items))
    async with machine.sandbox(image) as box:
        with stranger_in_its_network(box, name):
            assert await box.attack("abstract", name) == {"errno": 0}


async def test_the_policy_shows_its_network_holes(box: Box, opened: Box) -> None:
    """daytona #3945: no hidden always-open services; the effective policy lists what is open."""
    assert opened.started.policy["network"] == "open"
    assert any("reachable" in hole for hole in opened.started.policy["holes"])
    assert not any("reachable" in hole for hole in box.started.policy["holes"])


async def test_the_first_exec_is_behind_the_policy_already(machine: Machine, image: str, listener: int) -> None:
    """daytona PR 2437: namespaces come from a warm pool, and the first command must not find them open."""
    for _ in range(3):
        async with machine.sandbox(image) as fresh:
            got = await fresh.attack("connect", 1000, *pairs(addresses_of_host(), listener))
            assert set(got.values()) == {errno.ENETUNREACH}
