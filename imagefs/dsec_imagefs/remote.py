"""Images to and from a store that many machines share: pushing whole images, pulling their metadata, data on demand."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import digest_hex, normal_name
from dsec_imagefs.lazy import LazyBlobs
from dsec_imagefs.objects import Origin
from dsec_imagefs.stores.base import StoreError
from dsec_imagefs.stores.parse import parse_store
from dsec_imagefs.stores.patient import PatientStore
from dsec_imagefs.stores.transfer import pull_image, push_image

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dsec_imagefs.image import Image
    from dsec_imagefs.layer.manifest import Layer
    from dsec_imagefs.store import ImageStore
    from dsec_imagefs.stores.transfer import Pushed
    from dsec_imagefs.tree import Progress

TIMEOUT_S = 3600.0
_PULLS = 3  # a collection may take what a pull has just brought


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """One shared store, seen from one local one.

    Attributes:
        store: the local store.
        url: the shared one, see `stores.parse`.
        authfile: credentials of a registry.
        timeout_s: for all of one push or pull.
    """

    store: ImageStore
    url: str
    authfile: str = ""
    timeout_s: float = TIMEOUT_S

    def push(self, ref: str, name: str | None = None, *, progress: Progress | None = None) -> Pushed:
        """Publish an image with all it needs; what the shared store has is not sent.

        Args:
            ref: an image here.
            name: what to call it there; by default all its names here.
            progress: ``("push", bytes done, bytes in all)``.

        Raises:
            ImageError: ``not_found`` for data that is not here whole; StoreError.
        """
        names = (normal_name(name),) if name else self.store.resolve(ref).names
        image = self.store.inspect(ref)
        layers = self.store.layers(image)
        there = parse_store(self.url, authfile=self.authfile)
        try:
            return push_image(
                there, self.store.manifest(image.digest), layers, self._finder(layers),
                deadline=time.monotonic() + self.timeout_s, names=names, progress=_report("push", progress),
            )  # fmt: skip
        finally:
            there.close()

    def pull(self, ref: str, name: str | None = None, *, progress: Progress | None = None) -> Image:
        """Bring an image's metadata here; its data comes when it is read.

        Args:
            ref: a name (its tag ``latest`` may be left out) or a digest.
            name: what to call it here; by default the name it was asked by.
            progress: ``("pull", bytes done, bytes in all)``.

        Raises:
            StoreError: ``not_found``, ``corrupt``, and others.
        """
        if not ref.startswith("sha256:"):
            ref = normal_name(ref, "ref")
            name = name or ref
        there = parse_store(self.url, authfile=self.authfile)
        try:
            for attempt in range(1, _PULLS + 1):
                pulled = pull_image(
                    there, ref, self.store.root / "objects",
                    deadline=time.monotonic() + self.timeout_s, progress=_report("pull", progress),
                    remerge=ref.startswith("sha256:"),
                )  # fmt: skip
                manifest = replace(pulled.manifest, imported=datetime.now(UTC).isoformat(timespec="seconds"))
                origin = Origin(store=self.url, authfile=self.authfile)
                try:
                    with self.store.scratch.directory() as nothing:
                        return self.store.publish(manifest, pulled.layers, nothing, name, origin=origin)
                except ImageError as err:
                    if err.code != "not_found" or attempt == _PULLS:
                        raise
            raise AssertionError
        finally:
            there.close()

    def fetch_whole(self, image: Image, *, progress: Progress | None = None) -> None:
        """Bring all data of an image here."""
        lazy = LazyBlobs(self.store)
        for layer in self.store.layers(image):
            lazy.fetch_whole(layer, progress, timeout_s=self.timeout_s)

    def digest_of(self, name: str) -> str | None:
        """The digest a name has there, ``sha256:...``; None when it has none. Raises StoreError for the rest."""
        there = PatientStore(store=parse_store(self.url, authfile=self.authfile))
        try:
            return f"sha256:{there.get_ref(normal_name(name, 'ref'), deadline=time.monotonic() + self.timeout_s)}"
        except StoreError as err:
            if err.code == "not_found":
                return None
            raise
        finally:
            there.close()

    def _finder(self, layers: tuple[Layer, ...]) -> Callable[[str], Path]:
        objects = self.store.objects
        whole = {layer.blob.digest: layer.blob.size for layer in layers}

        def find(digest: str) -> Path:
            if digest not in whole:
                return objects.path(digest_hex(f"sha256:{digest}"))
            if not objects.has_whole_blob(digest, whole[digest]):
                raise ImageError(
                    "not_found", f"the data {digest} is not here whole", "dsec image pull --whole first", "ref"
                )
            return objects.blob(digest)

        return find


def _report(stage: str, progress: Progress | None) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress(stage, done, total)
