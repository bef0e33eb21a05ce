"""The one place that knows which backends there are and how each is made from settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from libdsec.errors import UsageError

from nomad_dsec import guest
from nomad_dsec.backends.fake import FakeBackend
from nomad_dsec.node.images import AnyImages, StoreImages

if TYPE_CHECKING:
    from dsec_imagefs.store import ImageStore

    from nomad_dsec.backends.base import Backend
    from nomad_dsec.clock import Clock
    from nomad_dsec.node.images import Images

KNOWN = ("container", "fake")
INIT_BINARY = Path(guest.__file__).parent / "bin" / "dsec-init"


def build_backends(settings: dict[str, Any], *, node: str, data: Path, images: ImageStore | None) -> dict[str, Backend]:
    """Backends by the name that creates ask for. UsageError names an unknown one."""
    found: dict[str, Backend] = {}
    for name in settings["backends"]:
        if name == "fake":
            backend: Backend = FakeBackend(data / "fake", INIT_BINARY)
        elif name == "container" and images is not None:
            from nomad_dsec.node.container import build_container

            backend = build_container(settings, node=node, data=data, store=images)
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


def image_directory(settings: dict[str, Any], data: Path) -> Path:
    """Where the image store is."""
    return Path(settings["images"]) if settings["images"] else data.parent / "images"


def build_images(store: ImageStore | None, clock: Clock) -> Images:
    """The store's images; without a store (the fake backend alone) any reference will do."""
    return AnyImages() if store is None else StoreImages(store, clock)
