"""The door to other programs: argv lists, an environment built from empty, a deadline, and death with us."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections import deque
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_KEPT = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TAIL_LINES = 12


def tool_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a tool sees: a fixed PATH and locale, and the proxy settings that networks here may force."""
    kept = {key: os.environ[key] for key in _KEPT if key in os.environ}
    return {"PATH": _PATH, "LC_ALL": "C.UTF-8", **kept, **(extra or {})}


def need_tool(name: str, package: str) -> str:
    """Path of a program, or an ImageError that names the package to install."""
    path = shutil.which(name, path=_PATH)
    if path is None:
        raise ImageError("tool_missing", f"{name} is not installed", f"apt-get install {package}", "source")
    return path


def run_tool(
    argv: Sequence[str],
    *,
    timeout_s: float,
    on_line: Callable[[str], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run a program to its end, handing on each line it prints.

    The program gets SIGKILL when we die (prctl(2) PR_SET_PDEATHSIG by setpriv(1)), so a killed import leaves nothing
    running.

    Raises:
        ImageError: ``tool_failed`` with the last lines it printed, also on a timeout.
    """
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    late = threading.Event()
    with subprocess.Popen(
        [need_tool("setpriv", "util-linux"), "--pdeathsig", "KILL", "--", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=tool_environment(env),
        text=True,
        errors="replace",
        start_new_session=True,
    ) as child:

        def give_up() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(timeout_s, give_up)
        timer.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                tail.append(line.rstrip())
                if on_line is not None:
                    on_line(line.rstrip())
            status = child.wait()
        except BaseException:
            child.kill()
            raise
        finally:
            timer.cancel()
    if late.is_set():
        raise ImageError("tool_failed", f"{argv[0]} did not end within {timeout_s:.0f} s: {' | '.join(tail)}")
    if status:
        raise ImageError("tool_failed", f"{argv[0]} ended with status {status}: {' | '.join(tail)}", field="source")
