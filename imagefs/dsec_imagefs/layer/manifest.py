"""The two manifests, of a layer and of an image, as canonical JSON: equal content, equal bytes, equal digest. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from dsec_imagefs.errors import ImageError
from dsec_imagefs.image import ImageConfig
from dsec_imagefs.layer.index import Encoding

VERSION = 1
_HEX = re.compile(r"[0-9a-f]{64}")
_LAYER_KEYS = {"version", "meta", "blob", "index", "wire", "diff_id", "entries", "notes"}
_IMAGE_KEYS = {"version", "config", "layers", "merged", "created", "source", "imported", "entries", "notes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stored object: sha256 of its bytes in hex, and their count."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The blob as it lies in a store; with encoding ``raw`` it is the blob itself, of the same digest."""

    digest: str
    size: int
    encoding: Encoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer's manifest.

    Attributes:
        meta: EROFS metadata with the layer's own marks, see `dsec_imagefs.layer.entries`.
        blob: file data, every file on a 4 KiB boundary; size 0 for a layer without data.
        index: the block index of the blob.
        wire: what is stored of the blob.
        diff_id: ``sha256:<hex>`` of the uncompressed tar it was made from, or "".
        entries: how many entries it has, whiteouts counted.
        notes: what was left out or changed, each a sentence.
    """

    meta: Part
    blob: Part
    index: Part
    wire: Wire
    diff_id: str = ""
    entries: int = 0
    notes: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Sha256 of the manifest, hex: what an image names the layer by."""
        return hashlib.sha256(self.render()).hexdigest()

    def render(self) -> bytes:
        """The manifest's bytes."""
        return canonical(asdict(self) | {"version": VERSION})

    @classmethod
    def parse(cls, raw: bytes, where: str = "layer manifest") -> Layer:
        """Read a manifest; raises ImageError ``corrupt`` (``unsupported`` for another version)."""
        found = _document(raw, where, _LAYER_KEYS)
        try:
            parts = {key: _part(found[key]) for key in ("meta", "blob", "index")}
            wire = found["wire"]
            encoding = _text(wire["encoding"])
            if encoding not in get_args(Encoding):
                raise ImageError("unsupported", f"{where} has a blob encoded as {encoding!r}", "upgrade nomad-dsec")
            of = _part({key: wire[key] for key in wire if key != "encoding"})
            return cls(
                **parts, wire=Wire(digest=of.digest, size=of.size, encoding=encoding),  # type: ignore[arg-type]
                diff_id=_text(found["diff_id"]), entries=_count(found["entries"]), notes=_texts(found["notes"]),
            )  # fmt: skip
        except (TypeError, KeyError, ValueError) as err:
            raise _bad(where, err) from err


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageManifest:
    """An image: its layers' ids from the lowest up, and the one metadata image that is mounted over their blobs.

    Attributes:
        layers: ids of layer manifests, lowest first.
        merged: metadata of the whole stack; its device table names the blobs it needs, in mount order.
        config: what a program started from the image gets.
        created: RFC 3339 time of the build as the source says, or "".
        source: what it was made from, without credentials.
        imported: RFC 3339 time of the import, or "".
        entries: inodes in the merged tree.
        notes: what was left out or changed, each a sentence.
    """

    layers: tuple[str, ...]
    merged: Part
    config: ImageConfig = field(default_factory=ImageConfig)
    created: str = ""
    source: str = ""
    imported: str = ""
    entries: int = 0
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Sha256 over layers and configuration, hex: the same after every import of the same content."""
        return hashlib.sha256(canonical({"config": asdict(self.config), "layers": self.layers})).hexdigest()

    def render(self) -> bytes:
        """The manifest's bytes."""
        return canonical(asdict(self) | {"version": VERSION})

    @classmethod
    def parse(cls, raw: bytes, where: str = "image manifest") -> ImageManifest:
        """Read a manifest; raises ImageError ``corrupt`` (``unsupported`` for another version)."""
        found = _document(raw, where, _IMAGE_KEYS)
        try:
            config = dict(found["config"])
            for key in ("env", "entrypoint", "cmd"):
                config[key] = _texts(config[key])
            layers = _texts(found["layers"])
            for layer in layers:
                _hex(layer)
            return cls(
                layers=layers, merged=_part(found["merged"]), config=ImageConfig(**config),
                created=_text(found["created"]), source=_text(found["source"]), imported=_text(found["imported"]),
                entries=_count(found["entries"]), notes=_texts(found["notes"]),
            )  # fmt: skip
        except (TypeError, KeyError, ValueError) as err:
            raise _bad(where, err) from err


def canonical(document: dict[str, Any]) -> bytes:
    """One JSON spelling: keys sorted, no spaces, ASCII (lone surrogates of odd file names stay escaped)."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def _document(raw: bytes, where: str, keys: set[str]) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as err:
        raise _bad(where, err) from err
    if not isinstance(found, dict):
        raise ImageError("corrupt", f"{where} is no JSON object")
    if found.get("version") != VERSION:
        raise ImageError("unsupported", f"{where} is of version {found.get('version')!r}", "upgrade nomad-dsec")
    if set(found) != keys:
        odd = ", ".join(sorted(set(found) ^ keys))
        raise ImageError("corrupt", f"{where} lacks or does not know: {odd}")
    return found


def _part(found: dict[str, Any]) -> Part:
    if set(found) != {"digest", "size"}:
        raise ValueError("an object is named by digest and size")
    return Part(digest=_hex(found["digest"]), size=_count(found["size"]))


def _hex(value: Any) -> str:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ValueError(f"{str(value)[:80]!r} is no sha256 in hex")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:80]!r} is no count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:80]!r} is no text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError("a list of texts is wanted")
    return tuple(_text(one) for one in value)


def _bad(where: str, err: Exception) -> ImageError:
    return ImageError("corrupt", f"{where} can't be read: {err}", "publish or import it again")
