"""Source strings: which kind of source is meant, by its prefix or by looking at the path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.sources.debootstrap import parse_debootstrap
from dsec_imagefs.sources.directory import DirectorySource

if TYPE_CHECKING:
    from dsec_imagefs.sources.base import Source

KINDS = ("dir:", "oci:", "docker-archive:", "docker://", "docker-daemon:", "debootstrap:")


def parse_source(text: str) -> Source:
    """Turn a source string into a source; raises ImageError ``bad_source`` naming the kinds there are."""
    if text.startswith("debootstrap:"):
        return parse_debootstrap(text.removeprefix("debootstrap:"))
    if text.startswith("dir:"):
        return DirectorySource(path=text.removeprefix("dir:"))
    raise ImageError("bad_source", f"{text!r} is no image source", f"one of {', '.join(KINDS)}", "source")
