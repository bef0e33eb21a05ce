"""The whole of it, as a user has it: SDK, gateway, node daemon, real containers of a Debian image."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from libdsec.client import AsyncClient
from libdsec.sandbox import AsyncSandbox

from tests.kit.devstack import DevStack, image_store
from tests.kit.footprint import init_of
from tests.kit.leaks import Census

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

IMAGE = "debian-dev"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """One for each file; at its end nothing of it is left."""
    made = DevStack(tmp_path_factory.mktemp("cases") / "d")
    node = f"cs{os.getpid()}"
    before = Census.take()
    try:
        made.start("--node-id", node, "--backends", "container", "--images", str(image_store()))
        yield made
    finally:
        made.stop()
    assert made.pids() == []
    assert [line for line in before.wait_same(timeout_s=5.0) if node in line] == []


@pytest.fixture
async def client(stack: DevStack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.endpoint, stack.api_key, reconnect_s=30) as made:
        yield made


@pytest.fixture
async def sandbox(client: AsyncClient) -> AsyncIterator[AsyncSandbox]:
    async with await AsyncSandbox.create(IMAGE, client=client, memory_mib=256, cpus=1, pids=256) as made:
        yield made


@asynccontextmanager
async def init_pid(sandbox: AsyncSandbox) -> AsyncIterator[int]:
    """The pid of its PID 1 on the host, found by a program that runs inside meanwhile."""
    marker = f"marker {sandbox.id}"
    async with await sandbox.spawn(f": {marker}; echo ready; read x", stdin=True) as keeper:
        assert (await keeper.read()).data == b"ready\n"
        yield init_of(marker)
        await keeper.kill()


def ours(stack: DevStack) -> dict[str, int]:
    """Pids of the test (which is the client) and of the daemons."""
    children = stack.state()["children"]
    return {"client": os.getpid()} | {role: int(record["pid"]) for role, record in children.items()}
