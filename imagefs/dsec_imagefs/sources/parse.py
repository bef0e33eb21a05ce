"""Source strings: which kind of source is meant, by its prefix or by looking at the path."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.sources.archive import ArchiveSource
from dsec_imagefs.sources.debootstrap import parse_debootstrap
from dsec_imagefs.sources.directory import DirectorySource
from dsec_imagefs.sources.engine import EngineSource
from dsec_imagefs.sources.layertar import LayerTarSource
from dsec_imagefs.sources.registry import RegistrySource, check_ref

if TYPE_CHECKING:
    from dsec_imagefs.sources.base import Source

KINDS = ("dir:", "tar:", "oci:", "docker-archive:", "docker://", "docker-daemon:", "debootstrap:")


def parse_source(text: str, *, authfile: str = "") -> Source:
    """Turn a source string into a source; raises ImageError ``bad_source`` naming the kinds there are."""
    kind, _, rest = text.partition(":")
    if not text or "\0" in text:
        raise ImageError("bad_source", "the source is empty or has a NUL byte", f"one of {', '.join(KINDS)}", "source")
    if kind == "debootstrap":
        return parse_debootstrap(rest)
    if kind == "docker" and rest.startswith("//"):
        return RegistrySource(ref=check_ref(rest.removeprefix("//")), authfile=authfile)
    if kind == "docker-daemon":
        return EngineSource(ref=check_ref(rest))
    if kind == "dir":
        return DirectorySource(path=rest)
    if kind == "tar":
        return LayerTarSource(path=rest)
    if kind in ("oci", "docker-archive"):
        path, ref = _split_ref(rest)
        return ArchiveSource(kind=kind, path=path, ref=ref)
    return _by_looking(text)


def _split_ref(text: str) -> tuple[str, str]:
    """``PATH[:REF]``: a path that exists as it stands is a path, colons and all; a REF may itself have a colon."""
    if os.path.exists(text):  # noqa: PTH110  (a question to the host, not a path to handle)
        return text, ""
    at = text.find(":")
    while at > 0:
        if os.path.exists(text[:at]):  # noqa: PTH110
            return text[:at], text[at + 1 :]
        at = text.find(":", at + 1)
    return text, ""


def _by_looking(text: str) -> Source:
    if os.path.isfile(text):  # noqa: PTH113
        return ArchiveSource(kind="docker-archive", path=text)
    if os.path.isfile(os.path.join(text, "oci-layout")):  # noqa: PTH113
        return ArchiveSource(kind="oci", path=text)
    if os.path.isdir(text):  # noqa: PTH112
        return DirectorySource(path=text)
    raise ImageError(
        "bad_source", f"{text!r} is no image source and no path here", f"a path or one of {', '.join(KINDS)}", "source"
    )
