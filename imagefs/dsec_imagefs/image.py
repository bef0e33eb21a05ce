"""What the store knows of an image: its identity, configuration and facts, and their JSON form. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from dsec_imagefs.errors import ImageError

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._/@-]{0,150}(?::[a-zA-Z0-9_][a-zA-Z0-9._-]{0,60})?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HEX_PREFIX = re.compile(r"[0-9a-f]{6,64}")
RECORD_VERSION = 1


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
    """One stored image.

    Attributes:
        digest: ``sha256:<hex>`` over the root's digest and the configuration: equal content, equal digest.
        rootfs: ``sha256:<hex>`` of the EROFS file; images that differ only in configuration share it.
        names: the references ``name:tag`` that point here now.
        source: what it was imported from, without credentials.
        created: RFC 3339 time of the build as the source says, or "".
        imported: RFC 3339 time of the import.
        size_bytes: length of the EROFS file.
        files: inodes in it.
        layers: ``sha256:`` digests of the source's layers, lowest first; empty for trees.
        notes: what was left out or changed, each a sentence.
    """

    digest: str
    rootfs: str
    config: ImageConfig
    source: str
    created: str = ""
    imported: str = ""
    size_bytes: int = 0
    files: int = 0
    layers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


def image_digest(rootfs: str, config: ImageConfig) -> str:
    """The identity of an image: sha256 of the canonical JSON of its root and configuration."""
    identity = json.dumps({"config": asdict(config), "rootfs": rootfs}, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()


def render_record(image: Image) -> bytes:
    """The file ``images/<hex>.json``; names are not in it, they have their own files."""
    record = asdict(image) | {"version": RECORD_VERSION}
    del record["names"]
    return json.dumps(record, indent=1, sort_keys=True).encode()


def parse_record(raw: bytes, where: str) -> Image:
    """Read ``images/<hex>.json``; raises ImageError ``corrupt``."""
    try:
        record: dict[str, Any] = json.loads(raw)
        if record.pop("version") != RECORD_VERSION:
            raise ImageError("corrupt", f"{where} is of another version of the store")
        config = record.pop("config")
        for key in ("env", "entrypoint", "cmd"):
            config[key] = tuple(config[key])
        for key in ("layers", "notes"):
            record[key] = tuple(record[key])
        return Image(config=ImageConfig(**config), **record)
    except (ValueError, TypeError, KeyError) as err:
        raise ImageError("corrupt", f"{where} can't be read: {err}", "import the image again") from err


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
