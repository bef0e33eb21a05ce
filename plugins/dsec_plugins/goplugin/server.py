"""A plugin process from start to end: handshake, gRPC server on a Unix socket, orderly shutdown within a second."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from dsec_plugins.goplugin import handshake, hclog

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    import grpc.aio

    from dsec_plugins.goplugin.handshake import Protocol

    Register = Callable[[grpc.aio.Server], AbstractAsyncContextManager[None]]

_GRACE_S = 0.3  # for calls in flight at shutdown: a host takes the death of the connection for the end of the plugin
_NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def main(protocol: Protocol, register: Register, *, socket_prefix: str = "goplugin-") -> int:
    """Serve until the host asks to end, SIGTERM, or the death of the host's process is told by it.

    register: an async context manager that adds the plugin's own servicers and owns what they need.
    Returns the exit code; 1 and a sentence on stderr when not started by a host.
    """
    try:
        handshake.check_environment(protocol, os.environ)
    except handshake.HandshakeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    kept = handshake.claim_stdout()
    hclog.install()
    asyncio.run(_serve(protocol, register, kept, socket_prefix))
    return 0


async def _serve(protocol: Protocol, register: Register, kept: int, socket_prefix: str) -> None:
    from grpc import aio

    hclog.watch_loop(asyncio.get_running_loop())
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # reaches the whole group when a host runs in a terminal
    directory = handshake.make_socket_dir(os.environ, socket_prefix)
    server = aio.server(options=_NO_LIMIT)
    try:
        async with register(server):
            await _add_own_services(server, ending)
            path = directory / "s"
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            handshake.announce(kept, handshake.handshake_line(protocol, path))
            await ending.wait()
            await server.stop(_GRACE_S)
    finally:
        with suppress(OSError):
            shutil.rmtree(directory)


async def _add_own_services(server: grpc.aio.Server, ending: asyncio.Event) -> None:
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    from dsec_plugins.goplugin import servicers, wire_pb2_grpc

    serving = health.aio.HealthServicer()
    await serving.set("plugin", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(serving, server)
    wire_pb2_grpc.add_GRPCControllerServicer_to_server(servicers.Controller(ending), server)
    wire_pb2_grpc.add_GRPCStdioServicer_to_server(servicers.Stdio(ending), server)
    wire_pb2_grpc.add_GRPCBrokerServicer_to_server(servicers.Broker(ending), server)
