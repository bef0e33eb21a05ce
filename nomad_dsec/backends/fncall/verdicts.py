"""From facts about a call to its verdict. Pure; the order of the questions is the contract.

A limit that was exceeded names the verdict even if the program also exited with a code; a kill that no limit of ours
explains is the program's own end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libdsec.wire_fncall import FnLimits, Verdict

SIGXCPU = 24
SIGXFSZ = 25
SIGKILL = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was observed. cpu_s is that of the whole tree; oom: the kernel killed in this call's cgroup for memory.

    thrashed: its time went into reading its own code again, since its data filled its memory.
    """

    exit_code: int | None
    signal: int | None
    cpu_s: float
    wall_s: float
    oom: bool = False
    thrashed: bool = False
    wall_expired: bool = False
    cpu_expired: bool = False
    output_over: bool = False
    lost: str = ""


def judge(facts: Facts, limits: FnLimits) -> tuple[Verdict, str]:
    """The verdict before any checker is asked, and a sentence for people."""
    if facts.lost:
        return "internal_error", facts.lost
    if facts.oom:
        return "memory_limit", f"the program used more than {limits.memory_mib} MiB"
    if facts.thrashed:
        return "memory_limit", f"the program needs more than {limits.memory_mib} MiB: its own code had to make room"
    if facts.cpu_expired or facts.signal == SIGXCPU or facts.cpu_s > limits.cpu_s:
        return "cpu_time_limit", f"the program used more than {limits.cpu_s:g} s of CPU"
    if facts.wall_expired:
        return "wall_time_limit", f"the program ran for more than {limits.wall_s:g} s"
    if facts.output_over:
        return "output_limit", f"the program wrote more than {limits.output_bytes} bytes"
    if facts.signal is not None:
        return "runtime_error", f"the program was ended by signal {facts.signal}"
    if facts.exit_code is None:
        return "internal_error", "the end of the program was not seen"
    if facts.exit_code != 0:
        return "runtime_error", f"the program exited with {facts.exit_code}"
    return "accepted", ""
