"""The list of checks and its row type."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_policies.probe import probe

from nomad_dsec.doctor import cluster, kernel, leftovers, limits, tools
from nomad_dsec.doctor.row import Check

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_policies.abilities import HostAbilities

    from nomad_dsec.config import Settings

__all__ = ["Check", "Subject", "examine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is examined. data: the node's data directory (it need not exist); nodes: ids whose leftovers are theirs;
    settings: where Consul and Nomad are, if they are to be looked at.
    """

    data: Path = Path("/var/lib/dsec/node")
    nodes: tuple[str, ...] = ()
    sandboxes: int = 3200
    abilities: HostAbilities | None = field(default=None)
    settings: Settings | None = field(default=None, repr=False)


def examine(subject: Subject) -> list[Check]:
    """Every check, in order. Blocks for a second or two; a check that fails to run is itself a failed row."""
    abilities = subject.abilities or probe()
    groups: dict[str, Callable[[], list[Check]]] = {
        "privileges": kernel.check_privileges,
        "kernel": lambda: kernel.check_kernel(abilities),
        "cgroups": kernel.check_cgroups,
        "isolation": lambda: kernel.check_isolation(abilities),
        "images": kernel.check_images,
        "writable layers": lambda: kernel.check_uppers(subject.data),
        "network": lambda: kernel.check_network(abilities),
        "kvm": kernel.check_kvm,
        "limits": lambda: limits.check_limits(subject.sandboxes),
        "tools": tools.check_tools,
        "docker engine": tools.check_docker,
        "leftovers": lambda: leftovers.check_leftovers(subject.nodes),
    }
    if (settings := subject.settings) is not None:
        groups["consul"] = lambda: cluster.check_consul(settings)
        groups["nomad"] = lambda: cluster.check_nomad(settings)
    rows: list[Check] = []
    for name, group in groups.items():
        try:
            rows += group()
        except (OSError, ValueError) as error:
            rows.append(Check(name=name, ok=False, reason=f"could not be examined: {error}", fix="see the reason"))
    return rows
