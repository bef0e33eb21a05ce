"""The services that go-plugin itself asks for: controller, stdio, broker. Endless streams that send nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsec_plugins.goplugin import wire_pb2, wire_pb2_grpc

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator


_NOTHING: tuple[Any, ...] = ()  # makes a stream of a method that has nothing to send


class Controller(wire_pb2_grpc.GRPCControllerServicer):
    """Shutdown: answer at once, end soon after. The host sends SIGKILL after 2 s."""

    def __init__(self, ending: asyncio.Event) -> None:
        self._ending = ending

    async def Shutdown(self, request: Any, context: Any) -> Any:
        """Ask the server to end."""
        self._ending.set()
        return wire_pb2.Empty()


class Stdio(wire_pb2_grpc.GRPCStdioServicer):
    """We write nothing to stdout after the handshake; the stream stays open so that the host does not warn."""

    def __init__(self, ending: asyncio.Event) -> None:
        self._ending = ending

    async def StreamStdio(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Open until the plugin ends."""
        await self._ending.wait()
        for nothing in _NOTHING:
            yield nothing


class Broker(wire_pb2_grpc.GRPCBrokerServicer):
    """The host opens it at connect and our hosts never use it: read what comes, send nothing."""

    def __init__(self, ending: asyncio.Event) -> None:
        self._ending = ending

    async def StartStream(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Open until the plugin ends."""
        await self._ending.wait()
        for nothing in _NOTHING:
            yield nothing
