"""Crash tests: the gateway kills itself at a named step of a create when the setting `gateway.failpoint` says so."""

from __future__ import annotations

import os
import signal

from libdsec.errors import UsageError

NAMES = ("placed", "journaled", "node_replied", "settled")


class Failpoints:
    """At most one is armed: `name`, or `name:N` for the N-th time the step is reached."""

    __slots__ = ("_left", "_name")

    def __init__(self, armed: str = "") -> None:
        self._name, _, count = armed.partition(":")
        if self._name and self._name not in NAMES:
            raise UsageError(
                "bad_config", f"there is no step {self._name!r}", field="gateway.failpoint", hint=", ".join(NAMES)
            )
        self._left = int(count) if count.isdecimal() else 1

    def reach(self, name: str) -> None:
        """SIGKILL this process when the step is the armed one: no handler, no flush, as a crash would."""
        if name == self._name:
            self._left -= 1
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
