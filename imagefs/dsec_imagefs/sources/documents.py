"""The JSON documents of images: descriptors, manifests, indexes and configurations, checked as they are read. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import ImageConfig

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_LAYER_TYPE = re.compile(
    r"application/vnd\.(?:oci\.image\.layer(?:\.nondistributable)?\.v1\.tar(?:\+gzip|\+zstd)?"
    r"|docker\.image\.rootfs\.(?:diff|foreign\.diff)\.tar(?:\.gzip|\.zstd)?)"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "riscv64": "riscv64", "ppc64le": "ppc64le", "s390x": "s390x"}

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """What a manifest says of a blob; `size` is -1 when it says nothing."""

    digest: str
    size: int
    media_type: str

    @property
    def path(self) -> str:
        """Where an OCI layout keeps it."""
        return f"blobs/{self.digest.replace(':', '/')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDocument:
    """What an image's configuration document says."""

    config: ImageConfig
    created: str
    diff_ids: tuple[str, ...]


def parse_document(raw: bytes, what: str) -> Document:
    """JSON with an object at the top; raises ImageError ``bad_image``."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as err:
        raise ImageError("bad_image", f"{what} is no JSON: {err}", field="source") from err
    if not isinstance(found, dict):
        raise ImageError("bad_image", f"{what} is no JSON object", field="source")
    return found


def parse_descriptor(value: object, what: str) -> Descriptor:
    """One descriptor; raises ImageError ``bad_image`` for what can't name a blob."""
    found = value if isinstance(value, dict) else {}
    digest, size, kind = found.get("digest"), found.get("size", -1), found.get("mediaType", "")
    # The digest becomes a path below, so its form is not a matter of taste.
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest) or not isinstance(size, int):
        raise ImageError("bad_image", f"{what} has no proper digest and size", field="source")
    return Descriptor(digest=digest, size=size, media_type=str(kind))


def manifest_parts(document: Document) -> tuple[Descriptor, tuple[Descriptor, ...]]:
    """Configuration and layers of a manifest; raises ImageError for artifacts that are no container images."""
    if document.get("schemaVersion") == 1:
        raise ImageError(
            "unsupported", "a version 1 Docker manifest", "convert it with skopeo or push it anew", "source"
        )
    config = parse_descriptor(document.get("config"), "the manifest's config")
    rows = document.get("layers")
    if not isinstance(rows, list):
        raise ImageError("bad_image", "the manifest has no list of layers", field="source")
    layers = tuple(parse_descriptor(row, f"layer {number}") for number, row in enumerate(rows, start=1))
    for number, layer in enumerate(layers, start=1):
        if not _LAYER_TYPE.fullmatch(layer.media_type):
            raise ImageError(
                "unsupported", f"layer {number} is of type {layer.media_type!r}", "only tar layers are images", "source"
            )
    return config, layers


def choose_manifest(index: Document, machine: str, what: str, tag: str = "") -> Descriptor:
    """Pick from an index: the tag if one is named, then this machine's platform, then the only one there is.

    Raises:
        ImageError: ``not_found`` or ``ambiguous``, naming what there is.
    """
    rows = [row for row in index.get("manifests") or [] if isinstance(row, dict)]
    names = [str((row.get("annotations") or {}).get("org.opencontainers.image.ref.name", "")) for row in rows]
    if tag:
        rows = [row for row, name in zip(rows, names, strict=True) if name == tag or name.endswith(f":{tag}")]
        if not rows:
            known = ", ".join(sorted(filter(None, names))) or "none"
            raise ImageError("not_found", f"{what} has no tag {tag!r}", f"tags there: {known}", "source")
    # Attestations sit in the same list, with a platform nobody has.
    rows = [row for row in rows if (row.get("platform") or {}).get("os", "linux") == "linux"]
    if len(rows) > 1:
        wanted = _ARCHITECTURES.get(machine, machine)
        mine = [row for row in rows if (row.get("platform") or {}).get("architecture") == wanted]
        rows = mine[:1] if mine and all(row.get("platform") for row in mine) else rows
    if len(rows) != 1:
        known = ", ".join(sorted(filter(None, names))) or f"{len(rows)} manifests for linux"
        code = "ambiguous" if rows else "not_found"
        raise ImageError(code, f"{what} has no single image for this machine", f"choose a tag: {known}", "source")
    return parse_descriptor(rows[0], f"an entry of {what}")


def parse_config(raw: bytes) -> ConfigDocument:
    """An OCI or Docker image configuration; absent fields are empty, wrong ones are errors naming the field."""
    document = parse_document(raw, "the image configuration")
    inner = document.get("config") or {}
    rootfs = document.get("rootfs") or {}
    if not isinstance(inner, dict) or not isinstance(rootfs, dict):
        raise ImageError("bad_image", "the image configuration's config or rootfs is no object", field="source")
    labels = inner.get("Labels") or {}
    if not isinstance(labels, dict):
        raise ImageError("bad_image", "the image configuration's Labels is no object", field="source")
    config = ImageConfig(
        env=_strings(inner, "Env"),
        cwd=str(inner.get("WorkingDir") or "/"),
        user=str(inner.get("User") or ""),
        entrypoint=_strings(inner, "Entrypoint"),
        cmd=_strings(inner, "Cmd"),
        labels={str(key): str(value) for key, value in labels.items()},
        stop_signal=str(inner.get("StopSignal") or ""),
        architecture=str(document.get("architecture") or ""),
    )
    return ConfigDocument(
        config=config, created=str(document.get("created") or ""), diff_ids=_strings(rootfs, "diff_ids")
    )  # fmt: skip


def _strings(document: Document, key: str) -> tuple[str, ...]:
    value = document.get(key) or []
    if isinstance(value, str):  # very old Docker images
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ImageError("bad_image", f"the image configuration's {key} is no list of strings", field="source")
    return tuple(value)
