"""Cases L6 and L10 on the pools that exist: network namespaces and cgroup sets. Under storms of takes, cancels and
returns each slot has one owner, the pool never grows above its target, and a slot whose owner lives is not given on.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket

import pytest

from nomad_dsec.linux import netns
from nomad_dsec.linux.cgroup import CgroupRoot
from nomad_dsec.linux.cgroup_files import Limits
from nomad_dsec.linux.cgroup_pool import CgroupPool
from nomad_dsec.linux.netns_pool import NetnsPool
from tests.kit.abilities import needs
from tests.kit.sizes import sized

pytestmark = [needs("root", "netns", "cgroup"), pytest.mark.timeout(300)]
TARGET = 4
WIDE = 24


async def storm(kind: str, count: int) -> None:
    rng, owned = random.Random(6), set()
    pool = NetnsPool(f"t{os.getpid()}", closed_size=TARGET, open_size=TARGET if kind == "open" else 0)
    await pool.start()
    lanes = asyncio.Semaphore(WIDE)

    async def one() -> None:
        async with lanes:
            taking = asyncio.ensure_future(pool.take(kind))
            if rng.random() < 0.4:
                await asyncio.wait({taking}, timeout=rng.uniform(0, 0.003))
                taking.cancel()
            try:
                slot = await taking
            except asyncio.CancelledError:
                return
            mine = {os.fstat(slot.fd).st_ino, slot.address or slot.fd}
            assert not mine & owned, "handed out twice"
            owned.update(mine)
            assert pool.idle(kind) <= TARGET + WIDE
            await asyncio.sleep(rng.uniform(0, 0.005))
            owned.difference_update(mine)
            await pool.give_back(slot)

    async with asyncio.TaskGroup() as group:
        filler = group.create_task(pool.run())
        await asyncio.gather(*(one() for _ in range(count)))
        async with asyncio.timeout(10):
            while pool.idle(kind) != TARGET:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert pool.idle(kind) == TARGET, "nothing is in flight: no more than the target"
        filler.cancel()
    await pool.close(forget_table=True)


async def test_l6_a_network_namespace_has_one_owner_and_the_pool_its_size():
    await storm("none", sized(3000, 300))


@needs("nft", "ip")
async def test_l6_an_open_network_slot_has_one_owner_and_the_pool_its_size():
    await storm("open", sized(600, 80))


async def test_l6_a_cgroup_set_has_one_owner_and_the_pool_its_size():
    rng, owned = random.Random(6), set()
    root = CgroupRoot.detect(f"t{os.getpid()}")
    pool = CgroupPool(root, size=TARGET)
    pool.fill(TARGET)
    limits = Limits(cpus=1, memory_bytes=64 << 20, pids=32)
    lanes = asyncio.Semaphore(WIDE)

    async def one() -> None:
        async with lanes:
            mine = pool.take(limits)
            assert mine.name not in owned, "handed out twice"
            owned.add(mine.name)
            await asyncio.sleep(rng.uniform(0, 0.002))
            owned.discard(mine.name)
            await pool.give_back(mine)
            assert pool.idle <= TARGET
            assert len(root.names()) <= TARGET + WIDE

    try:
        await asyncio.gather(*(one() for _ in range(sized(2000, 200))))
        assert pool.idle == len(root.names()) == TARGET
    finally:
        await pool.close()
        await root.remove()


async def test_l10_a_slot_of_a_living_owner_never_reaches_another():
    """The old owner still listens: what is meant for it finds it, and nobody else is in its namespace."""
    pool = NetnsPool(f"t{os.getpid()}", closed_size=TARGET)
    await pool.start()
    for number in range(sized(200, 20)):
        old = await pool.take("none")
        space = os.fstat(old.fd).st_ino
        with netns.inside(old.fd):
            listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with listener, sender:
            if number % 2:  # without an address a socket is enough to show that someone is there
                listener.bind(("127.0.0.1", 5000))
                listener.settimeout(2)
            await pool.give_back(old)
            new = await pool.take("none")
            assert os.fstat(new.fd).st_ino != space
            with netns.inside(new.fd):
                heir = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            with heir:
                heir.bind(("127.0.0.1", 5000))
                heir.setblocking(False)
                if number % 2:
                    sender.sendto(b"for the old one", ("127.0.0.1", 5000))
                    assert listener.recv(100) == b"for the old one"
                with pytest.raises(BlockingIOError):
                    heir.recv(100)
        await pool.give_back(new)
    await pool.close()
