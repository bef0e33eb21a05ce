"""What the containers of one node draw from: cgroups, network namespaces, uid ranges, writable layers, image roots."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dsec_imagefs.errors import ImageError
from dsec_policies.probe import probe as probe_abilities
from libdsec.errors import CapacityError, PlatformError, UsageError

from nomad_dsec.linux import upper as uppers
from nomad_dsec.linux.cgroup import CgroupRoot
from nomad_dsec.linux.cgroup_pool import CgroupPool, enable_fast_moves
from nomad_dsec.linux.idmap import DEFAULT_BASE, DEFAULT_COUNT, UidRange, UidRanges
from nomad_dsec.linux.netns_pool import NetnsPool
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_imagefs.mounts import MountTable
    from dsec_policies.abilities import HostAbilities

    from nomad_dsec.linux.cgroup import Cgroup
    from nomad_dsec.linux.cgroup_files import Limits
    from nomad_dsec.linux.upper import UpperKind

STALE_AFTER_S: Final = 5.0  # how old the knowledge may be that an image read on demand can be read
_LABEL: Final = "trusted.dsec.owner"
_log = get_log("container.host")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerConfig:
    """Settings of the container backend of one node; data: the node's own directory (run/, upper/ below it).

    launcher: `native` or `oci:<runtime>`. pool_slots, network_pool: idle cgroups and closed namespaces, and namespaces
    with an open network, that are kept ready. resolvers: DNS servers of sandboxes with an open network.
    """

    node: str
    data: Path
    init_binary: Path
    launcher: str = "native"
    uid_base: int = DEFAULT_BASE
    uid_ranges: int = DEFAULT_COUNT
    upper: UpperKind = "auto"
    pool_slots: int = 32
    network_pool: int = 8
    mount_roots: tuple[Path, ...] = ()
    resolvers: tuple[str, ...] = ()

    @property
    def run(self) -> Path:
        """Holds one socket a sandbox."""
        return self.data / "run"


class ImageRoots:
    """Mounted image roots, one a digest and node: a start finds its root in memory, not in the store."""

    def __init__(self, table: MountTable, user: str) -> None:
        self._table = table
        self._user = user
        self._paths: dict[str, Path] = {}
        self._look_again: dict[str, float] = {}
        self._turn = asyncio.Lock()

    async def acquire(self, digest: str) -> Path:
        """The mounted root. CapacityError image_missing when this node has not got the image."""
        path = self._paths.get(digest)
        if path is None or time.monotonic() > self._look_again.get(digest, math.inf):
            async with self._turn:
                path = await self._acquire(digest)
        return path

    async def _acquire(self, digest: str) -> Path:
        def acquire() -> tuple[Path, bool]:
            return self._table.acquire(digest, self._user), self._table.is_on_demand(digest)

        try:
            path, on_demand = await asyncio.to_thread(acquire)
        except ImageError as error:
            raise _of_image(error) from error
        self._paths[digest] = path
        if on_demand:  # a blob server that died whole leaves a mount that answers EIO: new sandboxes get a good one
            self._look_again[digest] = time.monotonic() + STALE_AFTER_S
        return path

    async def release_unused(self, used: set[str]) -> list[str]:
        """Let go of images that no sandbox uses, and unmount what nobody needs; returns the digests unmounted."""
        async with self._turn:
            for digest in [digest for digest in self._paths if digest not in used]:
                del self._paths[digest]
                self._look_again.pop(digest, None)
            await asyncio.to_thread(self._table.retain, self._user, used)
            return list(await asyncio.to_thread(self._table.unmount_unused))

    async def close(self) -> None:
        """Unmount every image and give the directory's own mount back; for a node on which nothing lives."""
        await self.release_unused(set())
        await asyncio.to_thread(self._table.close)


def _of_image(error: ImageError) -> CapacityError | PlatformError:
    if error.code == "not_found":
        return CapacityError("image_missing", error.message, hint=error.hint, field="image")
    return PlatformError(f"image_{error.code}", error.message, hint=error.hint)


@dataclass(slots=True, kw_only=True)
class Host:
    """Opened once per daemon by `open_host`."""

    config: ContainerConfig
    abilities: HostAbilities
    cgroups: CgroupRoot
    cgroup_pool: CgroupPool
    nets: NetnsPool
    uids: UidRanges
    uppers: uppers.UpperChoice
    roots: ImageRoots
    fast_moves: str
    _background: list[asyncio.Task[None]] = field(default_factory=list)

    def take_cgroup(self, limits: Limits, owner: str) -> Cgroup:
        """A labelled cgroup with these limits."""
        cgroup = self.cgroup_pool.take(limits)
        set_owner(cgroup, owner)
        return cgroup

    async def give_back_cgroup(self, cgroup: Cgroup, *, reusable: bool) -> None:
        """Back to the pool; one that saw cgroup.kill is removed, since a kernel may refuse clones into it for good."""
        set_owner(cgroup, "")
        if reusable:
            await self.cgroup_pool.give_back(cgroup)
        else:
            await cgroup.remove()

    def claim_uids(self, base: int) -> UidRange:
        """The range of a recovered sandbox."""
        try:
            return self.uids.claim(base)
        except UsageError as taken:
            raise PlatformError("uid_range_taken", str(taken)) from taken

    async def close(self) -> None:
        """Drop idle resources; those in use stay with their sandboxes."""
        for task in self._background:
            task.cancel()
        if self._background:  # one that had failed must not keep the rest from being given back
            await asyncio.wait(self._background)
        await self.cgroup_pool.close()
        if self.cgroups.names():
            await self.nets.close()
            return
        # Nothing lives: leave the machine as it was found.
        await self.nets.close(forget_table=True)
        await self.roots.close()
        await self.cgroups.remove()


async def open_host(config: ContainerConfig, table: MountTable) -> Host:
    """Probe this machine and fill the pools. PlatformError says what is missing."""
    config.run.mkdir(mode=0o700, parents=True, exist_ok=True)
    abilities = await asyncio.to_thread(probe_abilities)
    fast_moves = await asyncio.to_thread(enable_fast_moves)
    if fast_moves:
        _log.warning("cgroup moves stay slow", node=config.node, reason=fast_moves)
    cgroups = await asyncio.to_thread(CgroupRoot.detect, config.node)
    choice = await asyncio.to_thread(uppers.probe, config.data / "upper", node=config.node, kind=config.upper)
    nets = NetnsPool(
        config.node, closed_size=config.pool_slots, open_size=config.network_pool, resolvers=config.resolvers
    )
    host = Host(
        config=config,
        abilities=abilities,
        cgroups=cgroups,
        cgroup_pool=CgroupPool(cgroups, size=config.pool_slots),
        nets=nets,
        uids=UidRanges(base=config.uid_base, count=config.uid_ranges),
        uppers=choice,
        roots=ImageRoots(table, f"node-{config.node}"),
        fast_moves=fast_moves,
    )
    try:
        await nets.start()
    except PlatformError as error:
        # Sandboxes without a network still work; one that asks for it will be told.
        _log.warning("no open networks on this node", node=config.node, reason=error.message)
    host.cgroup_pool.fill(config.pool_slots)
    host._background.append(asyncio.create_task(nets.run(), name="netns pool"))
    return host


def set_owner(cgroup: Cgroup, owner: str) -> None:
    """Label a cgroup with the sandbox that has it ("": nobody), in an extended attribute of its directory.

    The label lives and dies with the directory, so it can't be out of date after any crash (cgroup-v2.rst: trusted.*).
    """
    path = _labelled(cgroup)
    if owner:
        os.setxattr(path, _LABEL, owner.encode())
        return
    with contextlib.suppress(OSError):
        os.removexattr(path, _LABEL)


def owner_of(cgroup: Cgroup) -> str | None:
    """Whose cgroup it is; "" for nobody's; None when there is no such cgroup."""
    try:
        return os.getxattr(_labelled(cgroup), _LABEL).decode()
    except FileNotFoundError:
        return None
    except OSError:
        return ""


def _labelled(cgroup: Cgroup) -> str:
    return cgroup.unified or next(iter(cgroup.paths.values()))
