"""What carries our names on this machine and belongs to no node that the caller named."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from libdsec.errors import DsecError

from nomad_dsec import proc
from nomad_dsec.doctor.row import Check
from nomad_dsec.linux.cgroup import detect_layout
from nomad_dsec.linux.nft_table import link_prefix, table_name

if TYPE_CHECKING:
    from collections.abc import Collection

_LINK: Final = re.compile(r"ds-[0-9a-f]{6}\.")
_TABLE: Final = re.compile(r"table inet (dsec_[a-z0-9_]+)")
_SHOWN: Final = 8


def check_leftovers(nodes: Collection[str]) -> list[Check]:
    """Cgroups, links and nft tables of nodes other than `nodes`; their daemon, if it lives, will sweep them itself."""
    return [
        _row("leftover cgroups", _cgroups(nodes)),
        _row("leftover links", _links(nodes)),
        _row("leftover nft tables", _tables(nodes)),
    ]


def _row(name: str, found: list[str]) -> Check:
    shown = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    return Check(
        name=name,
        ok=not found,
        reason=shown or "none",
        fix="" if not found else "if no such node runs here: start its daemon once, which sweeps what nobody owns",
    )


def _cgroups(nodes: Collection[str]) -> list[str]:
    owned = {f"dsec-{node}" for node in nodes}
    tops = detect_layout().hierarchies().values()
    names = {path.name for top in tops for path in Path(top).glob("dsec-*") if path.is_dir()}
    return sorted(names - owned)


def _links(nodes: Collection[str]) -> list[str]:
    owned = tuple(link_prefix(node) for node in nodes)
    names = [name for _, name in socket.if_nameindex() if _LINK.match(name)]
    return sorted(name for name in names if not (owned and name.startswith(owned)))


def _tables(nodes: Collection[str]) -> list[str]:
    owned = {table_name(node) for node in nodes}
    try:
        listed = proc.run(["nft", "list", "tables"], timeout_s=10).check().stdout.decode()
    except DsecError:
        return []  # no nft: then there are no tables of ours either, and the tool's own row says so
    return sorted(set(_TABLE.findall(listed)) - owned)
