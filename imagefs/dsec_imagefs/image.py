"""What the store tells of an image: identity, configuration, facts and names. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsec_imagefs.layer.manifest import ImageManifest, Layer

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._/@-]{0,150}(?::[a-zA-Z0-9_][a-zA-Z0-9._-]{0,60})?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HEX_PREFIX = re.compile(r"[0-9a-f]{6,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """What a program started from the image gets unless the caller says otherwise. `env` holds ``KEY=value``."""

    env: tuple[str, ...] = ()
    cwd: str = "/"
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    stop_signal: str = ""
    architecture: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One stored image: layers, the metadata merged over them, a configuration.

    Attributes:
        digest: ``sha256:<hex>`` over the layers' ids and the configuration: equal content, equal digest.
        rootfs: ``sha256:<hex>`` of the merged metadata; images that differ only in configuration share it.
        layers: ``sha256:`` ids of the layers, lowest first.
        diff_ids: digests of the source's layer tars in the same order, "" for a layer made of a tree.
        names: the references ``name:tag`` that point here now.
        source: what it was imported from, without credentials.
        created: RFC 3339 time of the build as the source says, or "".
        imported: RFC 3339 time of the import.
        size_bytes: length of the data of all layers and of the merged metadata; shared layers count in each image.
        files: inodes in the merged tree.
        notes: what was left out or changed, each a sentence.
    """

    digest: str
    rootfs: str
    config: ImageConfig
    source: str
    layers: tuple[str, ...] = ()
    diff_ids: tuple[str, ...] = ()
    created: str = ""
    imported: str = ""
    size_bytes: int = 0
    files: int = 0
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


def image_of(manifest: ImageManifest, layers: Sequence[Layer], names: tuple[str, ...] = ()) -> Image:
    """The view of an image that callers get, from its manifest and those of its layers."""
    blobs = {layer.blob.digest: layer.blob.size for layer in layers}
    return Image(
        digest=f"sha256:{manifest.digest}",
        rootfs=f"sha256:{manifest.merged.digest}",
        config=manifest.config,
        source=manifest.source,
        layers=tuple(f"sha256:{layer}" for layer in manifest.layers),
        diff_ids=tuple(layer.diff_id for layer in layers),
        created=manifest.created,
        imported=manifest.imported,
        size_bytes=sum(blobs.values()) + manifest.merged.size,
        files=manifest.entries,
        notes=manifest.notes,
        names=names,
    )


def normal_name(name: str, field_name: str = "name") -> str:
    """``name`` or ``name:tag`` -> ``name:tag``, the tag ``latest`` by default; raises ImageError ``bad_name``."""
    if not _NAME.fullmatch(name) or ".." in name or "//" in name or name.endswith("/"):
        raise ImageError(
            "bad_name",
            f"{name!r} is no image name",
            "letters, digits and . _ - / with an optional :tag, at most 150 + 60 characters",
            field_name,
        )
    if _DIGEST.fullmatch(name):
        raise ImageError("bad_name", "an image can't be named like a digest", "choose another name", field_name)
    return name if ":" in name else f"{name}:latest"


def digest_hex(digest: str, field_name: str = "digest") -> str:
    """The hex of ``sha256:<hex>``; raises ImageError ``bad_name`` for anything else."""
    if not _DIGEST.fullmatch(digest):
        raise ImageError("bad_name", f"{digest!r} is no digest", "it looks like sha256:<64 hex digits>", field_name)
    return digest.removeprefix("sha256:")


def hex_prefix(ref: str) -> str | None:
    """The hex digits when a reference may be a (shortened) digest, else None."""
    text = ref.removeprefix("sha256:")
    return text if _HEX_PREFIX.fullmatch(text) else None
