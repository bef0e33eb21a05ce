"""Network namespaces: what a closed one offers, when one is used again, and what an open one refuses."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from libdsec.errors import UsageError

from nomad_dsec.linux import netns
from nomad_dsec.linux.netns_pool import NetnsPool
from tests.kit.abilities import needs

pytestmark = needs("root", "netns")


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


async def test_closed_has_lo_and_low_ports_and_nothing_else() -> None:
    fd = netns.make_closed()
    try:
        with netns.inside(fd):
            assert [name for _, name in socket.if_nameindex()] == ["lo"]
            with socket.create_server(("127.0.0.1", 80)), socket.create_connection(("127.0.0.1", 80), timeout=2):
                pass
            with socket.socket() as out, pytest.raises(OSError, match="unreachable"):
                out.connect(("1.1.1.1", 80))
            assert Path("/proc/thread-self/net/route").read_text().count("\n") == 1
    finally:
        os.close(fd)


async def test_the_thread_comes_back_home_also_on_errors() -> None:
    home = inode_of_thread()
    fd = netns.make_closed()
    try:
        with pytest.raises(RuntimeError), netns.inside(fd):
            assert inode_of_thread() != home
            raise RuntimeError
    finally:
        os.close(fd)
    assert inode_of_thread() == home


def inode_of_thread() -> int:
    return os.stat("/proc/thread-self/ns/net").st_ino


async def test_only_an_untouched_namespace_is_used_again() -> None:
    pool = NetnsPool(f"t{os.getpid()}", closed_size=1)
    slot = await pool.take("none")
    first = inode(slot.fd)
    await pool.give_back(slot)
    slot = await pool.take("none")
    assert inode(slot.fd) == first
    with netns.inside(slot.fd), socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=2).close()
    await pool.give_back(slot)
    assert pool.idle("none") == 0
    slot = await pool.take("none")
    held = open_socket(slot.fd)
    await pool.give_back(slot)  # a socket is left: someone of the old owner lives
    assert pool.idle("none") == 0
    held.close()
    await pool.close()


def open_socket(fd: int) -> socket.socket:
    with netns.inside(fd):
        return socket.socket()


async def test_pool_refills_in_the_background_and_a_cancelled_taker_costs_nothing() -> None:
    pool = NetnsPool(f"t{os.getpid()}", closed_size=3)
    await pool.start()
    before = len(os.listdir("/proc/self/fd"))
    async with asyncio.TaskGroup() as group:
        filler = group.create_task(pool.run())
        async with asyncio.timeout(10):
            while pool.idle("none") < 3:
                await asyncio.sleep(0.01)
        slots = [await pool.take("none") for _ in range(5)]
        assert len({inode(slot.fd) for slot in slots}) == 5
        async with asyncio.timeout(10):
            while pool.idle("none") < 3:
                await asyncio.sleep(0.01)
        filler.cancel()
    slots += [await pool.take("none") for _ in range(3)]
    taker = asyncio.ensure_future(pool.take("none"))
    await asyncio.sleep(0)
    taker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taker
    for slot in slots:
        await pool.give_back(slot)
    await pool.close()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_unknown_kind_names_the_field() -> None:
    pool = NetnsPool("t", closed_size=0)
    with pytest.raises(UsageError) as bad:
        await pool.take("bridge")  # type: ignore[arg-type]
    assert bad.value.field == "policy.network"
    await pool.close()


@pytest.fixture(scope="module")
def world() -> dict[str, object]:
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-m", "tests.system.linux.open_world"],
        capture_output=True,
        timeout=50,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@needs("nft", "ip")
class TestOpen:
    """Judges what open_world.py saw. The layer is nftables: the same calls go through once its table is gone."""

    def test_reaches_the_internet_under_the_hosts_address(self, world: dict[str, object]) -> None:
        assert world["internet"] == "20.1.1.0"

    @pytest.mark.parametrize("what", ["private", "metadata", "host by gateway", "host by public address", "neighbour"])
    def test_refuses_at_once(self, world: dict[str, object], what: str) -> None:
        assert world[what] in ("No route to host", "Permission denied", "Connection refused")

    def test_the_refused_ones_were_there(self, world: dict[str, object]) -> None:
        assert world["host to private"]
        assert world["own"]
        assert world["unfenced: neighbour"]
        assert str(world["unfenced: neighbour"]).startswith("198.1")
        assert str(world["unfenced: host"]).startswith("198.1")

    def test_a_named_resolver_answers(self, world: dict[str, object]) -> None:
        assert world["resolver"] == "20.1.1.0"

    def test_nobody_calls_in(self, world: dict[str, object]) -> None:
        assert world["called from the Internet"] == "timeout"
        assert world["unfenced: called from the Internet"] == "20.1.1.1"

    def test_no_ipv6(self, world: dict[str, object]) -> None:
        assert world["ipv6"] == ""

    def test_addresses_move_on_and_strays_are_swept(self, world: dict[str, object]) -> None:
        assert world["address moves on"] is True
        assert world["adopted"] is True
        assert len(world["swept"]) == 1  # type: ignore[arg-type]
        assert world["links left"] == []
