"""A second holder of a task's log FIFOs: Nomad's collector stops for good when the last writer goes.

The node daemon writes to them; the plugin only keeps them open for as long as it waits for the task, so that a daemon
that is restarted finds its reader still there. As each keeps what the other may lose, either may die.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType


class HeldLogs:
    """Descriptors that are never written to; closed at the end of the block."""

    def __init__(self) -> None:
        self._fds: list[int] | None = None

    def __enter__(self) -> HeldLogs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for fd in self._fds or ():
            os.close(fd)
        self._fds = []

    def hold(self, paths: Sequence[str]) -> None:
        """Open them, the first time it is called. What is no FIFO, or not there, is left alone."""
        if self._fds is not None:
            return
        self._fds = []
        for path in paths:
            try:
                # Both directions: to open only for writing fails while nobody reads, and to write is not our part.
                fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue
            if stat.S_ISFIFO(os.fstat(fd).st_mode):
                self._fds.append(fd)
            else:
                os.close(fd)
