"""The driver servicer: a shim. Every verb goes to the node daemon by a hash of the task id, so nothing is kept here."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal as signals
from typing import TYPE_CHECKING, Any

from libdsec.errors import DeadlineExceeded, DsecError, NotFoundError, PlatformError, UsageError
from libdsec.wire import ExecReply, ExecRequest, Metrics, NodeInfo, Ok, SignalRequest
from libdsec.wire_tasks import StopTaskRequest, TaskEvents, TaskInfo, task_key

from dsec_plugins.drivers import convert
from dsec_plugins.drivers.exec_stream import relay_exec
from dsec_plugins.drivers.fingerprint import fingerprints
from dsec_plugins.drivers.held_logs import HeldLogs
from dsec_plugins.drivers.schema import ConfigError, decode, spec_of
from dsec_plugins.drivers.statuses import abort, abort_start
from dsec_plugins.proto import driver_pb2 as pb
from dsec_plugins.proto import driver_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dsec_plugins.drivers.base import Shared
    from dsec_plugins.drivers.kinds import DriverKind

log = logging.getLogger("dsec.driver")
HANDLE_VERSION = 1
STATE_SCHEMA = 1
_WAIT_S = 55.0  # of one long poll
_PAUSE_S = 1.0  # before asking a node daemon again that did not answer
_STOP_SLACK_S = 5.0
_START_S = 120.0
_LOOK_S = 5.0  # between looks at whether the node daemon answers anything, while a start takes
_HANGS_S = 20.0
_RETRY_S = 20.0  # a node daemon that restarts is back within this


class Driver(driver_pb2_grpc.DriverServicer):
    """One driver of one plugin process."""

    def __init__(self, kind: DriverKind, shared: Shared, ending: asyncio.Event) -> None:
        self._kind = kind
        self._shared = shared
        self._ending = ending

    def _path(self, task_id: str, verb: str = "") -> str:
        return f"{self._kind.path}/{task_key(task_id)}{verb}"

    async def TaskConfigSchema(self, request: Any, context: Any) -> Any:
        """The schema of a task's `config {}`."""
        return pb.TaskConfigSchemaResponse(spec=spec_of(self._kind.config))

    async def Capabilities(self, request: Any, context: Any) -> Any:
        """Signals, exec, an image and a network of its own; no host volumes but below the node's `mount_roots`."""
        return pb.CapabilitiesResponse(
            capabilities=pb.DriverCapabilities(
                send_signals=self._kind.can_exec,
                exec=self._kind.can_exec,
                fs_isolation=pb.DriverCapabilities.IMAGE,
                network_isolation_modes=[pb.NetworkIsolationSpec.HOST, pb.NetworkIsolationSpec.NONE],
                disable_log_collection=not self._kind.has_logs,
            )
        )

    async def Fingerprint(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """One answer at once, then one a change; never ends by itself."""
        async for answer in fingerprints(self._kind, self._shared, self._ending):
            yield answer

    async def StartTask(self, request: Any, context: Any) -> Any:
        """Start, or find the same task running: Nomad repeats the call after our crash."""
        task = request.task
        try:
            config: Any = decode(self._kind.config, task.msgpack_driver_config)
            body = self._kind.request(task, config, os.cpu_count() or 1)
            info = await self._started(self._path(task.id), body)
            if info.error:
                raise PlatformError("task_lost", info.error)
        except (DsecError, ConfigError) as error:
            log.warning("a task did not start: %s", error, extra={"ids": {"task": task.id}})
            await abort_start(context, error)
        state = {"schema": STATE_SCHEMA, "task_id": task.id, "sandbox": info.sandbox, "driver": self._kind.name}
        handle = pb.TaskHandle(
            version=HANDLE_VERSION, config=task, state=pb.RUNNING, driver_state=json.dumps(state).encode()
        )
        return pb.StartTaskResponse(handle=handle)

    async def RecoverTask(self, request: Any, context: Any) -> Any:
        """Succeeds when the node daemon knows the task, running or ended; starts nothing, ever."""
        task_id = request.handle.config.id or request.task_id
        try:
            state = json.loads(request.handle.driver_state or b"{}")
            if state.get("schema", STATE_SCHEMA) > STATE_SCHEMA:
                raise UsageError("newer_handle", f"the task was started by a newer plugin (schema {state['schema']})")
            await self._retry("GET", self._path(task_id), TaskInfo)
        except (DsecError, ValueError) as error:
            await abort(context, error)
        return pb.RecoverTaskResponse()

    async def WaitTask(self, request: Any, context: Any) -> Any:
        """How the task ended. A node daemon that is away is waited for: any error here would fail the task."""
        wait_s = 0.0  # the first answer tells the log FIFOs
        with HeldLogs() as logs:
            while True:
                try:
                    path = self._path(request.task_id, f"/wait?timeout_s={wait_s:g}")
                    info = await self._shared.node.call("GET", path, TaskInfo, timeout_s=wait_s + 10)
                except NotFoundError as error:
                    await abort(context, error)
                except DsecError as error:
                    log.debug("still waiting: %s", error, extra={"ids": {"task": request.task_id}})
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if info.state == "exited":
                    return pb.WaitTaskResponse(result=convert.exit_result(info), err=info.error)
                logs.hold(info.log_paths)
                wait_s = _WAIT_S

    async def StopTask(self, request: Any, context: Any) -> Any:
        """Signal, wait, kill; returns when it is gone. Unknown and ended tasks are fine."""
        timeout_s = convert.seconds(request.timeout)
        try:
            body = StopTaskRequest(timeout_s=timeout_s, signal=convert.signal_number(request.signal, signals.SIGTERM))
            await self._retry(
                "POST", self._path(request.task_id, "/stop"), TaskInfo, body, timeout_s=timeout_s + _STOP_SLACK_S
            )
        except NotFoundError:
            pass
        except DsecError as error:
            await abort(context, error)
        return pb.StopTaskResponse()

    async def DestroyTask(self, request: Any, context: Any) -> Any:
        """Forget it; with force, kill it first."""
        try:
            force = "1" if request.force else "0"
            await self._retry("DELETE", self._path(request.task_id, f"?force={force}"), Ok, timeout_s=30.0)
        except NotFoundError:
            pass
        except DsecError as error:
            await abort(context, error)
        return pb.DestroyTaskResponse()

    async def InspectTask(self, request: Any, context: Any) -> Any:
        """State with every sub-message set: the client dereferences them."""
        try:
            info = await self._retry("GET", self._path(request.task_id), TaskInfo)
        except DsecError as error:
            await abort(context, error)
        return pb.InspectTaskResponse(
            task=convert.task_status(info),
            driver=pb.TaskDriverStatus(attributes={"sandbox": info.sandbox, "exec": info.exec_id}),
            network_override=pb.NetworkOverride(),
        )

    async def TaskStats(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """One message an interval. Without an answer the stream stays open: an end is an error line a second."""
        interval_s = max(0.2, convert.seconds(request.collection_interval) or 1.0)
        before: Metrics | None = None
        while not self._ending.is_set():
            try:
                now = await self._shared.node.call("GET", self._path(request.task_id, "/stats"), Metrics, timeout_s=10)
                yield pb.TaskStatsResponse(stats=convert.task_stats(request.task_id, now, before))
                before = now
            except NotFoundError:
                return
            except DsecError:
                before = None
            await convert.pause(self._ending, interval_s)

    async def TaskEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Events of our tasks by long polls; the node daemon keeps a bounded number for us."""
        since = -1  # only new ones: an old event of an allocation that is gone is a warning in the client's log
        while not self._ending.is_set():
            try:
                path = f"{self._kind.path}/events?since={since}&timeout_s={_WAIT_S:g}"
                news = await self._shared.node.call("GET", path, TaskEvents, timeout_s=_WAIT_S + 10)
            except DsecError:
                await convert.pause(self._ending, _PAUSE_S)
                continue
            for event in news.events:
                yield convert.task_event(event)
            since = news.next

    async def SignalTask(self, request: Any, context: Any) -> Any:
        """Send a signal to the task's processes."""
        try:
            body = SignalRequest(signal=convert.signal_number(request.signal, None))
            await self._shared.node.call("POST", self._path(request.task_id, "/signal"), Ok, body)
        except DsecError as error:
            await abort(context, error)
        return pb.SignalTaskResponse()

    async def ExecTask(self, request: Any, context: Any) -> Any:
        """A short command for checks and templates."""
        timeout_s = convert.seconds(request.timeout) or None
        try:
            body = ExecRequest(cmd=list(request.command), timeout_s=timeout_s)
            sandbox = await self._sandbox_of(request.task_id)
            wait_s = (timeout_s or 3600.0) + 10
            path = f"/v1/sandboxes/{sandbox}/execs"
            reply = await self._shared.node.call("POST", path, ExecReply, body, timeout_s=wait_s)
        except DsecError as error:
            await abort(context, error)
        return pb.ExecTaskResponse(stdout=reply.stdout, stderr=reply.stderr, result=convert.exec_result(reply))

    async def ExecTaskStreaming(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """`nomad alloc exec`."""
        program = ""
        try:
            first = await anext(request_iterator)
            program = next(iter(first.setup.command), "")
            sandbox = await self._sandbox_of(first.setup.task_id)
            async for frame in relay_exec(self._shared.node, sandbox, first, request_iterator):
                yield frame
        except StopAsyncIteration:
            return
        except DsecError as error:
            if error.code.startswith("command_"):
                error.message = f"{program[:200]}: {error.message}"
            await abort(context, error)

    async def Init(self, request: Any, context: Any) -> Any:
        """Nothing to do."""
        return pb.InitResponse()

    async def Shutdown(self, request: Any, context: Any) -> Any:
        """Tasks go on without us; the process ends by the controller."""
        return pb.ShutdownResponse()

    async def _sandbox_of(self, task_id: str) -> str:
        if not self._kind.can_exec:
            raise UsageError("no_exec", f"a {self._kind.name} task has no sandbox to run a command in")
        info = await self._shared.node.call("GET", self._path(task_id), TaskInfo)
        if not info.sandbox or info.state != "running":
            raise UsageError("task_not_running", f"the task is {info.state}")
        return info.sandbox

    async def _started(self, path: str, body: Any) -> TaskInfo:
        """A start, as long as the node daemon answers anything at all. PlatformError node_hangs when it does not.

        One that goes on later reads that we hung up, and starts nothing.
        """
        starting = asyncio.ensure_future(self._retry("PUT", path, TaskInfo, body, timeout_s=_START_S))
        watching = asyncio.ensure_future(self._hangs())
        try:
            await asyncio.wait((starting, watching), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                watching.result()
            info: TaskInfo = await starting
            return info
        finally:
            for one in (starting, watching):
                one.cancel()
            await asyncio.gather(starting, watching, return_exceptions=True)

    async def _hangs(self) -> None:
        """Returns never; raises once the node daemon takes connections and answers none."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._shared.node.call("GET", "/v1/node", NodeInfo, timeout_s=_HANGS_S)
            except DeadlineExceeded as error:
                raise PlatformError(
                    "node_hangs",
                    f"the node daemon takes connections and has answered nothing for {_HANGS_S:g} s",
                    hint="see whether it is stopped (`ps`) or the machine is overloaded",
                    retry_after_s=1.0,
                ) from error
            except DsecError:
                continue  # away: the start itself tells

    async def _retry(
        self, method: str, path: str, kind: type[Any], body: Any = None, *, timeout_s: float = 10.0
    ) -> Any:
        """A call that is safe to repeat; a node daemon that restarts is waited for up to 20 s."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _RETRY_S
        while True:
            try:
                return await self._shared.node.call(method, path, kind, body, timeout_s=timeout_s)
            except PlatformError as error:
                if error.code != "node_unreachable" or loop.time() > until:
                    raise
                await asyncio.sleep(_PAUSE_S / 4)
