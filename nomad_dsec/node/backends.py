"""The one place that knows which backends there are and how each is made from settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_imagefs.errors import ImageError
from dsec_imagefs.lazy import IMAGE_SETTINGS
from dsec_imagefs.mounts import MountTable
from dsec_imagefs.remote import Remote
from dsec_imagefs.stores.parse import parse_store
from libdsec.errors import UsageError

from nomad_dsec import guest
from nomad_dsec.backends.container.backend import ContainerBackend
from nomad_dsec.backends.container.host import ContainerConfig
from nomad_dsec.backends.fake import FakeBackend
from nomad_dsec.node.images import AnyImages, StoreImages
from nomad_dsec.node.shared_images import PULL_TIMEOUT_S, SharedImages

if TYPE_CHECKING:
    from dsec_imagefs.store import ImageStore

    from nomad_dsec.backends.base import Backend
    from nomad_dsec.clock import Clock
    from nomad_dsec.node.images import Images

KNOWN = ("container", "fake")
INIT_BINARY = Path(guest.__file__).parent / "bin" / "dsec-init"


async def build_backends(
    settings: dict[str, Any], *, node: str, data: Path, images: ImageStore | None
) -> dict[str, Backend]:
    """Backends by the name that creates ask for. UsageError names an unknown one."""
    found: dict[str, Backend] = {}
    for name in settings["backends"]:
        if name == "fake":
            backend: Backend = FakeBackend(data / "fake", INIT_BINARY)
        elif name == "container" and images is not None:
            backend = await _container(settings, node=node, data=data, store=images)
        else:
            raise UsageError("bad_config", f"there is no backend {name!r}", field="node.backends", hint=f"use {KNOWN}")
        if backend.name in found:
            raise UsageError(
                "bad_config", f"two backends answer to {backend.name}", field="node.backends", hint="name one of them"
            )
        found[backend.name] = backend
    if not found:
        raise UsageError("bad_config", "no backend is named", field="node.backends", hint=f"use some of {KNOWN}")
    return found


async def _container(settings: dict[str, Any], *, node: str, data: Path, store: ImageStore) -> Backend:
    config = ContainerConfig(
        node=node,
        data=data,
        init_binary=INIT_BINARY,
        launcher=settings["launcher"],
        uid_base=settings["uid_base"],
        uid_ranges=settings["uid_ranges"],
        upper=settings["upper"],
        pool_slots=settings["pool_slots"],
        network_pool=settings["network_pool"],
        mount_roots=tuple(Path(root) for root in settings["mount_roots"]),
        resolvers=resolvers(Path("/etc/resolv.conf").read_text(encoding="utf-8", errors="replace")),
    )
    cache = replace(IMAGE_SETTINGS, cache_bytes=settings["image_cache_gib"] << 30)
    return await ContainerBackend.open(config, MountTable(store, data / "mounts", blobs=cache))


def resolvers(resolv_conf: str) -> tuple[str, ...]:
    """The name servers of resolv.conf(5) that a sandbox can reach: not one on the host's own loopback."""
    lines = (line.split() for line in resolv_conf.splitlines())
    servers = [words[1] for words in lines if len(words) > 1 and words[0] == "nameserver"]
    return tuple(server for server in servers if not server.startswith("127.") and server != "::1")


def image_directory(settings: dict[str, Any], data: Path) -> Path:
    """Where the image store is."""
    return Path(settings["images"]) if settings["images"] else data.parent / "images"


def build_images(settings: dict[str, Any], store: ImageStore | None, clock: Clock) -> Images:
    """The store's images; without a store (the fake backend alone) any reference will do.

    UsageError names a shared store that can't be one; whether it answers shows later.
    """
    if store is None:
        return AnyImages()
    url, authfile = settings["image_store"], settings["image_authfile"]
    if not url:
        return StoreImages(store, clock)
    try:
        parse_store(url, authfile=authfile).close()
    except ImageError as error:
        raise UsageError("bad_config", error.message, field="node.image_store", hint=error.hint) from error
    remote = Remote(store=store, url=url, authfile=authfile, timeout_s=PULL_TIMEOUT_S)
    return StoreImages(store, clock, SharedImages(remote, clock))
