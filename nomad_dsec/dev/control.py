"""What a second command does to a running (or killed) `dsec dev`: start it detached, look at it, stop it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from libdsec.errors import DeadlineExceeded, DsecError, PlatformError

from nomad_dsec.clock import SYSTEM
from nomad_dsec.dev.layout import DevState, Layout, Lock
from nomad_dsec.dev.processes import end_all, is_alive
from nomad_dsec.dev.supervisor import kill_all_sandboxes
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = get_log(__name__)
_START_S = 120.0
_STOP_S = 360.0


async def start_detached(layout: Layout, argv: Sequence[str]) -> DevState:
    """Run `dsec <argv>` in a session of its own and wait until it is ready; its own words go to logs/dev.log."""
    layout.prepare()
    probe = Lock(layout)
    probe.take()
    probe.release()
    log_path = layout.logs / "dev.log"
    said_before = log_path.stat().st_size if log_path.exists() else 0
    child = _spawn(log_path, argv)
    deadline = SYSTEM.monotonic() + _START_S
    while SYSTEM.monotonic() < deadline:
        state = layout.read_state()
        if state is not None and state.ready and state.supervisor is not None and state.supervisor.pid == child.pid:
            return state
        if child.poll() is not None:
            words = log_path.read_bytes()[said_before:].decode("utf-8", "replace")
            cause = " ".join(words[max(0, words.rfind("dsec: ")) :].split())[:800]
            raise PlatformError("not_ready", f"`dsec dev` ended with {child.returncode}: {cause}")
        await asyncio.sleep(0.05)
    child.terminate()
    raise DeadlineExceeded("not_ready", f"`dsec dev` was not ready within {_START_S:g} s", hint=f"see {log_path}")


def _spawn(log_path: Path, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    with log_path.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "nomad_dsec.cli", *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


async def stop(layout: Layout, *, keep: bool) -> bool:
    """Stop it and, unless keep, its sandboxes; returns False when nothing ran. Works after a SIGKILL of it too."""
    state = layout.read_state()
    if state is None:
        return False
    if is_alive(state.supervisor):
        assert state.supervisor is not None
        os.kill(state.supervisor.pid, signal.SIGUSR1 if keep else signal.SIGTERM)
        deadline = SYSTEM.monotonic() + _STOP_S
        while is_alive(state.supervisor):
            if SYSTEM.monotonic() > deadline:
                raise DeadlineExceeded("stop_timeout", f"pid {state.supervisor.pid} did not end within {_STOP_S:g} s")
            await asyncio.sleep(0.05)
        return True
    return await _stop_orphans(layout, state, keep=keep)


async def _stop_orphans(layout: Layout, state: DevState, *, keep: bool) -> bool:
    """The supervisor is dead; its daemons may live."""
    lock = Lock(layout)
    lock.take()
    try:
        left = [record for record in state.children.values() if is_alive(record)]
        if left and not keep:
            try:
                await kill_all_sandboxes(layout)
            except DsecError as error:
                log.warning("sandboxes could not all be ended", error=str(error))
        await end_all(left, patience_s=10.0)
        state.ready, state.children, state.supervisor = False, {}, None
        layout.write_state(state)
        return bool(left)
    finally:
        lock.release()
