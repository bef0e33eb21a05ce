"""Fetching before it is asked for: the first accesses of a sandbox are kept as a trace and replayed on other machines.

A trace lies beside its image in the shared store, and in ``traces/<image hex>`` here. Replaying goes below what running
sandboxes ask for: the blob server serves demand first.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from dsec_imagefs.durable import write_durably
from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import digest_hex
from dsec_imagefs.lazy import LazyBlobs
from dsec_imagefs.stores.base import StoreError
from dsec_imagefs.stores.parse import parse_store
from dsec_imagefs.stores.patient import PatientStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dsec_imagefs.image import Image
    from dsec_imagefs.layer.manifest import Layer
    from dsec_imagefs.objects import Origin
    from dsec_imagefs.store import ImageStore

MAX_ACCESSES = 1 << 20
_VERSION = 1
_STORE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """First accesses of an image: ``(milliseconds since the start, blob as hex, offset, length)``, in order of time."""

    image: str
    accesses: tuple[tuple[int, str, int, int], ...]

    def render(self) -> bytes:
        """As stored; each blob's digest once."""
        blobs = list(dict.fromkeys(blob for _, blob, _, _ in self.accesses))
        number = {blob: index for index, blob in enumerate(blobs)}
        rows = [[at, number[blob], offset, length] for at, blob, offset, length in self.accesses]
        return json.dumps({"version": _VERSION, "image": self.image, "blobs": blobs, "accesses": rows}).encode()

    @classmethod
    def parse(cls, raw: bytes, image: str) -> Trace:
        """Read the trace of an image; raises ImageError ``corrupt``."""
        try:
            found = json.loads(raw)
            if found["version"] != _VERSION or found["image"] != image or len(found["accesses"]) > MAX_ACCESSES:
                raise ValueError("it is of another version or image, or too long")
            blobs = [digest_hex(f"sha256:{blob}") for blob in found["blobs"]]
            rows = [
                (int(at), blobs[number], int(offset), int(length)) for at, number, offset, length in found["accesses"]
            ]
            if any(min(row[0], row[2], row[3]) < 0 for row in rows):
                raise ValueError("it has negative numbers")
        except (ValueError, KeyError, TypeError, IndexError, ImageError) as err:
            raise ImageError("corrupt", f"the trace of {image} can't be read: {err}", "record it again") from err
        return cls(image=image, accesses=tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetched:
    """What became of one image.

    Attributes:
        image: its digest.
        traced: whether there was a trace; without one only metadata is here.
        ranges: ranges asked for.
        left: blocks that were not here when the time was over.
        failed: blocks that could not be fetched.
    """

    image: str
    traced: bool
    ranges: int = 0
    left: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Prefetcher:
    """Traces of one local store's images."""

    store: ImageStore

    def record(self, image: Image, *, seconds: float) -> None:
        """Record what is read of an image from now on; it has to be one whose data comes from another store.

        Raises:
            ImageError: ``unsupported`` when all its data was imported here, so that nothing of it is ever fetched.
        """
        lazy, layers = LazyBlobs(self.store), self._layers(image)
        if not layers:
            raise ImageError("unsupported", "the data of this image was imported here", "record a pulled one", "ref")
        for layer in layers:
            lazy.attach(layer, record_s=seconds)

    def collect(self, image: Image) -> Trace:
        """What was recorded so far, in order of time; the trace is kept here."""
        client = LazyBlobs(self.store).server()
        rows = [
            (at, layer.blob.digest, offset, length)
            for layer in self._layers(image)
            for at, offset, length in client.trace(layer.blob.digest)
        ]
        trace = Trace(image=image.digest, accesses=tuple(sorted(rows))[:MAX_ACCESSES])
        path = self._path(image)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_durably(path, trace.render())
        return trace

    def publish(self, trace: Trace, url: str, *, authfile: str = "") -> None:
        """Put a trace beside its image in a shared store; raises StoreError."""
        there = parse_store(url, authfile=authfile)
        try:
            there.put_trace(digest_hex(trace.image), trace.render(), deadline=time.monotonic() + _STORE_TIMEOUT_S)
        finally:
            there.close()

    def trace_of(self, image: Image) -> Trace | None:
        """The trace kept here, else the one beside the image in the store it came from, which is then kept."""
        path = self._path(image)
        if path.exists():
            return Trace.parse(path.read_bytes(), image.digest)
        for origin in {self._origin(layer) for layer in self._layers(image)}:
            there = PatientStore(store=parse_store(origin.store, authfile=origin.authfile))
            try:
                raw = there.get_trace(digest_hex(image.digest), deadline=time.monotonic() + _STORE_TIMEOUT_S)
            except StoreError as err:
                if err.code != "not_found":
                    raise
                continue
            finally:
                there.close()
            trace = Trace.parse(raw, image.digest)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_durably(path, raw)
            return trace
        return None

    def replay(self, images: Sequence[Image], *, timeout_s: float, whole: bool = False) -> list[Prefetched]:
        """Fetch what the traces of images name, all at once in the background, and wait for it.

        Args:
            images: the first ones are fetched first.
            timeout_s: how long to wait; what is left then is still fetched.
            whole: everything, not only what the traces name.
        """
        deadline = time.monotonic() + timeout_s
        lazy = LazyBlobs(self.store)
        wanted: list[tuple[Image, bool, dict[str, list[tuple[int, int]]]]] = []
        for number, image in enumerate(images):
            layers = {layer.blob.digest: layer for layer in self._layers(image)}
            trace = None if whole else self.trace_of(image)
            ranges: dict[str, list[tuple[int, int]]] = {}
            if whole:
                ranges = {blob: [(0, layer.blob.size)] for blob, layer in layers.items()}
            for _, blob, offset, length in trace.accesses if trace is not None else ():
                if blob in layers and offset < layers[blob].blob.size and length:
                    ranges.setdefault(blob, []).append((offset, min(length, layers[blob].blob.size - offset)))
            for blob, runs in ranges.items():
                lazy.attach(layers[blob])
                lazy.server().prefetch(blob, runs, priority=min(100, 10 + number))
            wanted.append((image, whole or trace is not None, ranges))
        return [self._wait(image, traced, ranges, deadline) for image, traced, ranges in wanted]

    def _wait(
        self, image: Image, traced: bool, ranges: dict[str, list[tuple[int, int]]], deadline: float
    ) -> Prefetched:
        result = Prefetched(image=image.digest, traced=traced)
        for blob, runs in ranges.items():
            left_s = max(0.0, deadline - time.monotonic())
            answer = LazyBlobs(self.store).server().prefetch(blob, runs, wait_s=left_s)
            result = replace(
                result, ranges=result.ranges + len(runs), left=result.left + answer["left"],
                failed=result.failed + answer["failed"],
            )  # fmt: skip
        return result

    def _layers(self, image: Image) -> list[Layer]:
        """The layers whose data comes from another store, each blob once."""
        unique = {layer.blob.digest: layer for layer in self.store.layers(image) if layer.blob.size}
        return [layer for blob, layer in unique.items() if self.store.objects.origin(blob) is not None]

    def _origin(self, layer: Layer) -> Origin:
        origin = self.store.objects.origin(layer.blob.digest)
        assert origin is not None
        return replace(origin, wire="")

    def _path(self, image: Image) -> Path:
        return self.store.root / "traces" / digest_hex(image.digest)


def as_data(result: Prefetched) -> dict[str, object]:
    """For printing."""
    return asdict(result)
