"""What this node may promise and what it has promised. Pure.

The room is static (the machine's), or granted: the sum of what a cluster's allocations lend. A sandbox that is itself
a task of the cluster lies outside of a granted room: its resources were never in it.
"""

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

    def __init__(
        self, totals: Totals, *, granted: bool = False, cpu_factor: float = 1.0, memory_factor: float = 1.0
    ) -> None:
        self.totals = totals
        self.granted = granted
        self._factors = (cpu_factor, memory_factor)
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

    def lend(self, *, cpus: float, memory_mib: int) -> None:
        """The granted room is now this much, before overcommit. What is promised stands, even if it is more."""
        totals = Totals(
            cpus=round(cpus * self._factors[0], 3),
            memory_mib=int(memory_mib * self._factors[1]),
            sandboxes=self.totals.sandboxes,
        )
        if self.granted:
            self.totals = totals

    @property
    def is_over(self) -> bool:
        """More is promised than there is: a grant was withdrawn."""
        return self._cpus > self.totals.cpus + 1e-6 or self._memory_mib > self.totals.memory_mib

    def room_for(self, need: Need, count: int, *, outside: bool = False) -> int:
        """How many of `count` fit now."""
        if outside and self.granted:
            return max(0, min(count, self.totals.sandboxes - len(self._promised)))
        by_cpus = int((self.totals.cpus - self._cpus + 1e-6) / need.cpus)
        by_memory = (self.totals.memory_mib - self._memory_mib) // need.memory_mib
        by_count = self.totals.sandboxes - len(self._promised)
        return max(0, min(count, by_cpus, by_memory, by_count))

    def promise(self, sandbox: str, need: Need, *, outside: bool = False) -> None:
        """Take it, unasked: recovery adopts what lives even when the totals shrank meanwhile."""
        if sandbox in self._promised:
            return
        if outside and self.granted:
            need = Need(cpus=0.0, memory_mib=0)
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

    def promise_group(self, ids: Iterable[str], need: Need, *, all_or_none: bool, outside: bool = False) -> list[str]:
        """Promise as many as fit, in order; CapacityError `capacity` when none does, or not all of a gang."""
        wanted = [sandbox for sandbox in ids if sandbox not in self._promised]
        room = self.room_for(need, len(wanted), outside=outside)
        if wanted and (room == 0 or (all_or_none and room < len(wanted))):
            raise self.refusal(need, len(wanted), room)
        for sandbox in wanted[:room]:
            self.promise(sandbox, need, outside=outside)
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
