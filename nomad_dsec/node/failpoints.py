"""Crash tests: the daemon kills itself at a named step when the setting `node.failpoint` says so."""

from __future__ import annotations

import os
import signal

from libdsec.errors import UsageError

NAMES = (
    "admitted",
    "journaled",
    "started",
    "running",
    "before_reply",
    "pausing",
    "paused",
    "resuming",
    "resumed",
    "stopping",
    "stopped",
    "ended",
    "recovered",
)


class Failpoints:
    """At most one is armed: `name` or `name:N` (the N-th time the step is reached)."""

    __slots__ = ("_left", "_name")

    def __init__(self, armed: str = "") -> None:
        self._name, _, count = armed.partition(":")
        if (self._name and self._name not in NAMES) or not (count or "1").isdecimal():
            raise UsageError("bad_config", f"{armed!r}", field="node.failpoint", hint=f"NAME or NAME:N of {NAMES}")
        self._left = int(count or 1)

    def reach(self, name: str) -> None:
        """SIGKILL this process when the step is the armed one: no handler, no flush, as a crash would."""
        if name != self._name:
            return
        self._left -= 1
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


DISARMED = Failpoints()
