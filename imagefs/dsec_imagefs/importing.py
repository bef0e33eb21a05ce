"""The way of an import: open the source, plan the image, write and hash it, publish it, remember it in the cache."""

from __future__ import annotations

import os
import stat
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dsec_imagefs.durable import locked, sync_directory, write_durably
from dsec_imagefs.erofs.layout import Layout, plan_layout
from dsec_imagefs.erofs.writer import write_image
from dsec_imagefs.errors import ImageError, show_name
from dsec_imagefs.image import Image, image_digest, normal_name, parse_record, render_record
from dsec_imagefs.sources.base import Limits, Source, Work
from dsec_imagefs.sources.parse import parse_source

if TYPE_CHECKING:
    from pathlib import Path

    from dsec_imagefs.store import ImageStore
    from dsec_imagefs.tree import Node, Progress

CACHE_MAX_AGE_S = 30 * 86400.0  # older roots are built anew: distributions ship security fixes
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
            key = chosen.cache_key
            roots = work.cache / "roots"
            roots.mkdir(mode=0o700, exist_ok=True)
            # Two imports of one slow build: the second waits and takes the first one's result.
            gate = locked(roots / f"{key}.lock", timeout_s=_SAME_BUILD_WAIT_S) if key else nullcontext()
            with gate:
                image = self._cached(chosen, work) if key and not refresh else None
                if image is None:
                    image = self._build(chosen, work)
                    if key:
                        _remember(roots, key, image, tmp / "image.erofs")
            work.progress("publish", 0, 1)
            published = self.store.publish(image, tmp / "image.erofs", name)
            work.progress("publish", 1, 1)
            return published

    def _build(self, source: Source, work: Work) -> Image:
        with source.open(work) as material:
            work.progress("plan", 0, 1)
            _note_hidden(material.root, work)
            layout = plan_layout(material.root)
            self._check_room(layout, work.tmp)
            fd = os.open(work.tmp / "image.erofs", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                written = write_image(layout, fd, work.report)
                work.progress("sync", 0, 1)
                os.fsync(fd)
            finally:
                os.close(fd)
        rootfs = f"sha256:{written.digest}"
        return Image(
            digest=image_digest(rootfs, material.config),
            rootfs=rootfs,
            config=material.config,
            source=source.label,
            created=material.created,
            imported=_now(),
            size_bytes=written.size_bytes,
            files=written.inodes,
            layers=material.layers,
            notes=tuple(work.notes),
        )

    def _check_room(self, layout: Layout, tmp: Path) -> None:
        if layout.size_bytes > self.limits.max_unpacked_bytes:
            raise ImageError(
                "too_large",
                f"the image would take {layout.size_bytes} bytes, the limit is {self.limits.max_unpacked_bytes}",
                "raise the limit or slim the image",
                "source",
            )
        disk = os.statvfs(tmp)
        free = disk.f_bavail * disk.f_frsize
        if layout.size_bytes + _SPARE_BYTES > free:
            raise ImageError(
                "no_space",
                f"the image takes {layout.size_bytes >> 20} MiB and {self.store.root} has {free >> 20} MiB free",
                "free some disk, or run gc",
            )

    def _cached(self, source: Source, work: Work) -> Image | None:
        record = work.cache / "roots" / f"{source.cache_key}.json"
        blob = record.with_suffix(".erofs")
        try:
            age_s = datetime.now(UTC).timestamp() - record.stat().st_mtime
            image = parse_record(record.read_bytes(), str(record))
            if age_s > CACHE_MAX_AGE_S or blob.stat().st_size != image.size_bytes:
                return None
            (work.tmp / "image.erofs").hardlink_to(blob)
        except FileNotFoundError:
            return None
        return replace(image, imported=_now())


def _note_hidden(root: Node, work: Work) -> None:
    """Name what the image keeps and a container can't show: to overlayfs a device 0:0 is a whiteout (overlayfs.rst)."""
    todo = [(b"", root)]
    while todo:
        path, directory = todo.pop()
        for name, child in directory.children.items():
            if child.is_dir:
                todo.append((path + name + b"/", child))
            elif child.fmt == stat.S_IFCHR and child.device == (0, 0):
                work.note(f"{show_name(path + name)}: a device 0:0 is kept, but overlayfs hides it from containers")


def _remember(roots: Path, key: str, image: Image, blob: Path) -> None:
    """Keep the finished root as a second link to its file: no copy, and a later `rm` of the image spares it."""
    kept = roots / f"{key}.erofs"
    kept.unlink(missing_ok=True)
    kept.hardlink_to(blob)
    sync_directory(roots)
    write_durably(roots / f"{key}.json", render_record(image))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
