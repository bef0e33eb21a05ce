"""An image as an OCI artifact: the manifest that keeps its objects alive in a registry, and its tags. Pure.

The manifest's config is our image manifest, its layers are the image's objects; an annotation holds the image's digest.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from dsec_imagefs.stores.base import StoredObject, StoreError, escape_name, plain_hex, unescape_name

if TYPE_CHECKING:
    from collections.abc import Sequence

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
IMAGE_TYPE = "application/vnd.nomad-dsec.image.v1+json"
TRACE_TYPE = "application/vnd.nomad-dsec.trace.v1"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
IMAGE_KEY = "org.nomad-dsec.image"
MAX_ARTIFACT_BYTES = 4 << 20  # what registries take


def image_tag(image: str) -> str:
    """The tag of an image by its digest; no escaped name looks like it, since names always hold a tag."""
    return f"image-{plain_hex(image)}"


def trace_tag(image: str) -> str:
    """The tag of an image's trace."""
    return f"trace-{plain_hex(image)}"


def name_tag(name: str) -> str:
    """The tag of a name; raises StoreError ``bad_name`` also for names that would pass for one of ours."""
    tag = escape_name(name)
    if tag.startswith(("image-", "trace-")) and ":" not in name:
        raise StoreError("bad_name", f"{name!r} is reserved in a registry", "give it a tag: NAME:TAG", "name")
    return tag


def tag_name(tag: str) -> str | None:
    """The image name of a tag, or None for tags that are none."""
    name = unescape_name(tag)
    if name is None or (tag.startswith(("image-", "trace-")) and ":" not in name):
        return None
    return name


def render_image(image: str, manifest: bytes, objects: Sequence[StoredObject]) -> bytes:
    """The artifact of an image; equal images give equal bytes."""
    unique = {item.digest: item for item in objects}
    layers = [
        _descriptor(f"application/vnd.nomad-dsec.{item.kind}.v1", plain_hex(item.digest), item.size)
        for item in unique.values()
    ]
    config = _descriptor(IMAGE_TYPE, hashlib.sha256(manifest).hexdigest(), len(manifest))
    return _render(IMAGE_TYPE, config, layers, image)


def render_trace(image: str, trace: bytes) -> bytes:
    """The artifact of a trace."""
    config = _descriptor(EMPTY_TYPE, hashlib.sha256(EMPTY).hexdigest(), len(EMPTY))
    return _render(TRACE_TYPE, config, [_descriptor(TRACE_TYPE, hashlib.sha256(trace).hexdigest(), len(trace))], image)


def parse_image(raw: bytes, where: str) -> tuple[str, StoredObject]:
    """The image's digest and its manifest's blob; raises StoreError ``bad_reply`` for other artifacts."""
    found, image = _parse(raw, where)
    return image, _object(found.get("config"), IMAGE_TYPE, "image", where)


def parse_trace(raw: bytes, where: str) -> tuple[str, StoredObject]:
    """The image's digest and the trace's blob."""
    found, image = _parse(raw, where)
    layers = found.get("layers")
    if not isinstance(layers, list) or len(layers) != 1:
        raise StoreError("bad_reply", f"{where} holds no trace")
    return image, _object(layers[0], TRACE_TYPE, "trace", where)


def _render(kind: str, config: dict[str, Any], layers: list[dict[str, Any]], image: str) -> bytes:
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": kind,
        "config": config,
        "layers": layers,
        "annotations": {IMAGE_KEY: plain_hex(image)},
    }
    raw = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
    if len(raw) > MAX_ARTIFACT_BYTES:
        raise StoreError("too_large", f"the artifact has {len(raw)} bytes; registries take {MAX_ARTIFACT_BYTES}")
    return raw


def _descriptor(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": size}


def _parse(raw: bytes, where: str) -> tuple[dict[str, Any], str]:
    try:
        found: dict[str, Any] = json.loads(raw)
        return found, plain_hex(str(found["annotations"][IMAGE_KEY]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StoreError) as error:
        raise StoreError("bad_reply", f"{where} is no image of nomad-dsec", "push it with dsec image push") from error


def _object(found: Any, kind: str, shown: str, where: str) -> StoredObject:
    try:
        if found["mediaType"] != kind or type(found["size"]) is not int or found["size"] < 0:
            raise StoreError("bad_reply", f"{where}: its {shown} is described wrongly")
        return StoredObject(digest=plain_hex(str(found["digest"])), size=found["size"], kind=shown)
    except (TypeError, KeyError, StoreError) as error:
        raise StoreError("bad_reply", f"{where}: its {shown} is described wrongly") from error
