"""The way of an import: open the source, make each of its layers (or find it made), merge, publish, remember."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dsec_imagefs.blob import Blob
from dsec_imagefs.durable import locked
from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import Image, normal_name
from dsec_imagefs.kept import keep_build, kept_build
from dsec_imagefs.layer.build import build_layer
from dsec_imagefs.layer.compose import compose_image
from dsec_imagefs.sources.base import LayerSource, Limits, Material, Source, Work
from dsec_imagefs.sources.parse import parse_source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from dsec_imagefs.image import ImageConfig
    from dsec_imagefs.layer.manifest import ImageManifest, Layer
    from dsec_imagefs.store import ImageStore
    from dsec_imagefs.tree import Node, Progress

_SAME_BUILD_WAIT_S = 3600.0
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Importer:
    """Runs imports into one store."""

    store: ImageStore
    limits: Limits

    def run(self, source: str, name: str | None, *, progress: Progress | None, refresh: bool, authfile: str) -> Image:
        """Do one import; see `ImageStore.import_image`."""
        if name is not None:
            normal_name(name)
        chosen = parse_source(source, authfile=authfile)
        self.store.scratch.sweep()
        with self.store.scratch.directory() as tmp:
            work = Work(tmp=tmp, cache=self.store.root / "cache", limits=self.limits, report=progress)
            files = tmp / "files"
            files.mkdir(mode=0o700)
            key = chosen.cache_key
            # Two imports of one slow build: the second waits and takes the first one's result.
            gate: AbstractContextManager[None] = nullcontext()
            if key:
                builds = work.cache / "roots"
                builds.mkdir(mode=0o700, exist_ok=True)
                gate = locked(builds / f"{key}.lock", timeout_s=_SAME_BUILD_WAIT_S)
            with gate:
                found = kept_build(builds, key, files) if key and not refresh else None
                if found is None:
                    found = self._build(chosen, work, files)
                    if key:
                        keep_build(builds, key, *found, files)
            manifest, layers = found
            work.progress("publish", 0, 1)
            published = self.store.publish(replace(manifest, imported=_now()), layers, files, name)
            work.progress("publish", 1, 1)
            return published

    def _build(self, source: Source, work: Work, files: Path) -> tuple[ImageManifest, list[Layer]]:
        with source.open(work) as material:
            layers = self._layers(material, work, files)
        return stack_layers(
            layers, files, config=material.config, created=material.created, source=source.label, work=work
        ), layers  # fmt: skip

    def _layers(self, material: Material, work: Work, files: Path) -> list[Layer]:
        made: dict[str, Layer] = {}
        layers, left_bytes, left_files = [], self.limits.max_unpacked_bytes, self.limits.max_files
        for source in material.layers:
            layer = made.get(source.diff_id) or self._known(source.diff_id, files)
            if layer is None:
                # The limits are those of the whole image: each layer may have what the lower ones left.
                limits = replace(self.limits, max_unpacked_bytes=left_bytes, max_files=left_files)
                layer = self._make(source, replace(work, limits=limits), files)
            else:
                for note in layer.notes:
                    work.note(note)
            left_bytes, left_files = left_bytes - layer.blob.size, left_files - layer.entries
            if left_bytes < 0 or left_files < 0:
                raise ImageError("too_large", "the layers together are beyond the limits", "slim the image", "source")
            if source.diff_id:
                made[source.diff_id] = layer
            layers.append(layer)
        return layers

    def _known(self, diff_id: str, files: Path) -> Layer | None:
        """The layer that was made of this tar before, its files linked into `files`: no collection can take them."""
        if not diff_id:
            return None
        objects = self.store.objects
        with self.store.exclusive():
            layer_id = objects.layer_of(diff_id)
            if layer_id is None:
                return None
            try:
                layer = self.store.layer(layer_id)
            except ImageError:  # damaged: it is made anew, under the same name when the damage is gone
                return None
            data = layer.blob
            if data.size and not (
                objects.has_whole_blob(data.digest, data.size) and objects.link(data.digest, files, blob=True)
            ):
                return None
            needed = [layer.meta.digest, layer.index.digest, layer.id]
            if data.size and layer.wire.digest != data.digest:
                needed.append(layer.wire.digest)
            return layer if all(objects.link(digest, files) for digest in needed) else None

    def _make(self, source: LayerSource, work: Work, files: Path) -> Layer:
        with ExitStack() as stack:
            content = source.open(stack)
            if isinstance(content, Blob):
                self._check_room(content.size, files)
            else:
                self._check_room(_size_of(content), files)
            return build_layer(
                content, files, limits=work.limits, progress=work.report, note=work.note, diff_id=source.diff_id
            )  # fmt: skip

    def _check_room(self, size: int, files: Path) -> None:
        disk = os.statvfs(files)
        free = disk.f_bavail * disk.f_frsize
        if size + _SPARE_BYTES > free:
            raise ImageError(
                "no_space",
                f"the layer takes {size >> 20} MiB and {self.store.root} has {free >> 20} MiB free",
                "free some disk, or run gc",
            )


def stack_layers(
    layers: Sequence[Layer],
    files: Path,
    *,
    config: ImageConfig,
    created: str,
    source: str,
    work: Work,
    imported: str = "",
) -> ImageManifest:
    """Merge layers whose metadata lies in `files` (named by digest), and write the merged metadata beside it."""
    work.progress("merge", 0, 1)
    stack = [(layer, files / layer.meta.digest) for layer in layers]
    manifest = compose_image(
        stack, files, config=config, created=created, source=source, imported=imported, notes=work.notes
    )  # fmt: skip
    work.progress("merge", 1, 1)
    return manifest


def _size_of(root: Node) -> int:
    """Bytes of data in a tree, holes left out."""
    total, todo = 0, [root]
    while todo:
        for child in todo.pop().children.values():
            if child.is_dir:
                todo.append(child)
            elif child.fmt == stat.S_IFREG:
                runs = child.content.extents
                total += child.content.size if runs is None else sum(length for _, length in runs)
    return total


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
