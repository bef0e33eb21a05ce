"""A go-plugin host in Python: starts an entry file as a real host does, reads the handshake, dials, reads stderr."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsec_plugins.goplugin import wire_pb2, wire_pb2_grpc
from grpc import aio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

aio.init_grpc_aio()  # its poller's sockets stay for the process: made here, so that no test seems to leak them

NOMAD_COOKIE = {
    "NOMAD_PLUGIN_MAGIC_COOKIE": "e4327c2e01eabfd75a8a67adb114fb34a757d57eee7728d857a8cec6e91a7255",
    "PLUGIN_PROTOCOL_VERSIONS": "2",
    "PLUGIN_MIN_PORT": "10000",
    "PLUGIN_MAX_PORT": "25000",
}


@dataclass
class PluginProcess:
    """A started plugin: its handshake fields, a gRPC channel, and all that it printed."""

    process: asyncio.subprocess.Process
    fields: list[str]
    channel: Any
    logs: list[dict[str, Any]] = field(default_factory=list)
    junk: list[str] = field(default_factory=list)
    stdout_after: bytes = b""


def _env(extra: Mapping[str, str]) -> dict[str, str]:
    base = {"PATH": os.environ["PATH"], "TMPDIR": os.environ.get("TMPDIR", "/tmp"), "PYTHONPATH": ":".join(sys.path)}
    return base | dict(extra)


@asynccontextmanager
async def launched(
    argv: Sequence[str], *, env: Mapping[str, str] = NOMAD_COOKIE, timeout_s: float = 30.0
) -> AsyncIterator[PluginProcess]:
    """The plugin, dialled; shut down by the controller at the end, and killed if that does not help within 2 s."""
    child = await asyncio.create_subprocess_exec(
        *argv,
        env=_env(env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    line = await asyncio.wait_for(child.stdout.readline(), timeout_s)
    assert line.endswith(b"\n"), (line, (await child.stderr.read())[-3000:])
    fields = line.decode().rstrip("\n").split("|")
    channel = aio.insecure_channel(f"unix:{fields[3]}", options=[("grpc.default_authority", "unused")])
    plugin = PluginProcess(child, fields, channel)
    readers = [asyncio.create_task(_read_logs(child.stderr, plugin)), asyncio.create_task(_drain(child.stdout, plugin))]
    try:
        yield plugin
    finally:
        await end(plugin)
        await asyncio.wait_for(asyncio.gather(*readers), 5)


async def end(plugin: PluginProcess) -> int:
    """Shutdown as the host does it; returns the exit code."""
    if plugin.process.returncode is None:
        try:
            await wire_pb2_grpc.GRPCControllerStub(plugin.channel).Shutdown(wire_pb2.Empty(), timeout=5)
        except aio.AioRpcError:
            pass
    await plugin.channel.close()
    try:
        return await asyncio.wait_for(plugin.process.wait(), 2)
    except TimeoutError:
        plugin.process.kill()
        return await plugin.process.wait()


async def _read_logs(stream: asyncio.StreamReader, plugin: PluginProcess) -> None:
    async for line in stream:
        try:
            record = json.loads(line)
        except ValueError:
            plugin.junk.append(line.decode("utf-8", "replace"))
            continue
        for key in ("@message", "@level", "@timestamp"):
            assert isinstance(record[key], str), record  # the real host dies of anything else
        plugin.logs.append(record)


async def _drain(stream: asyncio.StreamReader, plugin: PluginProcess) -> None:
    plugin.stdout_after = await stream.read()
