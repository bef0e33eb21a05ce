"""One supervised process: started, its log kept in bounds, started again with growing pauses when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nomad_dsec.clock import SYSTEM
from nomad_dsec.dev.processes import record_of
from nomad_dsec.log import get_log
from nomad_dsec.proc import tool_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from nomad_dsec.dev.layout import ProcessRecord

log = get_log(__name__)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_SETTLED_S = 30.0
_LOG_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class Child:
    """A daemon: a module of ours, or (module "") another program. `changed`: called when its pid is another one."""

    name: str
    module: str
    flags: Sequence[str]
    env: Mapping[str, str]
    log_file: Path
    changed: Callable[[Child], None]
    program: str = ""
    restarts: int = 0
    process: asyncio.subprocess.Process | None = None
    _stopping: bool = field(default=False)

    @property
    def record(self) -> ProcessRecord | None:
        """The process that runs now."""
        return record_of(self.process.pid) if self.process is not None else None

    async def supervise(self) -> None:
        """Keep it running until `stop`."""
        pause_s = _FIRST_PAUSE_S
        while not self._stopping:
            began = SYSTEM.monotonic()
            await self._start()
            assert self.process is not None
            status = await self.process.wait()
            if self._stopping:
                return
            if SYSTEM.monotonic() - began > _SETTLED_S:
                pause_s = _FIRST_PAUSE_S
            self.restarts += 1
            log.warning("a daemon died and is started again", daemon=self.name, status=status, log=str(self.log_file))
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def stop(self, *, patience_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL; returns when it is gone."""
        self._stopping = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
        except TimeoutError:
            log.warning("a daemon did not stop in time and is killed", daemon=self.name, patience_s=patience_s)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _argv(self) -> list[str]:
        start = [self.program] if self.program else [sys.executable, "-m", self.module]
        return [*start, *self.flags]

    async def _start(self) -> None:
        if self.log_file.exists() and self.log_file.stat().st_size > _LOG_BYTES:
            self.log_file.replace(self.log_file.with_suffix(".log.1"))
        out = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self._argv(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=tool_environment(self.env),
                start_new_session=True,  # Ctrl-C reaches the supervisor only, which stops its children in order
            )
        finally:
            os.close(out)
        self.changed(self)
