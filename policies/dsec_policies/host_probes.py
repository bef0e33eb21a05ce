"""Runs every probe in a child process with a deadline and prints one JSON object a line: ``python -m`` this module.

The probes themselves are in ``probes_kernel`` (no resources but the child itself) and ``probes_mounts`` (cgroups,
mounts and networks of their own). A probe returns (detail, value) or raises; an exception is its reason.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable

from dsec_policies import probes_kernel, probes_mounts

PROBE_TIMEOUT_S = 8.0
Probe = Callable[[], tuple[str, int]]


def run_bounded(probe: Probe, timeout_s: float = PROBE_TIMEOUT_S) -> tuple[bool, str, int]:
    """Returns (ok, detail, value) of ``probe`` run in a forked child, which is killed after ``timeout_s``."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _answer(probe, writer)
    os.close(writer)
    answer = _read_all(reader, time.monotonic() + timeout_s)
    os.close(reader)
    if answer is None:
        os.kill(pid, signal.SIGKILL)
    _reap(pid, time.monotonic() + 1.0)
    if not answer:
        return False, f"no answer after {timeout_s:g} s" if answer is None else "the kernel killed the probe", 0
    ok, detail, value = json.loads(answer)
    return bool(ok), str(detail), int(value)


def _answer(probe: Probe, writer: int) -> None:
    """The child: answers and ends without Python's exit handlers."""
    try:
        detail, value = probe()
        reply = (True, detail, value)
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the reason why the host can't
        text = error.strerror if isinstance(error, OSError) else str(error)
        reply = (False, text or type(error).__name__, 0)
    os.write(writer, json.dumps(reply).encode())
    os._exit(0)


def _read_all(reader: int, deadline: float) -> bytes | None:
    """Reads to the end of the pipe, or returns None when the deadline passes first."""
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(reader, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _reap(pid: int, deadline: float) -> None:
    """Waits for the child; one that hangs in the kernel is left to init."""
    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.002)


def main() -> int:
    """Prints the answers as they come, so that a hanging probe costs only itself."""
    for name, probe in {**probes_kernel.PROBES, **probes_mounts.PROBES}.items():
        ok, detail, value = run_bounded(probe)
        line = json.dumps({"name": name, "ok": ok, "detail": detail, "value": value})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
