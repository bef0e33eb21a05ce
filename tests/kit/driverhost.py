"""A Nomad client's side of one driver plugin: the installed entry file, dialled, with tasks as clients make them."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgpack
from dsec_plugins import install
from dsec_plugins.proto import base_pb2, base_pb2_grpc, driver_pb2_grpc
from dsec_plugins.proto import driver_pb2 as pb

from tests.kit.pluginhost import launched
from tests.kit.tasks import Collector

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.kit.node_daemon import NodeDaemon
    from tests.kit.pluginhost import PluginProcess

_numbers = itertools.count(1)
CALL_S = 60.0

# Sub-messages that a client of 1.6.5 to 2.0.5 dereferences without a look: an answer without one kills the agent.
DEREFERENCED = {
    "ExecTaskResponse": ("result",),
    "WaitTaskResponse": ("result",),
    "TaskStatsResponse": ("stats",),
    "TaskStats": ("timestamp", "agg_resource_usage"),
    "TaskResourceUsage": ("cpu", "memory"),
    "TaskStatus": ("started_at", "completed_at", "result"),
    "InspectTaskResponse": ("task", "driver"),
    "StartTaskResponse": ("handle",),
    "TaskHandle": ("config",),
    "TaskConfigSchemaResponse": ("spec",),
    "ConfigSchemaResponse": ("spec",),
    "CapabilitiesResponse": ("capabilities",),
    "DriverTaskEvent": ("timestamp",),
}


def check_dereferenced(message: Any) -> Any:
    """The message itself; AssertionError names the sub-message whose absence would kill an agent."""
    for name in DEREFERENCED.get(message.DESCRIPTOR.name, ()):
        assert message.HasField(name), f"{message.DESCRIPTOR.name}.{name} is not set"
    for field, value in message.ListFields():
        if field.type != field.TYPE_MESSAGE or field.message_type.GetOptions().map_entry:
            continue
        for item in [value] if not field.is_repeated else value:
            check_dereferenced(item)
    return message


class DriverHost:
    """One plugin process and what a client asks of it; every answer is checked for what Go would dereference."""

    def __init__(self, plugin: PluginProcess, daemon: NodeDaemon, directory: Path) -> None:
        self.plugin = plugin
        self.daemon = daemon
        self.directory = directory
        self.base = base_pb2_grpc.BasePluginStub(plugin.channel)
        self.driver = driver_pb2_grpc.DriverStub(plugin.channel)

    async def configure(self, **more: Any) -> None:
        """As the client does: twice without nomad_config, then with it."""
        config = msgpack.packb({"node_socket": str(self.daemon.data / "node.sock"), "enabled": None} | more)
        for nomad in (None, None, base_pb2.NomadConfig(driver=base_pb2.NomadDriverConfig(ClientMaxPort=14512))):
            request = base_pb2.SetConfigRequest(msgpack_config=config, plugin_api_version="v0.1.0")
            if nomad is not None:
                request.nomad_config.CopyFrom(nomad)
            await self.base.SetConfig(request, timeout=CALL_S)

    def task(self, *argv: str, logs: Collector | None = None, **config: Any) -> Any:
        """A TaskConfig; config as msgpack with every key of the schema, absent ones nil."""
        alloc = f"0000-{os.getpid()}-{next(_numbers)}"
        given = {"image": self.daemon.image, "command": argv[0] if argv else None, "args": list(argv[1:]) or None}
        resources = pb.Resources(
            allocated_resources=pb.AllocatedTaskResources(
                cpu=pb.AllocatedCpuResources(cpu_shares=500), memory=pb.AllocatedMemoryResources(memory_mb=64)
            ),
            linux_resources=pb.LinuxResources(memory_limit_bytes=64 << 20, cpu_shares=500, PercentTicks=0.25),
        )
        paths = {} if logs is None else {f"{name}_path": str(path) for name, path in logs.paths.items()}
        return pb.TaskConfig(
            id=f"{alloc}/t/0badcafe",
            name="t",
            alloc_id=alloc,
            env={"GIVEN": "1"},
            resources=resources,
            msgpack_driver_config=msgpack.packb(given | config),
            **paths,
        )

    async def start(self, task: Any) -> Any:
        """The handle."""
        answer = await self.driver.StartTask(pb.StartTaskRequest(task=task), timeout=CALL_S)
        return check_dereferenced(answer).handle

    async def wait(self, task_id: str) -> Any:
        """The whole answer."""
        return check_dereferenced(await self.driver.WaitTask(pb.WaitTaskRequest(task_id=task_id), timeout=CALL_S))

    async def stop(self, task_id: str, timeout_s: float | None = 5.0, signal: str = "") -> None:
        request = pb.StopTaskRequest(task_id=task_id, signal=signal)
        if timeout_s is not None:
            request.timeout.FromNanoseconds(int(timeout_s * 1e9))
        await self.driver.StopTask(request, timeout=CALL_S)

    async def destroy(self, task_id: str) -> None:
        await self.driver.DestroyTask(pb.DestroyTaskRequest(task_id=task_id, force=True), timeout=CALL_S)

    async def recover(self, handle: Any) -> None:
        """As after an agent's restart: no task_id, no driver config."""
        copy = pb.TaskHandle()
        copy.CopyFrom(handle)
        copy.config.msgpack_driver_config = b""
        await self.driver.RecoverTask(pb.RecoverTaskRequest(handle=copy), timeout=CALL_S)

    async def exec_stream(self, task_id: str, argv: list[str], *, stdin: bytes | None = None, tty: bool = False) -> Any:
        """(stdout, stderr, result, names of the frames)."""
        setup = pb.ExecTaskStreamingRequest.Setup(task_id=task_id, command=argv, tty=tty)
        call = self.driver.ExecTaskStreaming(timeout=CALL_S)
        await call.write(pb.ExecTaskStreamingRequest(setup=setup))
        await call.write(pb.ExecTaskStreamingRequest())  # a heartbeat
        for at in range(0, len(stdin or b""), 2048):
            piece = pb.ExecTaskStreamingIOOperation(data=(stdin or b"")[at : at + 2048])
            await call.write(pb.ExecTaskStreamingRequest(stdin=piece))
        if stdin is not None:
            close = pb.ExecTaskStreamingIOOperation(close=True)
            await call.write(pb.ExecTaskStreamingRequest(stdin=close))
        out, err, result, order = [], [], None, []
        async for frame in call:
            if frame.exited:
                result = frame.result
                order.append("exited")
            elif frame.HasField("stdout"):
                out.append(frame.stdout.data)
                order.append("close" if frame.stdout.close else "out")
            elif frame.HasField("stderr"):
                err.append(frame.stderr.data)
                order.append("close" if frame.stderr.close else "err")
        return b"".join(out), b"".join(err), result, order


@asynccontextmanager
async def driver_host(
    daemon: NodeDaemon, directory: Path, name: str = "dsec-container", *, env: dict[str, str] | None = None
) -> AsyncIterator[DriverHost]:
    """The installed entry file under a host, configured."""
    from tests.kit.pluginhost import NOMAD_COOKIE

    (entry,) = install.install(directory / "plugins", names=(name,))
    async with launched([str(entry)], env=NOMAD_COOKIE | (env or {})) as plugin:
        host = DriverHost(plugin, daemon, directory)
        await host.configure()
        yield host


def state_of(handle: Any) -> dict[str, Any]:
    """driver_state."""
    found: dict[str, Any] = json.loads(handle.driver_state)
    return found
