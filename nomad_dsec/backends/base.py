"""What a backend promises to the node daemon: five verbs, and optional abilities as protocols of their own.

A verb raises DsecError with a code and a reason; it never returns a made-up result. `start` is all or nothing: when it
raises (or is cancelled) nothing of the sandbox is left. `stop` and `recover` work from the handle alone.
"""

from __future__ import annotations

import enum
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from libdsec.wire import BackendFingerprint, Metrics

    from nomad_dsec.guest.channel import GuestChannel
    from nomad_dsec.model import Handle, SandboxSpec


class Fate(enum.Enum):
    """What recover found."""

    RUNNING = "running"
    PAUSED = "paused"
    EXITED = "exited"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What is left of a sandbox after its daemon died; `reason` is one of contract.md's end reasons."""

    fate: Fate
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a sandbox ended by itself: reason init_exited or oom, with a readable message."""

    reason: str
    message: str = ""


@dataclass(slots=True)
class Steps:
    """Wall time of each named step of a start or stop, in milliseconds; names are the same in logs and metrics."""

    ms: dict[str, float] = field(default_factory=dict)
    current: str = ""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time the block under this name; on an error `current` still names the step that failed."""
        self.current = name
        began = time.perf_counter()
        yield
        self.ms[name] = self.ms.get(name, 0.0) + (time.perf_counter() - began) * 1000
        self.current = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A running sandbox: the full handle and the effective policy, as shown to the user.

    disk_mib: size of the writable layer where it is less than was asked for.
    """

    handle: Handle
    policy: Mapping[str, Any]
    disk_mib: int | None = None


class Backend(Protocol):
    """One kind of sandbox on one node."""

    name: str

    async def fingerprint(self) -> BackendFingerprint:
        """Ability, found by trying, with reasons. Cheap when called again."""
        ...

    async def start(self, spec: SandboxSpec, journal: Callable[[Handle], Awaitable[None]], steps: Steps) -> Started:
        """Start; `await journal(handle)` is called before each set of resources it names is made (at least once)."""
        ...

    async def recover(self, handle: Handle) -> Recovered:
        """Find out what became of it, and re-adopt what lives. Raises only when it can't be told."""
        ...

    async def connect(self, handle: Handle) -> GuestChannel:
        """A channel to the dsec-init of a running sandbox, for execs and files (shared; callers do not close it)."""
        ...

    async def wait_ended(self, handle: Handle) -> Ended:
        """Return when the sandbox has ended by itself (pidfd); cancelled by the caller otherwise."""
        ...

    async def stop(self, handle: Handle) -> None:
        """Kill and remove everything of it; returns when the resources are gone. Idempotent."""
        ...

    async def stats(self, handle: Handle) -> Metrics:
        """Use now; oom_kills is a running count. Those seen here are not the cause of a later end of init."""
        ...

    async def sweep(self, keep: Sequence[Handle]) -> list[str]:
        """Remove what carries our node's prefix and no handle owns; returns what was removed, one line each."""
        ...

    async def close(self) -> None:
        """Let go of pools and caches; running sandboxes stay."""
        ...


@runtime_checkable
class Pausable(Protocol):
    """Backends whose sandboxes can be frozen."""

    async def pause(self, handle: Handle) -> None:
        """Freeze all of it; on failure it still runs."""
        ...

    async def resume(self, handle: Handle) -> None:
        """Thaw."""
        ...


@runtime_checkable
class Planned(Protocol):
    """Backends that can print what they would do."""

    def plan(self, spec: SandboxSpec) -> list[dict[str, Any]]:
        """The operations as data."""
        ...
