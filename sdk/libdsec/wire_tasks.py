"""Wire types between Nomad's driver plugins and the node daemon: tasks (one sandbox and its command) and grants.

Only on the node daemon's Unix socket. A task's `key` is a hash of Nomad's task id, which has slashes.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from libdsec.wire import MAX_ARG_BYTES, BackendName, Env, Qos, _Reply, _Wire
from libdsec.wire_fncall import FnRequest  # noqa: TC001 - msgspec looks it up

TaskState = Literal["starting", "running", "exited"]
GrantState = Literal["active", "withdrawing", "withdrawn"]


def task_key(task_id: str) -> str:
    """The name of a task in paths: 32 hex digits."""
    return hashlib.sha256(task_id.encode("utf-8", "surrogateescape")).hexdigest()[:32]


class HostMount(_Wire, kw_only=True):
    """A host directory shown inside; the host side must lie under one of the node's `mount_roots`.

    owners: "" shows ids of the host, none of which exists inside. "task": what is nobody's on the host is root's
    inside and what root writes is nobody's on the host, as a cluster's clients make a task's directories. "host", for
    readonly ones: the same ids inside as on the host.
    """

    host_path: Annotated[str, Meta(pattern="^/", max_length=4096)]
    task_path: Annotated[str, Meta(pattern="^/", max_length=4096)]
    readonly: bool = True
    owners: Literal["", "task", "host"] = ""


class TaskRequest(_Wire, kw_only=True):
    """Start a task. The same task_id again returns the running (or ended) one and starts nothing.

    home: the allocation's directory on the host; when it has gone, nobody will ask for the task any more.
    """

    task_id: Annotated[str, Meta(min_length=1, max_length=1024)]
    alloc_id: Annotated[str, Meta(max_length=256)] = ""
    task_name: Annotated[str, Meta(max_length=256)] = ""
    home: Annotated[str, Meta(max_length=4096)] = ""
    namespace: Annotated[str, Meta(max_length=128)] = "nomad"
    backend: BackendName = "container"
    image: Annotated[str, Meta(min_length=1, max_length=512)]
    argv: list[Annotated[str, Meta(max_length=MAX_ARG_BYTES)]] = []
    cwd: Annotated[str, Meta(max_length=4096)] = ""
    user: Annotated[str, Meta(max_length=256)] = ""
    env: Env = {}
    cpus: Annotated[float, Meta(ge=0.01, le=1024)] = 1.0
    memory_mib: Annotated[int, Meta(ge=16, le=4 * 1024 * 1024)] = 256
    disk_mib: Annotated[int, Meta(ge=1, le=16 * 1024 * 1024)] = 1024
    pids: Annotated[int, Meta(ge=4, le=4_194_304)] = 512
    qos: Qos = "latency_sensitive"
    policy: str | dict[str, Any] = "default"
    mounts: list[HostMount] = []
    stdin: bytes = b""
    stdout_path: Annotated[str, Meta(max_length=4096)] = ""
    stderr_path: Annotated[str, Meta(max_length=4096)] = ""
    start_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class CallTaskRequest(_Wire, kw_only=True):
    """A task that is one stateless call. What the program writes goes to the log paths when it has ended."""

    task_id: Annotated[str, Meta(min_length=1, max_length=1024)]
    alloc_id: Annotated[str, Meta(max_length=256)] = ""
    task_name: Annotated[str, Meta(max_length=256)] = ""
    home: Annotated[str, Meta(max_length=4096)] = ""
    call: FnRequest
    stdout_path: Annotated[str, Meta(max_length=4096)] = ""
    stderr_path: Annotated[str, Meta(max_length=4096)] = ""


class TaskInfo(_Reply, kw_only=True):
    """A task as it is. error: the platform's fault, in words; exit_code and signal: the program's own end.

    log_paths: FIFOs that the node daemon writes to while it runs.
    """

    key: str
    task_id: str
    alloc_id: str = ""
    task_name: str = ""
    state: TaskState = "starting"
    sandbox: str = ""
    exec_id: str = ""
    exit_code: int | None = None
    signal: int | None = None
    oom_killed: bool = False
    error: str = ""
    started_at: float = 0.0
    completed_at: float = 0.0
    log_bytes_dropped: int = 0
    log_paths: list[str] = []


class StopTaskRequest(_Wire, kw_only=True):
    """Signal, wait up to timeout_s, then kill; 0 kills at once.

    For a grant: no new starts at once, best_effort sandboxes evicted first, what is still too much after timeout_s.
    """

    timeout_s: Annotated[float, Meta(ge=0, le=24 * 3600)] = 5.0
    signal: Annotated[int, Meta(ge=1, le=64)] = 15


class TaskEvent(_Reply, kw_only=True):
    """Something worth telling the job's owner. seq grows by one; a gap means that events were dropped."""

    seq: int
    task_id: str
    alloc_id: str
    task_name: str
    at: float
    message: str
    annotations: dict[str, str] = {}


class TaskEvents(_Reply, kw_only=True):
    """Events after the asked number, oldest first; `next` is what to ask for next."""

    events: list[TaskEvent] = []
    next: int = 0


class GrantRequest(_Wire, kw_only=True):
    """Lend cpu and memory to the node daemon for as long as an allocation runs. The same key again changes the size."""

    task_id: Annotated[str, Meta(min_length=1, max_length=1024)]
    alloc_id: Annotated[str, Meta(max_length=256)] = ""
    task_name: Annotated[str, Meta(max_length=256)] = ""
    home: Annotated[str, Meta(max_length=4096)] = ""
    cpus: Annotated[float, Meta(gt=0, le=4096)]
    memory_mib: Annotated[int, Meta(ge=1)]


class GrantInfo(_Reply, kw_only=True):
    """One grant. evicted counts the sandboxes that ended because it went."""

    key: str
    task_id: str
    alloc_id: str = ""
    state: GrantState = "active"
    cpus: float = 0.0
    memory_mib: int = 0
    evicted: int = 0
    granted_at: float = 0.0


class GrantList(_Reply, kw_only=True):
    """All grants that are not gone."""

    grants: list[GrantInfo] = msgspec.field(default_factory=list)
