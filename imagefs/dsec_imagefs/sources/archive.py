"""OCI layouts and docker-archives, as directories or as tars: find the image and its layers, check digests."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.sources import documents
from dsec_imagefs.sources.base import LayerSource, Material
from dsec_imagefs.sources.files import Files, open_files
from dsec_imagefs.sources.unpack import unpack_layer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsec_imagefs.blob import Blob
    from dsec_imagefs.sources.base import Work

_MAX_NESTED_INDEXES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    blob: Blob
    digest: str
    diff_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    config: documents.ConfigDocument
    layers: tuple[_Layer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSource:
    """``oci:PATH[:TAG]`` or ``docker-archive:PATH[:REF]``; each kind also reads the other, as archives carry both."""

    kind: str
    path: str
    ref: str = ""
    shown: str = ""

    @property
    def label(self) -> str:
        """The source string, or what it was fetched from."""
        return self.shown or f"{self.kind}:{self.path}" + (f":{self.ref}" if self.ref else "")

    @property
    def cache_key(self) -> str:
        """Nothing slow to reuse."""
        return ""

    @contextmanager
    def open(self, work: Work) -> Iterator[Material]:
        """Find the layers; each is unpacked and verified when it is opened."""
        with ExitStack() as stack:
            found = self._find(open_files(self.path, work, stack), work)
            total, before = sum(layer.blob.size for layer in found.layers), 0
            layers = []
            for layer in found.layers:
                layers.append(LayerSource(open=partial(_unpack, layer, work, before, total), diff_id=layer.diff_id))
                before += layer.blob.size
            yield Material(layers=tuple(layers), config=found.config.config, created=found.config.created)

    def _find(self, files: Files, work: Work) -> _Found:
        index = files.find("index.json")
        manifest = files.find("manifest.json")
        if manifest is not None and (self.kind == "docker-archive" or index is None):
            return _find_docker(files, _read(manifest, work), self.ref)
        if index is not None:
            return _find_oci(files, documents.parse_document(_read(index, work), "index.json"), self.ref, work)
        raise ImageError(
            "bad_source", f"{self.path} has neither index.json nor manifest.json",
            "give an OCI layout or the output of docker save; for a plain tree use dir:PATH", "source",
        )  # fmt: skip


def _unpack(layer: _Layer, work: Work, before: int, total: int, stack: ExitStack) -> Blob:
    return unpack_layer(
        layer.blob, work, stack, digest=layer.digest, diff_id=layer.diff_id, before=before, total=total
    )  # fmt: skip


def _read(blob: Blob, work: Work) -> bytes:
    if blob.size > work.limits.max_manifest_bytes:
        raise ImageError("too_large", f"{blob.name} has {blob.size} bytes", "it should be a small document", "source")
    return blob.read(0, blob.size)


def _open_descriptor(files: Files, wanted: documents.Descriptor) -> Blob:
    blob = files.find(wanted.path)
    if blob is None:
        raise ImageError("bad_image", f"the blob {wanted.digest} is missing", "fetch the image again", "source")
    if wanted.size >= 0 and blob.size != wanted.size:
        raise ImageError(
            "bad_image", f"the blob {wanted.digest} has {blob.size} bytes, not {wanted.size}", field="source"
        )
    return blob


def _read_descriptor(files: Files, wanted: documents.Descriptor, work: Work) -> bytes:
    raw = _read(_open_descriptor(files, wanted), work)
    algorithm, _, digest = wanted.digest.partition(":")
    if hashlib.new(algorithm, raw).hexdigest() != digest:
        raise ImageError("bad_image", f"the document {wanted.digest} does not match its digest", field="source")
    return raw


def _find_oci(files: Files, index: documents.Document, tag: str, work: Work) -> _Found:
    machine = os.uname().machine
    chosen = documents.choose_manifest(index, machine, "index.json", tag)
    for _ in range(_MAX_NESTED_INDEXES):
        document = documents.parse_document(_read_descriptor(files, chosen, work), f"manifest {chosen.digest}")
        if "manifests" not in document:
            break
        chosen = documents.choose_manifest(document, machine, f"index {chosen.digest}")
    else:
        raise ImageError("bad_image", "indexes are nested too deep", field="source")
    config_at, layer_rows = documents.manifest_parts(document)
    config = documents.parse_config(_read_descriptor(files, config_at, work))
    if len(config.diff_ids) != len(layer_rows):
        raise ImageError(
            "bad_image", f"{len(layer_rows)} layers and {len(config.diff_ids)} diff_ids", "push it anew", "source"
        )
    layers = [
        _Layer(blob=_open_descriptor(files, row), digest=row.digest, diff_id=diff_id)
        for row, diff_id in zip(layer_rows, config.diff_ids, strict=True)
    ]
    return _Found(config=config, layers=tuple(layers))


def _find_docker(files: Files, raw: bytes, ref: str) -> _Found:
    try:
        rows = json.loads(raw)
    except ValueError as err:
        raise ImageError("bad_image", f"manifest.json is no JSON: {err}", field="source") from err
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    tags = [tag for row in rows for tag in row.get("RepoTags") or []]
    if ref:
        full = ref if ":" in ref.rpartition("/")[2] else f"{ref}:latest"
        rows = [row for row in rows if full in (row.get("RepoTags") or [])]
    if len(rows) != 1:
        known = ", ".join(map(str, tags)) or "none"
        code = "ambiguous" if rows else "not_found"
        raise ImageError(code, f"the archive has {len(rows)} images for this reference", f"names: {known}", "source")
    config_path, layer_paths = rows[0].get("Config"), rows[0].get("Layers") or []
    if not isinstance(config_path, str) or not all(isinstance(path, str) for path in layer_paths):
        raise ImageError("bad_image", "manifest.json names no configuration or layers", field="source")
    config_blob = files.find(config_path)
    if config_blob is None:
        raise ImageError("bad_image", f"the archive lacks {config_path}", field="source")
    config = documents.parse_config(config_blob.read(0, config_blob.size))
    if len(config.diff_ids) != len(layer_paths):
        raise ImageError("bad_image", f"{len(layer_paths)} layers and {len(config.diff_ids)} diff_ids", field="source")
    layers = []
    for path, diff_id in zip(layer_paths, config.diff_ids, strict=True):
        blob = files.find(path)
        if blob is None:
            raise ImageError("bad_image", f"the archive lacks the layer {path}", field="source")
        layers.append(_Layer(blob=blob, digest="", diff_id=diff_id))
    return _Found(config=config, layers=tuple(layers))
