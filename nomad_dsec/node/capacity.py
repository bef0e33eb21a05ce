"""What this node may promise and what it has promised. Pure. Slices granted by a cluster will add to the totals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from libdsec.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """After overcommit. cpus in cores, memory in MiB."""

    cpus: float
    memory_mib: int
    sandboxes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one sandbox takes."""

    cpus: float
    memory_mib: int


class Capacity:
    """Totals and the promises against them, by sandbox id; a promise can be made and taken back only once."""

    def __init__(self, totals: Totals) -> None:
        self.totals = totals
        self._promised: dict[str, Need] = {}
        self._cpus = 0.0
        self._memory_mib = 0

    @property
    def cpus_used(self) -> float:
        """Promised cores."""
        return self._cpus

    @property
    def memory_mib_used(self) -> int:
        """Promised MiB."""
        return self._memory_mib

    @property
    def sandboxes(self) -> int:
        """Promises standing."""
        return len(self._promised)

    def room_for(self, need: Need, count: int) -> int:
        """How many of `count` fit now."""
        by_cpus = int((self.totals.cpus - self._cpus + 1e-6) / need.cpus)
        by_memory = (self.totals.memory_mib - self._memory_mib) // need.memory_mib
        by_count = self.totals.sandboxes - len(self._promised)
        return max(0, min(count, by_cpus, by_memory, by_count))

    def promise(self, sandbox: str, need: Need) -> None:
        """Take it, unasked: recovery adopts what lives even when the totals shrank meanwhile."""
        if sandbox in self._promised:
            return
        self._promised[sandbox] = need
        self._cpus += need.cpus
        self._memory_mib += need.memory_mib

    def release(self, sandbox: str) -> None:
        """Give it back. Idempotent."""
        need = self._promised.pop(sandbox, None)
        if need is not None:
            self._cpus -= need.cpus
            self._memory_mib -= need.memory_mib
        if not self._promised:
            self._cpus = 0.0  # no drift of floats over millions of creates

    def promise_group(self, ids: Iterable[str], need: Need, *, all_or_none: bool) -> list[str]:
        """Promise as many as fit, in order; CapacityError `capacity` when none does, or not all of a gang."""
        wanted = [sandbox for sandbox in ids if sandbox not in self._promised]
        room = self.room_for(need, len(wanted))
        if wanted and (room == 0 or (all_or_none and room < len(wanted))):
            raise self.refusal(need, len(wanted), room)
        for sandbox in wanted[:room]:
            self.promise(sandbox, need)
        return wanted[:room]

    def refusal(self, need: Need, count: int, room: int) -> CapacityError:
        """The error with the numbers: what was asked, what is free, what there is in all."""
        details: dict[str, Any] = {
            "asked": {"count": count, "cpus": need.cpus, "memory_mib": need.memory_mib},
            "free": {
                "cpus": round(self.totals.cpus - self._cpus, 3),
                "memory_mib": self.totals.memory_mib - self._memory_mib,
                "sandboxes": self.totals.sandboxes - len(self._promised),
            },
            "total": {
                "cpus": self.totals.cpus,
                "memory_mib": self.totals.memory_mib,
                "sandboxes": self.totals.sandboxes,
            },
            "room": room,
        }
        return CapacityError(
            "capacity",
            f"there is room for {room} of {count} sandboxes of {need.cpus:g} cores and {need.memory_mib} MiB",
            hint="ask for less, or wait until others end",
            retry_after_s=1.0,
            details=details,
        )


def detect_totals(
    *,
    cpus: float,
    memory_mib: int,
    sandboxes: int,
    cpu_overcommit: float,
    memory_overcommit: float,
    machine_cpus: int,
    machine_memory_mib: int,
) -> Totals:
    """Totals from settings (0: the machine's) times overcommit; a tenth of memory (at most 2 GiB) stays the host's."""
    cores = cpus or float(machine_cpus)
    memory = memory_mib or machine_memory_mib - min(2048, machine_memory_mib // 10)
    return Totals(
        cpus=round(cores * cpu_overcommit, 3), memory_mib=int(memory * memory_overcommit), sandboxes=sandboxes
    )
