"""The one door to child processes: argv lists, an environment given in full, always a deadline."""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libdsec.errors import DeadlineExceeded, PlatformError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a tool of the host ended. returncode is negative for a signal."""

    argv: tuple[str, ...]
    returncode: int
    stdout: bytes
    stderr: bytes

    def check(self) -> Finished:
        """Itself, or PlatformError tool_failed with the command that reproduces it."""
        if self.returncode != 0:
            tail = self.stderr.decode("utf-8", "replace").strip()[-800:]
            raise PlatformError("tool_failed", f"`{' '.join(self.argv)}` ended with {self.returncode}: {tail}")
        return self


def tool_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment built from empty: PATH, a C locale, HOME, and what the caller adds."""
    base = {"PATH": os.environ.get("PATH", SYSTEM_PATH), "LC_ALL": "C.UTF-8", "HOME": os.environ.get("HOME", "/root")}
    return base | dict(extra or {})


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Finished:
    """Run to the end, in a thread or a plain program; DeadlineExceeded after timeout_s (the child is killed)."""
    try:
        done = subprocess.run(
            list(argv),
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            env=tool_environment(env),
            cwd=cwd,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise DeadlineExceeded("tool_timeout", f"`{' '.join(argv)}` did not end within {timeout_s:g} s") from late
    except FileNotFoundError as missing:
        raise PlatformError("tool_missing", f"{argv[0]} is not installed", hint=f"install {argv[0]}") from missing
    return Finished(argv=tuple(argv), returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


async def run_async(
    argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> Finished:
    """The same inside an event loop; the child is killed when the caller is cancelled."""
    try:
        child = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=tool_environment(env),
        )
    except FileNotFoundError as missing:
        raise PlatformError("tool_missing", f"{argv[0]} is not installed", hint=f"install {argv[0]}") from missing
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await child.communicate(stdin)
    except TimeoutError as late:
        raise DeadlineExceeded("tool_timeout", f"`{' '.join(argv)}` did not end within {timeout_s:g} s") from late
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return Finished(argv=tuple(argv), returncode=child.returncode or 0, stdout=stdout, stderr=stderr)
