"""Processes held by pidfd: no pid of ours can be mistaken for a later process with the same number."""

from __future__ import annotations

import asyncio
import os
import select
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nomad_dsec.linux.procfs import start_time
from nomad_dsec.linux.syscalls import SyscallError, pidfd_send_signal

if TYPE_CHECKING:
    from collections.abc import Iterator


def open_pidfd(pid: int) -> int:
    """pidfd_open(2), 5.3: an fd (close-on-exec) for the process; ProcessLookupError when there is none."""
    return os.pidfd_open(pid)


def open_same_process(pid: int, start_ticks: int) -> int | None:
    """A pidfd for `pid` if it is still the process that began at `start_ticks` (procfs.start_time), else None.

    The start time is read after the pidfd is open, so a pid recycled in between is noticed.
    """
    try:
        fd = os.pidfd_open(pid)
    except (ProcessLookupError, OSError):
        return None
    if start_time(pid) != start_ticks:
        os.close(fd)
        return None
    return fd


def send_signal(pidfd: int, signum: int) -> bool:
    """Send it; False when the process has already ended."""
    try:
        pidfd_send_signal(pidfd, signum)
    except SyscallError as error:
        if error.errno == 3:  # ESRCH
            return False
        raise
    return True


def is_ended(pidfd: int) -> bool:
    """True once the process (its whole thread group) is dead, reaped or not."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


async def wait_ended(pidfd: int) -> None:
    """Return when the process is dead. The caller sets the deadline (asyncio.timeout) and keeps the fd open.

    A pidfd becomes readable at death (pidfd_open(2)); several waiters may share one fd, each waits on its own copy.
    """
    loop = asyncio.get_running_loop()
    copy = os.dup(pidfd)
    ended = loop.create_future()

    def readable() -> None:
        if not ended.done():
            ended.set_result(None)

    try:
        loop.add_reader(copy, readable)
        try:
            await ended
        finally:
            loop.remove_reader(copy)
    finally:
        os.close(copy)


@contextmanager
def held(pid: int) -> Iterator[int]:
    """A pidfd for the length of a block."""
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)
