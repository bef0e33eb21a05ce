"""Tasks of a cluster that are one stateless call each: no sandbox of their own, the verdict in logs, events and end.

A call lives in the daemon: when that dies, the call's end says so, and the cluster's own policy may run it again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from libdsec.errors import DsecError, NotFoundError, NotSupported, StateError, UsageError
from libdsec.wire_tasks import task_key

from nomad_dsec.guest.spec import STDERR, STDOUT, OutputChunk
from nomad_dsec.log import get_log
from nomad_dsec.node.task_events import EventRing
from nomad_dsec.node.task_logs import LogSinks
from nomad_dsec.node.tasks_rows import CALL, TaskRow, replace_task, task_info

if TYPE_CHECKING:
    from libdsec.wire import Metrics
    from libdsec.wire_fncall import FnRequest, FnResult
    from libdsec.wire_tasks import CallTaskRequest, StopTaskRequest, TaskInfo

    from nomad_dsec.node.core import Node
    from nomad_dsec.node.lanes import Lanes

log = get_log(__name__)
NAMESPACE = "nomad"
KEEP_ENDED_MAX = 10_000


@dataclass(slots=True, eq=False, kw_only=True)
class LiveCall:
    """One call in memory."""

    row: TaskRow
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    running: asyncio.Task[None] | None = None


class CallTasks:
    """The verbs, by key."""

    def __init__(self, node: Node, lanes: Lanes) -> None:
        self._node = node
        self._lanes = lanes
        self._live: dict[str, LiveCall] = {}
        self.events = EventRing(node.clock)

    def _get(self, key: str) -> LiveCall:
        call = self._live.get(key)
        if call is None:
            raise NotFoundError("task_not_found", f"node {self._node.id} knows no call {key[:80]}", field="key")
        return call

    def info(self, key: str) -> TaskInfo:
        """As drivers see it."""
        return task_info(self._get(key).row)

    def homes(self) -> dict[str, str]:
        """The allocation's directory of each."""
        return {key: call.row.home for key, call in self._live.items()}

    async def start(self, key: str, request: CallTaskRequest) -> TaskInfo:
        """Begin the call, or return what there is of it; UsageError for a log path or an image that can't be."""
        if key != task_key(request.task_id):
            raise UsageError("bad_key", f"{key[:80]} is not the key of {request.task_id[:80]!r}", field="key")
        call = self._live.get(key)
        if call is None:
            await self._node.images.defaults("", request.call.image)  # a wrong name is told at once
            if key not in self._live:
                call = self._begin(key, request)
                await self._save(call, durable=True)
        return task_info(self._live[key].row)

    def _begin(self, key: str, request: CallTaskRequest) -> LiveCall:
        sinks = LogSinks.open(request.stdout_path, request.stderr_path)
        row = TaskRow(
            key=key,
            task_id=request.task_id,
            sandbox="",
            alloc_id=request.alloc_id,
            task_name=request.task_name,
            home=request.home,
            stdout_path=request.stdout_path,
            stderr_path=request.stderr_path,
            state="running",
            started_at=self._node.clock.now(),
        )
        call = self._live[key] = LiveCall(row=row)
        wanted = msgspec.structs.replace(request.call, call_id=key)
        call.running = self._node.room.spawn(f"call task {key}", self._run(call, wanted, sinks))
        return call

    async def _run(self, call: LiveCall, request: FnRequest, sinks: LogSinks) -> None:
        try:
            changes = await self._outcome(call, request, sinks)
        finally:
            sinks.close()
        await self._save(
            call,
            durable=True,
            state="exited",
            completed_at=self._node.clock.now(),
            log_bytes_dropped=sinks.dropped,
            **changes,
        )
        call.exited.set()
        await self._forget_old()

    async def _outcome(self, call: LiveCall, request: FnRequest, sinks: LogSinks) -> dict[str, object]:
        try:
            result = await self._lanes.run(request, namespace=NAMESPACE, digest="")
        except StateError as error:
            if error.code == "cancelled":
                return {"signal": 9}  # a stop: all of the call was killed
            return {"error": str(error)}
        except DsecError as error:
            self._tell(call, str(error))
            return {"error": str(error)}
        compiled = result.compile.stdout + result.compile.stderr if result.compile is not None else b""
        said = summary(result)
        for stream, data in ((STDERR, compiled), (STDOUT, result.stdout), (STDERR, result.stderr + said.encode())):
            await sinks.write(OutputChunk(stream=stream, offset=0, data=data), 0)
        self._tell(call, said.strip())
        return ending(result)

    async def wait(self, key: str, timeout_s: float) -> TaskInfo:
        """As it is once it has ended, or after timeout_s."""
        call = self._get(key)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await call.exited.wait()
        return task_info(call.row)

    async def stop(self, key: str, request: StopTaskRequest) -> TaskInfo:
        """Let it end by itself for timeout_s (it takes no signals), then end it."""
        call = self._get(key)
        with suppress(TimeoutError):
            async with asyncio.timeout(request.timeout_s):
                await call.exited.wait()
        if not call.exited.is_set():
            self._lanes.cancel(NAMESPACE, key)
            await call.exited.wait()
        return task_info(call.row)

    def stats(self, key: str) -> Metrics:
        """Calls are measured when they have ended."""
        self._get(key)
        raise NotSupported("no_stats", "a call is measured when it has ended: see its last log line")

    async def destroy(self, key: str, *, force: bool) -> None:
        """Forget it. StateError task_running unless forced, which ends it."""
        call = self._get(key)
        if not call.exited.is_set():
            if not force:
                raise StateError("task_running", "the call still runs", hint="stop it, or force=1")
            self._lanes.cancel(NAMESPACE, key)
            await call.exited.wait()
        await self._forget(call)

    async def _forget(self, call: LiveCall) -> None:
        self._live.pop(call.row.key, None)
        await self._node.journal.drop_record(CALL, call.row.key)

    async def _forget_old(self) -> None:
        ended = [call for call in self._live.values() if call.exited.is_set()]
        for call in ended[: max(0, len(ended) - KEEP_ENDED_MAX)]:
            await self._forget(call)

    async def _save(self, call: LiveCall, *, durable: bool = False, **changes: object) -> None:
        call.row = replace_task(call.row, **changes)
        await self._node.journal.put_record(CALL, call.row.key, call.row, durable=durable)

    def _tell(self, call: LiveCall, message: str) -> None:
        self.events.add(call.row.task_id, call.row.alloc_id, call.row.task_name, message)

    async def recover(self) -> None:
        """Calls of a former daemon: those that had not ended were lost with it, and their end says so."""
        for blob in self._node.journal.records(CALL):
            call = LiveCall(row=msgspec.json.decode(blob, type=TaskRow))
            self._live[call.row.key] = call
            call.exited.set()
            if call.row.state != "exited":
                lost = "the node daemon ended while the call ran"
                await self._save(call, durable=True, state="exited", completed_at=self._node.clock.now(), error=lost)
                log.warning("a call was lost with its daemon", task=call.row.task_id)


def summary(result: FnResult) -> str:
    """The last line of stderr: the verdict, and what the call used."""
    used = f"cpu_s={result.cpu_s:.3f} wall_s={result.wall_s:.3f} max_rss_mib={result.max_rss_mib:.1f}"
    why = f" ({result.message})" if result.message else ""
    return f"dsec-fncall: {result.verdict}{why} {used}\n"


def ending(result: FnResult) -> dict[str, object]:
    """exit_code and signal are the program's own. A verdict that they do not show is told as an error in words."""
    changes: dict[str, object] = {
        "exit_code": result.exit_code,
        "signal": result.signal,
        "oom_killed": result.verdict == "memory_limit",
    }
    shown = result.verdict == "accepted" or bool(result.exit_code) or bool(result.signal)
    if not shown:
        changes["error"] = f"verdict {result.verdict}{': ' + result.message if result.message else ''}"
    return changes
