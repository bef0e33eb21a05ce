"""Puts the drivers' entry files into Nomad's plugin_dir: small scripts bound to one interpreter, replaced atomically.

An agent runs every executable of that directory at its start and refuses to start when one of them is no plugin, or is
a link to nowhere; so nothing half-written is ever executable, and what else lies there is looked at.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("dsec-container", "dsec-fncall", "dsec-pool")
SHEBANG_BYTES = 255  # BINPRM_BUF_SIZE of Linux 5.1 and later, less the newline
CHECK_S = 60.0


class InstallError(Exception):
    """The entry files can't be put there; the text says why and what to do."""


def entry_text(name: str, interpreter: str) -> str:
    """The script: isolated from the agent's environment (-I), leaving no .pyc files (-B), unbuffered (-u)."""
    line = f"#!{interpreter} -IBu"
    if len(os.fsencode(line)) > SHEBANG_BYTES or " " in interpreter:
        raise InstallError(f"{interpreter!r} can't stand in the first line of a script: install into a shorter path")
    return f'{line}\nfrom dsec_plugins.drivers.entry import main\n\nraise SystemExit(main("{name}"))\n'


def check_interpreter(interpreter: str) -> None:
    """InstallError when the drivers can't be imported by it in isolation, as the agent will start it."""
    program = "import dsec_plugins.drivers.entry, dsec_plugins.drivers.driver"
    try:
        done = subprocess.run(
            [interpreter, "-IBc", program], capture_output=True, text=True, timeout=CHECK_S, check=False, env={}
        )
    except OSError as error:
        raise InstallError(f"{interpreter} can't be run: {error}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InstallError(f"{interpreter} can't import the drivers: {last}; install nomad-dsec into its environment")


def install(plugin_dir: Path, *, names: tuple[str, ...] = NAMES, interpreter: str = "") -> list[Path]:
    """Write the entry files; returns their paths. Safe to repeat, also while an agent runs: it starts them by exec."""
    # Not resolved: a venv's link to its interpreter is what makes it that venv.
    chosen = os.path.abspath(interpreter or sys.executable)  # noqa: PTH100
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise InstallError(f"there is no driver {unknown[0]!r}; choose from {', '.join(NAMES)}")
    check_interpreter(chosen)
    try:
        plugin_dir.mkdir(parents=True, exist_ok=True)
        return [_write(plugin_dir / name, entry_text(name, chosen)) for name in names]
    except OSError as error:
        raise InstallError(f"{error.filename or plugin_dir}: {error.strerror}") from error


def _write(path: Path, text: str) -> Path:
    """Executable only under its final name: a scan must never run a half-written file."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with fresh.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        fresh.replace(path)
        os.fchmod(file.fileno(), 0o755)
    return path


def problems_in(plugin_dir: Path) -> list[str]:
    """What in the directory would keep an agent from starting, in words."""
    found = []
    for path in sorted(plugin_dir.iterdir()):
        if path.is_symlink() and not path.exists():
            found.append(f"{path} is a link to nowhere: the agent will not start; remove it")
        elif path.is_file() and os.access(path, os.X_OK) and path.name.startswith("."):
            found.append(f"{path} is executable and hidden: the agent would run it as a plugin; remove it")
    return found
