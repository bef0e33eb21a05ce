"""What the daemon remembers of a cluster's tasks and grants: frozen rows, replaced as a whole. Pure."""

from __future__ import annotations

import msgspec
from libdsec.wire_tasks import GrantInfo, GrantState, TaskInfo, TaskState

TASK = "task"
GRANT = "grant"
CALL = "call"


class TaskRow(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One task: a sandbox and one exec in it, whose id is the key. env lies in the sandbox's row.

    A call has no sandbox ("") and no exec.
    log_offset: where the pump goes on in the exec's output; oom_kills: of the sandbox, when last looked at.
    home: the allocation's directory on the host; when it goes, so does what is left of the task.
    """

    key: str
    task_id: str
    sandbox: str
    alloc_id: str = ""
    task_name: str = ""
    home: str = ""
    argv: list[str] = []
    stdout_path: str = ""
    stderr_path: str = ""
    state: TaskState = "starting"
    exit_code: int | None = None
    signal: int | None = None
    oom_killed: bool = False
    error: str = ""
    started_at: float = 0.0
    completed_at: float = 0.0
    log_offset: int = 0
    log_bytes_dropped: int = 0


class GrantRow(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One grant. boot_id: a machine that was restarted has lost its allocations, and the grants with them."""

    key: str
    task_id: str
    boot_id: str
    alloc_id: str = ""
    task_name: str = ""
    home: str = ""
    cpus: float
    memory_mib: int
    state: GrantState = "active"
    evicted: int = 0
    granted_at: float = 0.0
    withdrawn_at: float = 0.0
    error: str = ""


def replace_task(row: TaskRow, **changes: object) -> TaskRow:
    """The row with some fields changed."""
    return msgspec.structs.replace(row, **changes)


def replace_grant(row: GrantRow, **changes: object) -> GrantRow:
    """The row with some fields changed."""
    return msgspec.structs.replace(row, **changes)


def task_info(row: TaskRow) -> TaskInfo:
    """What drivers see of a task."""
    return TaskInfo(
        key=row.key,
        task_id=row.task_id,
        alloc_id=row.alloc_id,
        task_name=row.task_name,
        state=row.state,
        sandbox=row.sandbox,
        exec_id=row.key if row.sandbox else "",
        exit_code=row.exit_code,
        signal=row.signal,
        oom_killed=row.oom_killed,
        error=row.error,
        started_at=row.started_at,
        completed_at=row.completed_at,
        log_bytes_dropped=row.log_bytes_dropped,
        log_paths=[path for path in (row.stdout_path, row.stderr_path) if path],
    )


def grant_as_task(row: GrantRow) -> TaskInfo:
    """A grant as drivers see it: a task that runs until it is withdrawn, and then ends well."""
    ended = row.state == "withdrawn"
    return TaskInfo(
        key=row.key,
        task_id=row.task_id,
        alloc_id=row.alloc_id,
        task_name=row.task_name,
        state="exited" if ended else "running",
        exit_code=0 if ended else None,
        error=row.error,
        started_at=row.granted_at,
        completed_at=row.withdrawn_at,
    )


def grant_info(row: GrantRow) -> GrantInfo:
    """A grant as itself."""
    return GrantInfo(
        key=row.key,
        task_id=row.task_id,
        alloc_id=row.alloc_id,
        state=row.state,
        cpus=row.cpus,
        memory_mib=row.memory_mib,
        evicted=row.evicted,
        granted_at=row.granted_at,
    )
