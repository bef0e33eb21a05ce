"""Limits of the process and the machine that many sandboxes run into."""

from __future__ import annotations

import resource
from typing import Final

from nomad_dsec.doctor.row import Check
from nomad_dsec.linux.procfs import read_sysctl

_FDS_PER_SANDBOX: Final = 6  # pidfd, channel, listener, namespace, and two of streams
_PIDS_PER_SANDBOX: Final = 4
# sysctl -> how many a sandbox takes
_PER_SANDBOX: Final = {
    "user.max_user_namespaces": 1,
    "user.max_net_namespaces": 1,
    "user.max_mnt_namespaces": 1,
    "user.max_pid_namespaces": 1,
    "user.max_cgroup_namespaces": 1,
}


def check_limits(sandboxes: int) -> list[Check]:
    """Whether so many sandboxes fit at once."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = sandboxes * _FDS_PER_SANDBOX + 1024
    enough = hard == resource.RLIM_INFINITY or hard >= wanted
    rows = [
        Check(
            name="open files",
            ok=enough,
            reason=f"hard limit {hard}, {sandboxes} sandboxes take up to {wanted}",
            fix="" if enough else f"LimitNOFILE={wanted} in the daemon's unit, or a lower node.sandboxes_max",
        )
    ]
    needs = {name: sandboxes * each for name, each in _PER_SANDBOX.items()} | {
        "kernel.pid_max": sandboxes * _PIDS_PER_SANDBOX,
        "kernel.threads-max": sandboxes * _PIDS_PER_SANDBOX,
    }
    for name, need in needs.items():
        text = read_sysctl(name)
        if text is None:
            continue
        fits = int(text) >= need
        rows.append(
            Check(
                name=name,
                ok=fits,
                reason=f"{text}, {sandboxes} sandboxes take {need}",
                fix="" if fits else f"sysctl -w {name}={need * 2}",
                required=int(text) == 0,
            )
        )
    return rows
