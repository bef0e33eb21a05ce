"""What an entry file in Nomad's plugin_dir calls: `main("dsec-container")`."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from dsec_plugins.goplugin.handshake import Protocol
from dsec_plugins.goplugin.server import main as serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NOMAD = Protocol(
    cookie_key="NOMAD_PLUGIN_MAGIC_COOKIE",
    cookie_value="e4327c2e01eabfd75a8a67adb114fb34a757d57eee7728d857a8cec6e91a7255",
    version=2,
)


def main(name: str) -> int:
    """Serve the driver of this name; the exit code."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    @asynccontextmanager
    async def register(server: Any) -> AsyncIterator[None]:
        from dsec_plugins.drivers.base import BasePlugin, Shared
        from dsec_plugins.drivers.driver import Driver
        from dsec_plugins.drivers.kinds import KINDS
        from dsec_plugins.proto import base_pb2_grpc, driver_pb2_grpc

        shared, ending = Shared(), asyncio.Event()
        base_pb2_grpc.add_BasePluginServicer_to_server(BasePlugin(KINDS[name], shared), server)
        driver_pb2_grpc.add_DriverServicer_to_server(Driver(KINDS[name], shared, ending), server)
        try:
            yield
        finally:
            ending.set()
            await shared.node.close()

    return serve(NOMAD, register, socket_prefix="dsec-plugin-")
