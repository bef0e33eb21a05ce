"""The life of a started task: its output to the log FIFOs, its true end to the record, and the same after a restart."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

from libdsec.errors import DsecError, NotFoundError

from nomad_dsec.log import get_log
from nomad_dsec.node.execs import GUEST_S
from nomad_dsec.node.task_logs import LogSinks

if TYPE_CHECKING:
    from nomad_dsec.guest.execution import GuestExec
    from nomad_dsec.guest.spec import ExecOutcome
    from nomad_dsec.node.core import Entry, Node
    from nomad_dsec.node.door import Door
    from nomad_dsec.node.execs import Execs
    from nomad_dsec.node.tasks import LiveTask, Tasks

log = get_log(__name__)
SAVE_S = 0.2  # how old the journaled offset may be: after a SIGKILL that much output comes twice
RETRY_S = 0.5


class Follower:
    """Waits for ends and moves logs, one coroutine a task."""

    def __init__(self, node: Node, door: Door, execs: Execs, tasks: Tasks) -> None:
        self._node = node
        self._door = door
        self._execs = execs
        self._tasks = tasks
        tasks.follower = self

    async def follow(self, task: LiveTask, sinks: LogSinks) -> None:
        """Until the task has ended and its record says how."""
        entry = self._node.entries.get(task.row.sandbox)
        try:
            outcome = None if entry is None else await self._outcome(task, entry, sinks)
        finally:
            sinks.close()
        changes = await self._ended(task, entry, outcome)
        dropped = sinks.dropped
        if dropped and changes.get("log_bytes_dropped", 0) == 0:
            changes["log_bytes_dropped"] = task.row.log_bytes_dropped + dropped
        await self._tasks.save(task, durable=True, state="exited", completed_at=self._node.clock.now(), **changes)
        task.exited.set()
        task.poke.set()
        self._tell_end(task)
        if entry is not None:
            await self._door.end(entry, reason="killed", message="its task has ended")

    async def _outcome(self, task: LiveTask, entry: Entry, sinks: LogSinks) -> ExecOutcome | None:
        """How the command ended; None when its sandbox went first."""
        while not entry.ended.is_set():
            try:
                channel = await self._execs.open(entry)
                running = await channel.attach(task.row.key, since=task.row.log_offset, timeout_s=GUEST_S)
                try:
                    return await self._pump(task, running, sinks)
                finally:
                    await running.detach()
            except NotFoundError as error:
                log.error("a task's command is not known to its sandbox", task=task.row.task_id, error=str(error))
                await self._door.end(entry, reason="error(exec)", message=f"its command is gone: {error}")
            except (DsecError, OSError, TimeoutError) as error:
                log.info("a task is attached again", task=task.row.task_id, error=repr(error))
                await _first(entry.ended, RETRY_S)
        return None

    async def _pump(self, task: LiveTask, running: GuestExec, sinks: LogSinks) -> ExecOutcome:
        loop = asyncio.get_running_loop()
        saved_at, before = loop.time(), task.row.log_bytes_dropped
        offset = task.row.log_offset
        async for chunk in running:
            stuck = sinks.dropped
            await sinks.write(chunk, offset)
            offset = chunk.offset + len(chunk.data)
            if sinks.dropped and not stuck:
                self._tell(task, "the log collector is slow: some output was dropped")
            if loop.time() - saved_at > SAVE_S:
                saved_at = loop.time()
                await self._tasks.save(task, log_offset=offset, log_bytes_dropped=before + sinks.dropped)
        outcome = await running.wait(timeout_s=GUEST_S)
        dropped = before + sinks.dropped + max(0, outcome.total_bytes - offset)
        await self._tasks.save(task, log_offset=outcome.total_bytes, log_bytes_dropped=dropped)
        return outcome

    async def _ended(self, task: LiveTask, entry: Entry | None, outcome: ExecOutcome | None) -> dict[str, Any]:
        """What the record is to say. An exit code comes from the kernel or not at all."""
        if outcome is not None and entry is not None:
            if outcome.start_error is not None:
                task.start_error = outcome.start_error
                failed = outcome.start_error
                return {"error": f"{failed.code}: {task.row.argv[0][:200]}: {failed.message}"}
            reply = await self._execs.reply(entry, outcome)
            return {"exit_code": reply.exit_code, "signal": reply.signal, "oom_killed": reply.oom_killed}
        if task.killed:
            return {"signal": int(signal.SIGKILL)}  # ours: all of the sandbox was killed
        if entry is None:
            return {"error": f"the node daemon has lost track of its sandbox {task.row.sandbox}"}
        row = entry.row
        if row.reason == "oom":
            return {"signal": int(signal.SIGKILL), "oom_killed": True}
        return {"error": f"its sandbox {row.id} ended ({row.reason}{': ' + row.message if row.message else ''})"}

    def _tell_end(self, task: LiveTask) -> None:
        row = task.row
        if row.oom_killed:
            self._tell(task, "the kernel killed it: it used more memory than the task's limit")
        if row.error:
            self._tell(task, row.error)
        log.info(
            "a task has ended",
            task=row.task_id,
            sandbox=row.sandbox,
            exit_code=row.exit_code,
            signal=row.signal,
            oom=row.oom_killed,
            error=row.error,
        )

    def _tell(self, task: LiveTask, message: str) -> None:
        self._tasks.events.add(task.row.task_id, task.row.alloc_id, task.row.task_name, message)

    async def recover(self) -> None:
        """After the daemon's own restart: what runs is followed on, what ended meanwhile gets its true end."""
        for task in self._tasks.restore():
            if task.exited.is_set():
                continue
            entry = self._node.entries.get(task.row.sandbox)
            if task.row.state == "starting" and not await self._was_started(task, entry):
                log.warning("a half-started task is undone", task=task.row.task_id)
                if entry is not None and not entry.ended.is_set():
                    await self._door.end(entry, reason="killed", message="the node daemon ended while it was started")
                await self._tasks.forget(task)
                continue
            if task.row.state == "starting":
                await self._tasks.save(task, durable=True, state="running", started_at=self._node.clock.now())
            self._tasks.follow(task, self._reopened(task))

    async def _was_started(self, task: LiveTask, entry: Entry | None) -> bool:
        """Whether its command was begun before the daemon died: then it must not run a second time."""
        if entry is None or entry.ended.is_set():
            return False
        try:
            channel = await self._execs.open(entry)
            return bool(await channel.list_execs(task.row.key))
        except DsecError as error:
            log.error("a half-started task can't be asked for", task=task.row.task_id, error=str(error))
            return False

    def _reopened(self, task: LiveTask) -> LogSinks:
        """A task whose FIFOs are gone (a machine that was cleaned) goes on without logs, and says so."""
        try:
            return LogSinks.open(task.row.stdout_path, task.row.stderr_path)
        except DsecError as error:
            self._tell(task, f"its logs are lost: {error}")
            return LogSinks.open("", "")


async def _first(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
