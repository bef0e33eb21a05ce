"""Processes that an earlier supervisor may have left: told by pid and start time, ended through a pidfd."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from nomad_dsec.dev.layout import ProcessRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

_AFTER_COMMAND = 20  # starttime is field 22 of proc_pid_stat(5); the count starts after ") "


def record_of(pid: int) -> ProcessRecord | None:
    """The identity of a live process, None when there is none (or only its zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    if fields[0] in {"Z", "X"}:
        return None
    return ProcessRecord(pid=pid, starttime=int(fields[_AFTER_COMMAND - 1]))


def is_alive(record: ProcessRecord | None) -> bool:
    """Whether exactly this process still runs."""
    return record is not None and record_of(record.pid) == record


async def end_process(record: ProcessRecord, *, patience_s: float) -> None:
    """SIGTERM, then SIGKILL after patience_s; returns when it is gone. Harmless when it is not there."""
    try:
        fd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if not is_alive(record):
            return
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        if not await _gone(fd, patience_s):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            await _gone(fd, 10.0)
    except ProcessLookupError:
        return
    finally:
        os.close(fd)


async def end_all(records: Iterable[ProcessRecord], *, patience_s: float) -> None:
    """End several at once."""
    await asyncio.gather(*(end_process(record, patience_s=patience_s) for record in records))


async def _gone(fd: int, timeout_s: float) -> bool:
    def wait() -> bool:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    return await asyncio.to_thread(wait)
