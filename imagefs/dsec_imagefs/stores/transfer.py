"""Whole images to and from a store. What names something comes after what it names: no reader finds half an image."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dsec_imagefs.layer.compose import compose_image
from dsec_imagefs.layer.manifest import ImageManifest, Layer, Part
from dsec_imagefs.stores.arrival import Arrival
from dsec_imagefs.stores.base import MAX_DOCUMENT_BYTES, StoredObject, StoreError, plain_hex
from dsec_imagefs.stores.crowd import Meter, each
from dsec_imagefs.stores.digests import checked
from dsec_imagefs.stores.retry import Backoff, retry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dsec_imagefs.fetch import BlockFetcher
    from dsec_imagefs.stores.base import Progress, Store

PARALLEL = 4
PIECE_BYTES = 4 << 20
MAX_LAYERS = 4096
MAX_METADATA_BYTES = 4 << 30
PUSH_BACKOFF = Backoff(attempts=5, attempt_s=6 * 3600.0)  # one attempt may be a layer of many gigabytes
_DIGEST = re.compile(r"(?:sha256:)?[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What a push did: objects and bytes that were sent, and objects that were there."""

    image: str
    sent: int
    sent_bytes: int
    present: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """An image whose metadata is local now; its blobs are in the store."""

    image: str
    manifest: ImageManifest
    layers: tuple[Layer, ...]


def image_objects(manifest: ImageManifest, layers: Sequence[Layer]) -> list[StoredObject]:
    """Every object an image consists of, each once, those that name others after them."""
    found: dict[str, StoredObject] = {}
    for layer in layers:
        for kind, part in (("wire", Part(digest=layer.wire.digest, size=layer.wire.size)), ("index", layer.index)):
            if part.size:  # a layer without data has no blob
                found.setdefault(part.digest, StoredObject(digest=part.digest, size=part.size, kind=kind))
        found.setdefault(layer.meta.digest, StoredObject(digest=layer.meta.digest, size=layer.meta.size, kind="meta"))
    merged = manifest.merged
    found.setdefault(merged.digest, StoredObject(digest=merged.digest, size=merged.size, kind="merged"))
    for layer in layers:
        raw = layer.render()
        found.setdefault(layer.id, StoredObject(digest=layer.id, size=len(raw), kind="layer"))
    return list(found.values())


def push_image(
    store: Store,
    manifest: ImageManifest,
    layers: Sequence[Layer],
    find: Callable[[str], Path],
    *,
    deadline: float,
    names: Sequence[str] = (),
    parallel: int = PARALLEL,
    progress: Progress | None = None,
    backoff: Backoff = PUSH_BACKOFF,
) -> Pushed:
    """Publish an image. What the store has is not sent again, so a push that broke goes on where it ended.

    Args:
        store: where to.
        manifest: the image.
        layers: its layers, lowest first.
        find: the local file of an object by its digest; asked only for what the store lacks.
        deadline: instant of `time.monotonic()` for all of it.
        names: references that point to the image at the end.
        parallel: objects sent at once.
        progress: ``progress(bytes done, bytes in all)``, from any thread, one at a time.
        backoff: how often and how patiently each object is tried.

    Raises:
        StoreError: of the first object that could not be sent. No name points to the image then.
    """
    if tuple(layer.id for layer in layers) != manifest.layers:
        raise StoreError("bad_name", "these are not the layers of the image", field="layers")
    objects = image_objects(manifest, layers)
    meter = Meter(sum(item.size for item in objects), progress)

    def send(item: StoredObject) -> bool:
        report = meter.part(item.size)

        def attempt(until: float) -> bool:
            if store.has(item.digest, deadline=until, size=item.size):
                return False
            return store.put(item.digest, find(item.digest), deadline=until, progress=lambda done, _: report(done))

        sent = retry(attempt, deadline=deadline, backoff=backoff)
        report(item.size)
        return sent

    naming = [item for item in objects if item.kind == "layer"]
    sent: list[int] = []
    for group in ([item for item in objects if item.kind != "layer"], naming):
        results = each(send, group, parallel)
        sent += [item.size for item, new in zip(group, results) if new]
    image = manifest.digest
    raw = manifest.render()
    retry(lambda until: store.put_image(image, raw, objects, deadline=until), deadline=deadline, backoff=backoff)
    for name in names:

        def point(until: float, name: str = name) -> None:
            store.put_ref(name, image, deadline=until)

        retry(point, deadline=deadline, backoff=backoff)
    return Pushed(image=image, sent=len(sent), sent_bytes=sum(sent), present=len(objects) - len(sent))


def pull_image(
    store: Store,
    ref: str,
    objects: Path,
    *,
    deadline: float,
    metas: bool = True,
    remerge: bool = False,
    parallel: int = PARALLEL,
    progress: Progress | None = None,
    backoff: Backoff | None = None,
) -> Pulled:
    """Bring an image's metadata here: manifests, block indexes, the merged image; everything checked by digest.

    The image's digest covers its layers and configuration; the merged image, which follows from them, is only named by
    the manifest. Who pinned a digest because he does not trust the store has it merged anew instead of fetched.

    Args:
        store: where from.
        ref: a name, or an image's digest.
        objects: the directory that gets a file ``<hex>`` for each object; what is there is not fetched again.
        deadline: instant of `time.monotonic()` for all of it.
        metas: fetch the layers' own metadata too, which composing new images needs.
        remerge: merge the layers here and don't believe the store's merged image (implies `metas`).
        parallel: objects fetched at once.
        progress: ``progress(bytes done, bytes in all)``.
        backoff: how often and how patiently each request is tried.

    Raises:
        StoreError: ``not_found``; ``corrupt`` when the store serves anything that does not match; others as `Store`.
    """
    backoff = backoff or Backoff()
    if _DIGEST.fullmatch(ref):
        image = plain_hex(ref)
    else:
        image = retry(lambda until: store.get_ref(ref, deadline=until), deadline=deadline, backoff=backoff)
    manifest = ImageManifest.parse(
        retry(lambda until: store.get_image(image, deadline=until), deadline=deadline, backoff=backoff),
        f"image {image} of {store.label}",
    )
    if manifest.digest != image:
        raise StoreError("corrupt", f"{store.label}: image {image} has a manifest of {manifest.digest}")
    if len(manifest.layers) > MAX_LAYERS:
        raise StoreError("too_large", f"{store.label}: image {image} has {len(manifest.layers)} layers")

    def layer_of(digest: str) -> Layer:
        path = fetch_document(store, digest, objects, deadline=deadline, backoff=backoff)
        return Layer.parse(path.read_bytes(), f"layer {digest} of {store.label}")

    unique = dict(zip(manifest.layers, each(layer_of, manifest.layers, parallel)))
    layers = tuple(unique[digest] for digest in manifest.layers)
    parts = {} if remerge else {manifest.merged.digest: manifest.merged}
    for layer in layers:
        parts |= {part.digest: part for part in ((layer.index, layer.meta) if metas or remerge else (layer.index,))}
    meter = Meter(sum(part.size for part in parts.values()), progress)

    def fetch(part: Part) -> None:
        report = meter.part(part.size)
        fetch_object(store, part, objects, deadline=deadline, backoff=backoff, report=report)

    each(fetch, list(parts.values()), parallel)
    if remerge:
        stack = [(layer, objects / layer.meta.digest) for layer in layers]
        manifest = replace(manifest, merged=compose_image(stack, objects, config=manifest.config).merged)
    return Pulled(image=image, manifest=manifest, layers=layers)


def fetch_document(store: Store, digest: str, objects: Path, *, deadline: float, backoff: Backoff) -> Path:
    """Fetch a small object of unknown length into ``objects/<hex>``, checked; returns its path."""
    target = objects / plain_hex(digest)
    if target.exists():
        return target

    def attempt(until: float) -> bytes:
        what = f"{store.label}: object {plain_hex(digest)}"
        size = store.size(digest, deadline=until)
        if size > MAX_DOCUMENT_BYTES:
            raise StoreError("too_large", f"{what} has {size} bytes, too many for a manifest")
        return checked(store.read(digest, 0, size, deadline=until) if size else b"", digest, what)

    data = retry(attempt, deadline=deadline, backoff=backoff)
    with Arrival(target) as arrival:
        arrival.write(data)
    return target


def fetch_object(
    store: Store,
    part: Part,
    objects: Path,
    *,
    deadline: float,
    backoff: Backoff | None = None,
    report: Callable[[int], None] | None = None,
) -> Path:
    """Fetch an object piece by piece into ``objects/<hex>``; it appears when its digest is right. Returns its path."""
    target = objects / plain_hex(part.digest)
    if target.exists():
        return target
    if part.size > MAX_METADATA_BYTES:
        raise StoreError("too_large", f"{store.label}: object {part.digest} has {part.size} bytes")
    for last in (False, True):
        try:
            with Arrival(target) as arrival:
                _fetch_pieces(store, part, arrival, deadline, backoff or Backoff(), report)
            break
        except StoreError as error:
            if last or error.code != "corrupt":
                raise
    return target


def _fetch_pieces(
    store: Store,
    part: Part,
    arrival: Arrival,
    deadline: float,
    backoff: Backoff,
    report: Callable[[int], None] | None,
) -> None:
    summed = hashlib.sha256()
    for at in range(0, part.size, PIECE_BYTES):
        length = min(PIECE_BYTES, part.size - at)

        def attempt(until: float, at: int = at, length: int = length) -> bytes:
            return store.read(part.digest, at, length, deadline=until)

        piece = retry(attempt, deadline=deadline, backoff=backoff)
        summed.update(piece)
        arrival.write(piece)
        if report is not None:
            report(at + length)
    if summed.hexdigest() != part.digest:
        raise StoreError(
            "corrupt", f"{store.label}: object {part.digest} came as {summed.hexdigest()}", "push it again"
        )


def fetch_blob(
    fetcher: BlockFetcher,
    target: Path,
    *,
    deadline: float,
    parallel: int = PARALLEL,
    progress: Progress | None = None,
) -> None:
    """Fetch a whole blob to a file, each block checked; zeros stay holes. For machines without the blob server."""
    index = fetcher.index
    step = max(1, PIECE_BYTES // index.block_bytes)
    meter = Meter(index.blob_size, progress)
    with Arrival(target) as arrival:
        os.ftruncate(arrival.fd, index.blob_size)

        def fill(first: int) -> None:
            count = min(step, index.count - first)
            at, size = first * index.block_bytes, 0
            for data in fetcher.fetch_run(first, count, deadline=deadline):
                if not index.is_zero(first + size // index.block_bytes):
                    arrival.write_at(data, at + size)
                size += len(data)
            meter.part(size)(size)

        each(fill, range(0, index.count, step), parallel)
