"""What carries our names on this machine and belongs to no node that the caller named and no daemon that lives."""

from __future__ import annotations

import json
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
    """Cgroups, links and nft tables of nodes other than `nodes` and those whose daemons live."""
    nodes = {*nodes, *running_nodes()}
    return [
        _row("leftover cgroups", _cgroups(nodes)),
        _row("leftover links", _links(nodes)),
        _row("leftover nft tables", _tables(nodes)),
    ]


def running_nodes(processes: Path = Path("/proc")) -> set[str]:
    """Ids of the node daemons of this machine: a daemon has the lock file open that lies beside its node.json."""
    found = set()
    for process in processes.iterdir():
        if not process.name.isdigit():
            continue
        try:
            if b"dsec" not in (process / "cmdline").read_bytes():
                continue
            held = {link.readlink() for link in (process / "fd").iterdir()}
            for lock in (path for path in held if path.name == "lock"):
                told = json.loads((lock.parent / "node.json").read_bytes())
                if str(told["pid"]) == process.name:
                    found.add(str(told["node"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it ended meanwhile, is not ours to look into, or the file is of something else
    return found


def _row(name: str, found: list[str]) -> Check:
    shown = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    return Check(
        name=name,
        ok=not found,
        reason=shown or "none",
        fix=""
        if not found
        else "its daemon is gone: start it once more, which adopts what lives and sweeps what nobody owns",
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
