"""Between the wire of Nomad and ours. Sub-messages that the client dereferences are always set."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from google.protobuf.timestamp_pb2 import Timestamp
from libdsec.errors import UsageError

from dsec_plugins.proto import driver_pb2 as pb

if TYPE_CHECKING:
    from libdsec.wire import ExecReply, Metrics
    from libdsec.wire_tasks import TaskEvent, TaskInfo

_MIB = 1024 * 1024
_CPU_FIELDS = (pb.CPUUsage.PERCENT, pb.CPUUsage.TOTAL_TICKS)
_MEMORY_FIELDS = (pb.MemoryUsage.RSS, pb.MemoryUsage.MAX_USAGE, pb.MemoryUsage.USAGE)


def seconds(duration: Any) -> float:
    """Of a protobuf Duration; an unset one is 0."""
    return max(0.0, float(duration.seconds) + float(duration.nanos) / 1e9)


def signal_number(name: str, default: int | None) -> int:
    """Of `SIGTERM` or `TERM`; UsageError for what no signal is called."""
    if not name and default is not None:
        return default
    wanted = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    try:
        return signal.Signals[wanted].value
    except KeyError as error:
        raise UsageError(
            "unknown_signal", f"{name[:40]!r} is no signal", field="signal", hint="such as SIGTERM"
        ) from error


def exit_result(info: TaskInfo) -> Any:
    """Never a negative code; 128+n beside a signal, as shells have it; a fault of ours is told in `err` only."""
    number = info.signal or 0
    code = info.exit_code if info.exit_code is not None else (128 + number if number else 0)
    return pb.ExitResult(exit_code=code, signal=number, oom_killed=info.oom_killed)


def exec_result(reply: ExecReply) -> Any:
    """The same for an exec."""
    number = reply.signal or 0
    code = reply.exit_code if reply.exit_code is not None else 128 + number
    return pb.ExitResult(exit_code=code, signal=number, oom_killed=reply.oom_killed)


def timestamp(at_s: float) -> Timestamp:
    """Of seconds since the epoch."""
    whole = int(at_s)
    return Timestamp(seconds=whole, nanos=int((at_s - whole) * 1e9))


def task_status(info: TaskInfo) -> Any:
    """All sub-messages set, also of a task that runs."""
    state = pb.EXITED if info.state == "exited" else pb.RUNNING
    return pb.TaskStatus(
        id=info.task_id,
        name=info.task_name,
        state=state,
        started_at=timestamp(info.started_at),
        completed_at=timestamp(info.completed_at),
        result=exit_result(info),
    )


def task_stats(task_id: str, now: Metrics, before: Metrics | None) -> Any:
    """CPU as percent of one core since the last message; memory in bytes."""
    percent = 0.0
    if before is not None and now.at > before.at:
        percent = max(0.0, (now.cpu_s - before.cpu_s) / (now.at - before.at) * 100)
    cpu = pb.CPUUsage(percent=percent, total_ticks=percent / 100 * _core_mhz(), measured_fields=_CPU_FIELDS)
    memory = pb.MemoryUsage(
        rss=int(now.memory_mib * _MIB),
        usage=int(now.memory_mib * _MIB),
        max_usage=int(now.memory_peak_mib * _MIB),
        measured_fields=_MEMORY_FIELDS,
    )
    usage = pb.TaskResourceUsage(cpu=cpu, memory=memory)
    return pb.TaskStats(id=task_id, timestamp=timestamp(now.at), agg_resource_usage=usage)


def task_event(event: TaskEvent) -> Any:
    """A line of `nomad alloc status`."""
    return pb.DriverTaskEvent(
        task_id=event.task_id,
        alloc_id=event.alloc_id,
        task_name=event.task_name,
        timestamp=timestamp(event.at),
        message=event.message,
        annotations=event.annotations,
    )


def _core_mhz() -> float:
    """Of one core, by /proc/cpuinfo; 1000 where it is not told."""
    with suppress(OSError, ValueError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as lines:
        line = next(line for line in lines if line.startswith("cpu MHz"))
        return float(line.partition(":")[2])
    return 1000.0


async def pause(ending: asyncio.Event, length_s: float) -> None:
    """Sleep, but not past the end of the plugin."""
    with suppress(TimeoutError):
        await asyncio.wait_for(ending.wait(), length_s)
