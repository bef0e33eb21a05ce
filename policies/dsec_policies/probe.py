"""Finds out what this host can do, by trying. The tries run in a process of their own that is ended after a deadline.

Nothing here changes the host: each try works in namespaces, cgroups and temporary file systems that end with it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from dsec_policies.abilities import ABILITIES, Ability, HostAbilities

TIMEOUT_S = 60.0


def probe(timeout_s: float = TIMEOUT_S) -> HostAbilities:
    """Returns what the host can do, every ability of ``ABILITIES`` with what was seen or why not. Takes about a second.

    Blocks up to ``timeout_s``; abilities without an answer by then count as absent. Needs no root: what needs it is
    reported as refused.
    """
    rows = _answers(timeout_s)
    items = tuple(
        (name, rows.get(name, Ability(ok=False, detail="the probe gave no answer in time"))) for name in ABILITIES
    )
    return HostAbilities(arch=platform.machine(), kernel=platform.release(), items=items)


def _answers(timeout_s: float) -> dict[str, Ability]:
    """Runs the tries and reads their answers, one JSON object a line, as far as they got."""
    # Not subprocess.run: a try that hangs in the kernel can't be killed, and must not be waited for either.
    child = subprocess.Popen(
        [sys.executable, "-m", "dsec_policies.host_probes"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.defpath + ":/usr/sbin:/sbin", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as late:
        child.kill()
        output = late.stdout or b""
        if child.stdout is not None:
            child.stdout.close()
    rows = (json.loads(line) for line in output.splitlines() if line.endswith(b"}"))
    return {row["name"]: Ability(ok=row["ok"], detail=row["detail"], value=row["value"]) for row in rows}
