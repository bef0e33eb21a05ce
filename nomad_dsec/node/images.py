"""The bridge to the image store: references to digests and exec defaults, in threads, remembered for a moment."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from dsec_imagefs.errors import ImageError
from libdsec.errors import CapacityError
from libdsec.wire import ImageInfo

from nomad_dsec.node.foreign import to_dsec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsec_imagefs.image import Image
    from dsec_imagefs.store import ImageStore

    from nomad_dsec.clock import Clock
    from nomad_dsec.node.shared_images import SharedImages

REMEMBER_S = 2.0
REMEMBER_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDefaults:
    """What an image says about programs started from it. env without PATH gets none added here."""

    digest: str
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    user: str = ""
    cmd: tuple[str, ...] = ()


class Images(Protocol):
    """Where digests come from."""

    async def defaults(self, digest: str, ref: str) -> ImageDefaults:
        """By digest, or by reference when the digest is ""; CapacityError image_missing when it is not here."""
        ...

    async def ls(self) -> list[ImageInfo]:
        """All images, at most a moment old."""
        ...


class StoreImages:
    """Images of a dsec_imagefs store on this machine, and of a shared store when there is one."""

    def __init__(self, store: ImageStore, clock: Clock, shared: SharedImages | None = None) -> None:
        self._store = store
        self._shared = shared
        self._clock = clock
        self._known: dict[str, tuple[float, ImageDefaults]] = {}
        self._listing: tuple[float, list[ImageInfo]] = (-REMEMBER_S, [])

    async def defaults(self, digest: str, ref: str) -> ImageDefaults:
        """See Images."""
        key = digest or ref
        now = self._clock.monotonic()
        known = self._known.get(key)
        if known is not None and now - known[0] < REMEMBER_S:
            return known[1]
        try:
            image = await self._find(key)
        except ImageError as error:
            self._known.pop(key, None)
            raise to_dsec(error) from error
        if len(self._known) >= REMEMBER_MAX:
            self._known.clear()
        found = _defaults(image)
        self._known[key] = (now, found)
        return found

    async def _find(self, key: str) -> Image:
        try:
            return await asyncio.to_thread(self._store.resolve, key)
        except ImageError as here:
            if here.code != "not_found" or self._shared is None:
                raise
            try:
                return await self._shared.pull(key)
            except ImageError as there:
                if there.code in ("not_found", "bad_name"):
                    raise here from there
                raise

    async def ls(self) -> list[ImageInfo]:
        """See Images. What only the shared store has is listed too: a create that names it brings its metadata here."""
        now = self._clock.monotonic()
        if now - self._listing[0] >= REMEMBER_S:
            try:
                images = await asyncio.to_thread(self._store.ls)
            except ImageError as error:
                raise to_dsec(error) from error
            found = {image.digest: image for image in images}
            for image in await self._shared.ls() if self._shared is not None else ():
                known = found.get(image.digest, image)
                found[image.digest] = replace(known, names=tuple(sorted({*known.names, *image.names})))
            self._listing = (now, [_info(image) for image in found.values()])
        return self._listing[1]


class AnyImages:
    """For the fake backend, which has no image: every reference stands for itself, except those without a name."""

    async def defaults(self, digest: str, ref: str) -> ImageDefaults:
        """A digest of the reference's text; references that start with `missing` are refused, for tests."""
        if ref.startswith("missing"):
            raise CapacityError("image_missing", f"image {ref!r} is not on this node", field="image")
        return ImageDefaults(digest=digest or "sha256:" + hashlib.sha256(ref.encode()).hexdigest())

    async def ls(self) -> list[ImageInfo]:
        """None."""
        return []


def _defaults(image: Image) -> ImageDefaults:
    pairs = (text.partition("=") for text in image.config.env)
    return ImageDefaults(
        digest=image.digest,
        env={name: value for name, _, value in pairs if name},
        cwd=image.config.cwd or "/",
        user=image.config.user,
        cmd=(*image.config.entrypoint, *image.config.cmd),
    )


def _info(image: Image) -> ImageInfo:
    try:
        created = datetime.fromisoformat(image.created or image.imported).timestamp()
    except ValueError:
        created = 0.0
    return ImageInfo(
        digest=image.digest,
        names=list(image.names),
        size_bytes=image.size_bytes,
        files=image.files,
        created_at=created,
        source=image.source,
        env=list(image.config.env),
        cwd=image.config.cwd,
        user=image.config.user,
        cmd=[*image.config.entrypoint, *image.config.cmd],
    )
