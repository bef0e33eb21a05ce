"""From an exec's output to the FIFOs of a cluster's log collector, which may be slow, gone or stuck.

The program is never held up: dsec-init keeps the head and tail of what nobody reads. Here a collector gets a moment;
after that its bytes are dropped and counted until it reads again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from libdsec.errors import PlatformError, UsageError

from nomad_dsec.guest.spec import STDERR, STDOUT
from nomad_dsec.linux.syscalls import RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, openat2

if TYPE_CHECKING:
    from nomad_dsec.guest.spec import OutputChunk

PATIENCE_S = 2.0
NOWHERE = ("", os.devnull)
TASK_WRITABLE_PARTS = 3  # <alloc dir>/alloc/logs/.<task>.stdout.fifo: the task may write to the last two directories


class LogSink:
    """One FIFO, opened for both directions, so that a collector that restarts finds a writer and we never see EPIPE."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._stalled = False
        self.dropped = 0

    @classmethod
    def open(cls, path: str, field: str) -> LogSink:
        """UsageError bad_log_path for what is no FIFO; PlatformError log_path_missing (to be tried again).

        No link is followed below the allocation's directory: a task can write there.
        """
        if path in NOWHERE:
            return cls(-1)
        whole = Path(path)
        if not whole.is_absolute() or ".." in whole.parts:
            raise UsageError("bad_log_path", f"{path!r} is not an absolute path", field=field)
        base = whole.parents[min(TASK_WRITABLE_PARTS, len(whole.parts) - 1) - 1]
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            directory = os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                relative = str(whole.relative_to(base))
                fd = openat2(directory, relative, flags, resolve=RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS)
            finally:
                os.close(directory)
        except OSError as error:
            if error.errno == errno.ENOENT:
                message = f"the log FIFO {path} is not there"
                raise PlatformError("log_path_missing", message, field=field, retry_after_s=1.0) from error
            raise UsageError("bad_log_path", f"{path}: {error.strerror}", field=field) from error
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.close(fd)
            raise UsageError("bad_log_path", f"{path} is no FIFO", field=field)
        return cls(fd)

    async def write(self, data: bytes) -> None:
        """Give it to the collector; waits PATIENCE_S at most, and not at all once it is known to be stuck."""
        rest = memoryview(data)
        while self._fd >= 0 and rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                if self._stalled or not await self._writable():
                    self._stalled = True
                    self.dropped += len(rest)
                    return
                continue
            self._stalled = False

    async def _writable(self) -> bool:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self._fd, ready.set)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await ready.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_writer(self._fd)
        return True

    def close(self) -> None:
        """Let the collector see the end."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LogSinks:
    """stdout and stderr of one task."""

    def __init__(self, stdout: LogSink, stderr: LogSink) -> None:
        self._sinks = {STDOUT: stdout, STDERR: stderr}
        self._gaps = 0

    @classmethod
    def open(cls, stdout_path: str, stderr_path: str) -> LogSinks:
        """Both or none."""
        stdout = LogSink.open(stdout_path, "stdout_path")
        try:
            return cls(stdout, LogSink.open(stderr_path, "stderr_path"))
        except BaseException:
            stdout.close()
            raise

    @property
    def dropped(self) -> int:
        """Bytes that no collector got: dropped here, or by dsec-init while nobody read."""
        return self._gaps + sum(sink.dropped for sink in self._sinks.values())

    async def write(self, chunk: OutputChunk, expected: int) -> None:
        """One chunk; `expected` is the offset at which it should begin."""
        self._gaps += max(0, chunk.offset - expected)
        await self._sinks[chunk.stream].write(chunk.data)

    def close(self) -> None:
        """Both."""
        for sink in self._sinks.values():
            sink.close()
