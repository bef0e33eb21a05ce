"""Whether containers work on this machine, found by starting one: its root is empty, dsec-init is all that runs."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

from libdsec.errors import DsecError

from nomad_dsec.backends.base import Steps
from nomad_dsec.model import Handle, SandboxSpec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from nomad_dsec.backends.base import Started

SELF_TEST: Final = "self-test"


async def self_test(
    start: Callable[[SandboxSpec, Callable[[Handle], Awaitable[None]], Steps, Path], Awaitable[Started]],
    stop: Callable[[Handle], Awaitable[None]],
    root: Path,
) -> str:
    """Empty when a container started, kept its policy and went; else the reason. `root`: made here and removed."""
    spec = SandboxSpec(
        id=SELF_TEST, incarnation=0, namespace="", digest="", backend="container", cpus=1, memory_mib=64, disk_mib=8,
        pids=32, env={}, cwd="/", user="", hostname=SELF_TEST, qos="latency_sensitive", policy={},
    )  # fmt: skip
    try:
        root.mkdir(mode=0o755, exist_ok=True)
        started = await start(spec, _no_journal, Steps(), root)
        await stop(started.handle)
    except (DsecError, OSError) as error:
        return str(error)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return ""


async def _no_journal(_: Handle) -> None:
    """It is gone before anybody could ask for it; if we die first, the next sweep finds its cgroup."""
