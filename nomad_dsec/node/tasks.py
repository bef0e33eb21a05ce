"""Tasks of a cluster: one sandbox and its one command each, kept until the cluster forgets them.

A record is on disk before anything is made; the exec's id is the task's key, so no restart of anybody runs it twice.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from libdsec.errors import DeadlineExceeded, DsecError, NotFoundError, PlatformError, StateError, UsageError
from libdsec.wire import CreateRequest, ExecRequest, NodeCreateRequest
from libdsec.wire_tasks import HostMount, task_key

from nomad_dsec.backends.container import spec as container
from nomad_dsec.ids import new_sandbox_id
from nomad_dsec.log import get_log
from nomad_dsec.node.create import Inner
from nomad_dsec.node.execs import GUEST_S, exec_spec, start_error
from nomad_dsec.node.task_events import EventRing
from nomad_dsec.node.task_logs import LogSinks
from nomad_dsec.node.tasks_rows import TASK, TaskRow, replace_task, task_info

if TYPE_CHECKING:
    from libdsec.wire import Metrics
    from libdsec.wire_tasks import StopTaskRequest, TaskInfo, TaskRequest

    from nomad_dsec.guest.spec import StartError
    from nomad_dsec.node.core import Entry, Node
    from nomad_dsec.node.create import Creator
    from nomad_dsec.node.door import Door
    from nomad_dsec.node.execs import Execs
    from nomad_dsec.node.tasks_follow import Follower
    from nomad_dsec.node.verbs import Verbs

log = get_log(__name__)
OUTPUT_BYTES = 2 * 1024 * 1024  # kept by dsec-init while nobody reads: as long as this daemon is away
KILL_S = 2.0  # for the true end of a killed program to be told by its dsec-init
GONE_S = 10.0
START_SLACK_S = 30.0  # beyond the wait for a turn. A driver gives up later than that, so nothing starts behind its back
FAST_FAILURE_S = 0.1  # a program that can't be started is known by then, and StartTask itself can say so


@dataclass(slots=True, eq=False, kw_only=True)
class LiveTask:
    """One task in memory. poke: set at every change that a stop waits for; stop_at: the loop's time of the kill."""

    row: TaskRow
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    poke: asyncio.Event = field(default_factory=asyncio.Event)
    starting: asyncio.Task[None] | None = None
    following: asyncio.Task[None] | None = None
    stopping: asyncio.Task[None] | None = None
    stop_at: float | None = None
    killed: bool = False
    start_error: StartError | None = None


class Tasks:
    """The verbs, by key."""

    def __init__(self, node: Node, door: Door, creator: Creator, verbs: Verbs, execs: Execs) -> None:
        self._node = node
        self._door = door
        self._creator = creator
        self._verbs = verbs
        self._execs = execs
        self.follower: Follower
        self.live: dict[str, LiveTask] = {}
        self.events = EventRing(node.clock)

    def get(self, key: str) -> LiveTask:
        """The record, or NotFoundError task_not_found."""
        task = self.live.get(key)
        if task is None:
            raise NotFoundError("task_not_found", f"node {self._node.id} knows no task {key[:80]}", field="key")
        return task

    async def start(self, key: str, request: TaskRequest) -> TaskInfo:
        """Start it, or join its start, or return what has become of it; returns once it runs.

        Raises what a create raises, UsageError for a command, mount or log path that can't be. Nothing stays then.
        """
        if key != task_key(request.task_id):
            raise UsageError("bad_key", f"{key[:80]} is not the key of {request.task_id[:80]!r}", field="key")
        task = self.live.get(key)
        if task is None:
            row = TaskRow(
                key=key,
                task_id=request.task_id,
                sandbox=new_sandbox_id(self._node.id),
                alloc_id=request.alloc_id,
                task_name=request.task_name,
                home=request.home,
                argv=request.argv,
                stdout_path=request.stdout_path,
                stderr_path=request.stderr_path,
            )
            task = self.live[key] = LiveTask(row=row)
            task.starting = self._node.room.spawn(f"start task {key}", self._start(task, request))
        if task.starting is not None:
            await self._join_start(task)
        return task_info(task.row)

    async def _join_start(self, task: LiveTask) -> None:
        starting = task.starting
        assert starting is not None
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            if not starting.cancelled():
                raise  # the one who asked went away; the start goes on
            raise StateError("task_stopped", "the task was stopped while it was started") from None

    async def _start(self, task: LiveTask, request: TaskRequest) -> None:
        limit_s = request.start_timeout_s + START_SLACK_S
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                await self._supersede(task)
                await self._make(task, request)
        except BaseException as error:
            await asyncio.shield(self._undo(task))
            if limit.expired():
                message = f"the task did not run within {limit_s:g} s; what there was of it is removed"
                raise DeadlineExceeded("start_timeout", message, retry_after_s=1.0) from error
            raise
        finally:
            task.starting = None

    async def _supersede(self, task: LiveTask) -> None:
        """Two invocations of one task of one allocation never run at once: the older one's owner has given it up."""
        mine = (task.row.alloc_id, task.row.task_name)
        for other in list(self.live.values()):
            if other is task or not mine[0] or (other.row.alloc_id, other.row.task_name) != mine:
                continue
            if not other.exited.is_set():
                log.warning("an older invocation of a task is ended", task=other.row.task_id, by=task.row.task_id)
                await self.kill(other)

    async def _make(self, task: LiveTask, request: TaskRequest) -> None:
        row = task.row
        mounts = await asyncio.to_thread(checked_mounts, request.mounts, self._node.mount_roots)
        defaults = await self._node.images.defaults("", request.image)
        argv = request.argv or list(defaults.cmd)
        if not argv:
            raise UsageError(
                "no_command", f"image {request.image} names no command", field="argv", hint="set command in the task"
            )
        sinks = LogSinks.open(row.stdout_path, row.stderr_path)
        try:
            await self.save(task, durable=True, argv=argv)
            entry = await self._create(row.sandbox, request, Inner(mounts=mounts, outside=True))
            await self._door.change(entry, expires_at=None)  # Nomad ends it, no clock of ours
            await self._run(task, entry, request.stdin)
        except BaseException:
            sinks.close()
            raise
        self.follow(task, sinks)
        await self._tell_fast_failure(task, entry)

    async def _create(self, sandbox: str, request: TaskRequest, inner: Inner) -> Entry:
        spec = CreateRequest(
            image=request.image,
            backend=request.backend,
            cpus=request.cpus,
            memory_mib=request.memory_mib,
            disk_mib=request.disk_mib,
            pids=request.pids,
            env=request.env,
            cwd=request.cwd,
            user=request.user,
            qos=request.qos,
            policy=request.policy,
            labels={"nomad.alloc": request.alloc_id, "nomad.task": request.task_name},
            wait_s=request.start_timeout_s,
        )
        wanted = NodeCreateRequest(ids=[sandbox], namespace=request.namespace, spec=spec)
        _, groups = await self._creator.create(wanted, inner)
        self._creator.delivered(groups)
        return self._node.entry(sandbox)

    async def _run(self, task: LiveTask, entry: Entry, stdin: bytes) -> None:
        request = ExecRequest(
            cmd=task.row.argv, exec_id=task.row.key, max_output_bytes=OUTPUT_BYTES, stdin_open=bool(stdin)
        )
        channel = await self._execs.open(entry)
        running = await channel.exec(exec_spec(entry.row, request), timeout_s=GUEST_S)
        try:
            await self.save(task, durable=True, state="running", started_at=self._node.clock.now())
            if stdin:
                async with asyncio.timeout(GUEST_S):
                    await running.write(stdin)
                    await running.close_stdin()
        finally:
            await running.detach()  # the follower attaches anew, as it does after a restart
        row = entry.row
        self._tell(task, f"sandbox {row.id} runs {row.image}", image=row.digest)

    async def _tell_fast_failure(self, task: LiveTask, entry: Entry) -> None:
        """A command that is not there is a wrong job, and says so at once; later, its end says it."""
        try:
            async with asyncio.timeout(FAST_FAILURE_S):
                await task.exited.wait()
        except TimeoutError:
            return
        if task.start_error is not None:
            error = start_error(entry, task.row.key, task.start_error, shell=False)
            error.message = f"{task.row.argv[0][:200]}: {error.message}"
            raise error

    async def _undo(self, task: LiveTask) -> None:
        """A start that failed leaves neither sandbox nor record."""
        if task.following is not None:
            task.following.cancel()
        entry = self._node.entries.get(task.row.sandbox)
        if entry is not None:
            try:
                await self._door.end(entry, reason="killed", message="its task could not be started")
            except DsecError as error:
                log.error("the sandbox of a failed task stays", sandbox=task.row.sandbox, error=str(error))
        await self.forget(task)

    def follow(self, task: LiveTask, sinks: LogSinks) -> None:
        """Begin to carry its output and to wait for its end."""
        work = self.follower.follow(task, sinks)
        task.following = self._node.room.spawn(f"follow task {task.row.key}", work)

    async def save(self, task: LiveTask, *, durable: bool = False, **changes: object) -> None:
        """Change the row, in memory and on disk."""
        task.row = replace_task(task.row, **changes)
        await self._node.journal.put_record(TASK, task.row.key, task.row, durable=durable)

    async def forget(self, task: LiveTask) -> None:
        """Drop the record."""
        task.exited.set()
        task.poke.set()
        if self.live.get(task.row.key) is task:
            del self.live[task.row.key]
        await self._node.journal.drop_record(TASK, task.row.key)

    def _tell(self, task: LiveTask, message: str, **annotations: str) -> None:
        self.events.add(task.row.task_id, task.row.alloc_id, task.row.task_name, message, **annotations)

    async def wait(self, key: str, timeout_s: float) -> TaskInfo:
        """As it is once it has ended, or after timeout_s."""
        task = self.get(key)
        try:
            async with asyncio.timeout(timeout_s):
                await task.exited.wait()
        except TimeoutError:
            pass
        return task_info(task.row)

    async def signal(self, key: str, signum: int) -> None:
        """To the command's main process, as container engines do. StateError task_not_running when it has ended."""
        task = self.get(key)
        if task.row.state != "running":
            raise StateError("task_not_running", f"the task is {task.row.state}", field="key")
        await self._signal(task, signum, tree=False)

    async def _signal(self, task: LiveTask, signum: int, *, tree: bool) -> None:
        channel = await self._execs.open(self._node.entry(task.row.sandbox))
        async with asyncio.timeout(GUEST_S):
            await channel.signal(task.row.key, signum, tree=tree)

    async def stop(self, key: str, request: StopTaskRequest) -> TaskInfo:
        """Signal, wait up to timeout_s, kill; returns when its sandbox is gone. A second stop may shorten the wait."""
        task = self.get(key)
        await self._stop_by(task, timeout_s=request.timeout_s, signum=request.signal)
        return task_info(task.row)

    async def kill(self, task: LiveTask) -> None:
        """At once."""
        await self._stop_by(task, timeout_s=0.0, signum=signal.SIGKILL)

    async def _stop_by(self, task: LiveTask, *, timeout_s: float, signum: int) -> None:
        at = asyncio.get_running_loop().time() + timeout_s
        task.stop_at = at if task.stop_at is None else min(task.stop_at, at)
        task.poke.set()
        if task.stopping is None or task.stopping.done():
            work = self._stop(task, signum, gently=timeout_s > 0)
            task.stopping = self._node.room.spawn(f"stop task {task.row.key}", work)
        await asyncio.shield(task.stopping)

    async def _stop(self, task: LiveTask, signum: int, *, gently: bool) -> None:
        starting = task.starting
        if starting is not None and not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        loop = asyncio.get_running_loop()
        if gently and not task.exited.is_set():
            assert task.stop_at is not None
            await self._try_signal(task, signum, tree=False, within_s=min(KILL_S, task.stop_at - loop.time()))
            await self._wait_exit(task)
        if not task.exited.is_set():
            task.killed = True
            task.stop_at = loop.time() + KILL_S
            await self._try_signal(task, signal.SIGKILL, tree=True, within_s=KILL_S)
            await self._wait_exit(task)
        await self._end_sandbox(task, "its task was stopped")
        async with asyncio.timeout(GONE_S):
            await task.exited.wait()

    async def _try_signal(self, task: LiveTask, signum: int, *, tree: bool, within_s: float) -> None:
        """What can't be signalled (paused, hung, just ended) is killed with its sandbox."""
        try:
            async with asyncio.timeout(within_s):
                await self._signal(task, signum, tree=tree)
        except (DsecError, OSError, TimeoutError) as error:
            log.info("a task could not be signalled", task=task.row.task_id, signal=signum, error=repr(error))

    async def _wait_exit(self, task: LiveTask) -> None:
        loop = asyncio.get_running_loop()
        while not task.exited.is_set():
            assert task.stop_at is not None
            left = task.stop_at - loop.time()
            if left <= 0:
                return
            task.poke.clear()
            try:
                async with asyncio.timeout(left):
                    await task.poke.wait()
            except TimeoutError:
                return

    async def _end_sandbox(self, task: LiveTask, message: str) -> None:
        entry = self._node.entries.get(task.row.sandbox)
        if entry is not None:
            await self._door.end(entry, reason="killed", message=message)

    async def stats(self, key: str) -> Metrics:
        """Use of its sandbox now."""
        return await self._verbs.metrics(self.get(key).row.sandbox)

    async def destroy(self, key: str, *, force: bool) -> None:
        """Forget it, when nothing is left of it. StateError task_running unless forced, which kills it."""
        task = self.get(key)
        if not task.exited.is_set():
            if not force:
                raise StateError("task_running", "the task still runs", hint="stop it, or force=1")
            await self.kill(task)
        await self._end_sandbox(task, "its task was destroyed")
        await self.forget(task)

    def homes(self) -> dict[str, str]:
        """The allocation's directory of each."""
        return {key: task.row.home for key, task in self.live.items()}

    def restore(self) -> list[LiveTask]:
        """The records of a former daemon; read once, before serving."""
        for blob in self._node.journal.records(TASK):
            task = LiveTask(row=msgspec.json.decode(blob, type=TaskRow))
            if task.row.state == "exited":
                task.exited.set()
            self.live[task.row.key] = task
        return list(self.live.values())


def checked_mounts(mounts: list[HostMount], roots: tuple[str, ...]) -> tuple[HostMount, ...]:
    """The mounts by their true paths. UsageError names one whose source, links followed, is below no allowed root."""
    allowed = tuple(Path(os.path.realpath(root)) for root in roots)
    found = []
    for index, mount in enumerate(mounts):
        real = os.path.realpath(mount.host_path)
        if not Path(real).exists():
            raise PlatformError(
                "mount_missing",
                f"{mount.host_path} is not there",
                field=f"mounts[{index}].host_path",
                retry_after_s=1.0,
            )
        if mount.owners == "host" and not mount.readonly:
            where = f"mounts[{index}].owners"
            raise UsageError("bad_mount", "ids of the host are for reading only", field=where, hint="use task")
        found.append(msgspec.structs.replace(mount, host_path=real))
    container.check_mounts(
        tuple(
            container.HostMount(source=Path(mount.host_path), target=mount.task_path, read_only=mount.readonly)
            for mount in found
        ),
        allowed,
    )
    return tuple(found)
