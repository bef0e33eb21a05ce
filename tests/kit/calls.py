"""The engine of stateless calls on real lanes, without a daemon around it: a node, its container backend, its lanes."""

from __future__ import annotations

import os
import secrets
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsec_imagefs.mounts import MountTable
from dsec_imagefs.store import ImageStore
from libdsec.wire_fncall import FnLimits, FnRequest, FnResult, FnTest, SubmitRequest, SubmitResult

from nomad_dsec import config
from nomad_dsec.backends.container.backend import ContainerBackend
from nomad_dsec.backends.container.host import ContainerConfig
from nomad_dsec.clock import SYSTEM
from nomad_dsec.guest.build import build
from nomad_dsec.node.assemble import make_node
from nomad_dsec.node.core import TaskRoom
from nomad_dsec.node.images import StoreImages
from nomad_dsec.node.lanes import Lanes
from tests.kit.devstack import image_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

IMAGE = "debian-dev"


@dataclass(frozen=True, kw_only=True)
class CallHost:
    """Lanes over an image with Python, a shell and C compilers."""

    lanes: Lanes
    backend: ContainerBackend
    node: str
    image: str = IMAGE

    async def run(self, *, namespace: str = "test", **fields: Any) -> FnResult:
        """One call; `limits` may be a dict."""
        return await self.lanes.run(_request(self.image, fields), namespace=namespace, digest="")

    async def python(self, code: str, **fields: Any) -> FnResult:
        """One call in the zygote."""
        return await self.run(language="python", code=code, **fields)

    async def submit(self, tests: list[FnTest], *, stop_at_first: bool = False, **fields: Any) -> SubmitResult:
        """A submission with its tests."""
        request = SubmitRequest(program=_request(self.image, fields), tests=tests, stop_at_first=stop_at_first)
        return await self.lanes.submit(request, namespace="test", digest="")


def _request(image: str, fields: dict[str, Any]) -> FnRequest:
    for name in ("limits", "compile_limits"):
        if name in fields:
            fields[name] = FnLimits(**fields[name])
    return FnRequest(image=image, **fields)


@asynccontextmanager
async def open_call_host(directory: Path, *, images: Path | None = None, image: str = IMAGE) -> AsyncIterator[CallHost]:
    """All of it, and its end. images: a store that has `image`; that of the development image unless given."""
    name = f"fn{os.getpid()}{secrets.token_hex(2)}"
    store = ImageStore(images or image_store())
    settings = ContainerConfig(
        node=name, data=directory / "node", init_binary=build(directory / "bin"), pool_slots=2, network_pool=0,
    )  # fmt: skip
    backend = await ContainerBackend.open(settings, MountTable(store, directory / "mounts"))
    try:
        async with TaskRoom() as room:
            node = make_node(
                config.load(env={}).section("node"), room, node_id=name, data=directory,
                backends={"container": backend}, images=StoreImages(store, SYSTEM),
            )  # fmt: skip
            lanes = Lanes(node)
            try:
                yield CallHost(lanes=lanes, backend=backend, node=name, image=image)
            finally:
                await lanes.close()
    finally:
        await backend.close()
