"""Small OCI layouts and docker-archives for tests, with right digests unless a test breaks them on purpose."""

from __future__ import annotations

import gzip
import hashlib
import json
from typing import TYPE_CHECKING

import zstandard

from tests.kit import tarbytes

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "Env": ["PATH=/bin", "X=1"], "WorkingDir": "/work", "User": "1000:1000", "Entrypoint": ["/init"],
    "Cmd": ["serve"], "Labels": {"a": "b"}, "StopSignal": "SIGINT",
}  # fmt: skip
LAYER = "application/vnd.oci.image.layer.v1.tar"


def digest_of(data: bytes) -> str:
    """``sha256:...``."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def compress(data: bytes, how: str) -> tuple[bytes, str]:
    """Compressed bytes and their media type."""
    if how == "gzip":
        return gzip.compress(data, 1), LAYER + "+gzip"
    if how == "zstd":
        return zstandard.compress(data), LAYER + "+zstd"
    return data, LAYER


class Layout:
    """An OCI layout being made in a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifests: list[dict[str, object]] = []
        (path / "blobs" / "sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def put(self, data: bytes) -> str:
        """Store a blob."""
        digest = digest_of(data)
        (self.path / "blobs" / digest.replace(":", "/")).write_bytes(data)
        return digest

    def descriptor(self, data: bytes, media_type: str) -> dict[str, object]:
        """Store a blob and describe it."""
        return {"mediaType": media_type, "digest": self.put(data), "size": len(data)}

    def image(self, tars: list[bytes], tag: str = "", how: str = "gzip", **manifest: object) -> dict[str, object]:
        """Add an image and return its manifest's descriptor."""
        packed = [compress(layer, how) for layer in tars]
        config = {
            "architecture": "amd64", "os": "linux", "created": "2024-01-02T03:04:05Z", "config": CONFIG,
            "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in tars]},
        }  # fmt: skip
        document = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self.descriptor(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
            "layers": [self.descriptor(data, kind) for data, kind in packed],
            **manifest,
        }
        row = self.descriptor(json.dumps(document).encode(), "application/vnd.oci.image.manifest.v1+json")
        if tag:
            row["annotations"] = {"org.opencontainers.image.ref.name": tag}
        self.manifests.append(row)
        self.write_index()
        return row

    def write_index(self) -> None:
        """Write index.json."""
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.manifests}))


def docker_archive(layers: list[bytes], tags: list[str]) -> bytes:
    """The bytes of a ``docker save``, its second layer stored as a link to the first when they are equal."""
    config = json.dumps({
        "architecture": "amd64", "os": "linux", "config": CONFIG,
        "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]},
    }).encode()  # fmt: skip
    out, names = b"", []
    seen: dict[bytes, str] = {}
    for number, layer in enumerate(layers):
        name = f"id{number}/layer.tar"
        names.append(name)
        if layer in seen:
            out += tarbytes.symlink(name.encode(), f"../{seen[layer]}".encode())
        else:
            out += tarbytes.file(name.encode(), layer)
            seen[layer] = name
    manifest = json.dumps([{"Config": "config.json", "RepoTags": tags, "Layers": names}]).encode()
    return out + tarbytes.file(b"config.json", config) + tarbytes.file(b"manifest.json", manifest) + tarbytes.END
