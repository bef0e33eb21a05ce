"""Layers made and merged in a directory, and read back through their blobs."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.layer import Layer, Merged, build_layer, merge_layers

from tests.kit import tarbytes as t
from tests.kit.trees import Facts, image_facts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dsec_imagefs.erofs.reader import ReadAt


@contextmanager
def memory_file() -> Iterator[int]:
    """A descriptor of a file that is nowhere."""
    fd = os.memfd_create("image")
    try:
        yield fd
    finally:
        os.close(fd)


def build(tars: Sequence[bytes], out: Path, **options: object) -> list[Layer]:
    """A layer of each tar."""
    layers = []
    for number, data in enumerate(tars, start=1):
        with t.blob_of(data, f"layer {number}") as blob:
            layers.append(build_layer(blob, out, **options))  # type: ignore[arg-type]
    return layers


def merge(layers: Sequence[Layer], out: Path) -> Merged:
    """Merge layers whose files are in a directory."""
    return merge_layers([(layer, out / layer.meta.digest) for layer in layers])


def merged_facts(merged: Merged, out: Path) -> Facts:
    """What our reader says of a merged image over its blobs."""
    with ExitStack() as stack:
        fd = os.memfd_create("meta")
        stack.callback(os.close, fd)
        os.write(fd, merged.metadata)
        return image_facts(fd, {blob: _reader(out / blob, stack) for blob in merged.devices})


def _reader(path: Path, stack: ExitStack) -> ReadAt:
    fd = os.open(path, os.O_RDONLY)
    stack.callback(os.close, fd)
    return lambda offset, count: os.pread(fd, count, offset)


def outcome(tars: Sequence[bytes], out: Path) -> Facts | str:
    """The facts of a stack, or the code of the error it is."""
    try:
        return merged_facts(merge(build(tars, out), out), out)
    except ImageError as err:
        return err.code
