"""A node in this process around a backend of records; entering `daemon()` again on the same data is a restart."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from libdsec.wire import CreateRequest, NodeCreateRequest

from nomad_dsec import config
from nomad_dsec.node.assemble import Assembled, assemble, make_node
from nomad_dsec.node.core import Limits, TaskRoom
from nomad_dsec.node.images import AnyImages
from tests.kit.memory_backend import MemoryBackend, World

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class StillClock:
    """Wall time that tests set; monotonic time that stands."""

    def __init__(self) -> None:
        self.at = 1_000_000.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


class Machine:
    def __init__(self, data: Path) -> None:
        self.data = data
        self.world = World()
        self.clock = StillClock()
        self.limits = Limits(adopt_grace_s=0.0)
        self.settings = config.load(env={}).section("node") | {"backends": ["fake"], "id": "n1"}

    @asynccontextmanager
    async def daemon(self) -> AsyncIterator[Assembled]:
        async with TaskRoom() as room:
            node = make_node(
                self.settings,
                room,
                node_id="n1",
                data=self.data,
                backends={"container": MemoryBackend(self.world)},
                images=AnyImages(),
                limits=replace(self.limits),
            )
            node.clock = self.clock
            try:
                yield await assemble(node)
            finally:
                await room.close()
                node.journal.close()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def sandbox_id(number: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    text = ""
    for _ in range(16):
        text = letters[number % 32] + text
        number //= 32
    return f"sb-n1-{text}"


def create_request(*numbers: int, namespace: str = "ns", **spec: object) -> NodeCreateRequest:
    return NodeCreateRequest(
        ids=[sandbox_id(number) for number in numbers or (1,)],
        namespace=namespace,
        spec=CreateRequest(image="debian", **spec),
    )
