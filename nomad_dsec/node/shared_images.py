"""The shared store of images as a node sees it: what it has, and bringing here what a create names."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import Image, image_of
from dsec_imagefs.layer.manifest import ImageManifest
from dsec_imagefs.stores.parse import parse_store
from dsec_imagefs.stores.patient import PatientStore

from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from dsec_imagefs.remote import Remote
    from dsec_imagefs.stores.base import Store

    from nomad_dsec.clock import Clock

LISTING_S = 30.0
LISTING_TIMEOUT_S = 20.0
PULL_TIMEOUT_S = 120.0
NAMES_MAX = 16_384
_log = get_log("node.images")


class SharedImages:
    """Names and images of one shared store, learnt anew every half minute; a store that is away changes nothing."""

    def __init__(self, remote: Remote, clock: Clock) -> None:
        self._remote = remote
        self._clock = clock
        self._manifests: dict[str, ImageManifest] = {}  # by digest, so they never change
        self._images: tuple[Image, ...] = ()
        self._read_at = -LISTING_S
        self._turn = asyncio.Lock()
        self._pulls: dict[str, asyncio.Task[Image]] = {}

    async def ls(self) -> tuple[Image, ...]:
        """What it has by name, at most half a minute old."""
        async with self._turn:
            if self._clock.monotonic() - self._read_at >= LISTING_S:
                try:
                    self._images = await asyncio.to_thread(self._read)
                except ImageError as error:
                    _log.warning("the shared image store does not answer", store=self._remote.url, reason=error.message)
                self._read_at = self._clock.monotonic()
        return self._images

    async def pull(self, ref: str) -> Image:
        """Bring an image's metadata here, once for all who ask; raises ImageError ``not_found`` and others."""
        task = self._pulls.get(ref)
        if task is None:
            task = self._pulls[ref] = asyncio.create_task(asyncio.to_thread(self._pull, ref), name=f"pull {ref}")
            task.add_done_callback(lambda done: self._pulled(ref, done))
        return await asyncio.shield(task)

    def _pulled(self, ref: str, task: asyncio.Task[Image]) -> None:
        self._pulls.pop(ref, None)
        if not task.cancelled():
            task.exception()  # those who asked may all have gone

    def _pull(self, ref: str) -> Image:
        name = next((name for image in self._images if image.digest == ref for name in image.names), None)
        started = time.monotonic()
        image = self._remote.pull(ref, name)
        took_ms = round(1000 * (time.monotonic() - started))
        _log.info("image pulled", image=image.digest, step="pull image", took_ms=took_ms)
        return image

    def _read(self) -> tuple[Image, ...]:
        deadline = time.monotonic() + LISTING_TIMEOUT_S
        store = PatientStore(store=parse_store(self._remote.url, authfile=self._remote.authfile))
        try:
            names: dict[str, list[str]] = {}
            for name in store.refs(deadline=deadline)[:NAMES_MAX]:
                names.setdefault(store.get_ref(name, deadline=deadline), []).append(name)
            found = {digest: self._manifest(store, digest, deadline) for digest in names}
        finally:
            store.close()
        self._manifests = found
        return tuple(image_of(manifest, (), tuple(names[digest])) for digest, manifest in found.items())

    def _manifest(self, store: Store, digest: str, deadline: float) -> ImageManifest:
        known = self._manifests.get(digest)
        if known is None:
            known = ImageManifest.parse(store.get_image(digest, deadline=deadline), f"image {digest} of {store.label}")
            if known.digest != digest:
                raise ImageError("corrupt", f"{store.label}: image {digest} has a manifest of {known.digest}")
        return known
