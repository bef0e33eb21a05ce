"""Removing what has our node's name and no handle owns: cgroups with all in them, links, layers, sockets, mounts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nomad_dsec.backends.container.host import Host
    from nomad_dsec.backends.container.live import Live
    from nomad_dsec.backends.container.record import Record


async def sweep(host: Host, live: Sequence[Live], keep: Sequence[Record]) -> list[str]:
    """One line for each thing removed. `live`: containers of this process, which count as kept, half-made ones too."""
    records = [*keep, *(one.record for one in live)]
    names = {str(record.cgroup.get("name")) for record in records} | host.cgroup_pool.idle_names()
    names |= {one.cgroup.name for one in live if one.cgroup is not None}
    removed = [f"cgroup {name}" for name in await host.cgroups.sweep(names)]
    links = {str(record.net["link"]) for record in records if record.net.get("link")}
    links |= {one.net.link for one in live if one.net is not None}
    removed += [f"link {name}" for name in await host.nets.sweep(links)]
    layers = {str(record.upper.get("name")) for record in records}
    removed += [f"upper {name}" for name in await host.uppers.store.sweep(layers)]
    sockets = {record.socket for record in records}
    for path in sorted(host.config.run.glob("*.sock")):
        if str(path) not in sockets:
            path.unlink(missing_ok=True)
            removed.append(f"socket {path}")
    unmounted = await host.roots.release_unused({record.digest for record in records if record.digest})
    return removed + [f"mount of {digest}" for digest in unmounted]
