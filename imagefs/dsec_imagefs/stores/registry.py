"""A store in one repository of an OCI registry: objects are its blobs, images are artifacts, names are tags."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsec_imagefs.stores import artifact
from dsec_imagefs.stores.base import MAX_DOCUMENT_BYTES, StoreError, plain_hex
from dsec_imagefs.stores.digests import check_file, checked
from dsec_imagefs.stores.http import same_origin
from dsec_imagefs.stores.ranges import read_range, render_range, status_error
from dsec_imagefs.stores.tokens import Tokens, parse_challenge
from dsec_imagefs.stores.upload import Upload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from dsec_imagefs.stores.base import Progress, StoredObject
    from dsec_imagefs.stores.bodies import Part
    from dsec_imagefs.stores.http import HttpDoor, Reply

MAX_PAGES = 1000
MAX_NAMES = 200_000
LOCATION_S = 20.0  # presigned URLs live minutes; asking again is one request more
MAX_LOCATIONS = 512
_JSON = "application/json"


@dataclass(slots=True, kw_only=True)
class _Locations:
    """Where the registry sent us for an object, so that not each block asks it first."""

    rows: dict[str, tuple[str, float]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, digest: str) -> str:
        with self.lock:
            url, until = self.rows.get(digest, ("", 0.0))
        return url if time.monotonic() < until else ""

    def keep(self, digest: str, url: str) -> None:
        with self.lock:
            if len(self.rows) >= MAX_LOCATIONS:
                self.rows.clear()
            self.rows[digest] = (url, time.monotonic() + LOCATION_S)

    def drop(self, digest: str) -> None:
        with self.lock:
            self.rows.pop(digest, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryStore:
    """Speaks the OCI distribution API, with tokens.

    Attributes:
        door: connections to the registry.
        host: ``host[:port]`` for messages and logins.
        repository: without the host.
        tokens: our authorization.
        mount_from: another repository of the registry whose blobs need not be sent again, or "".
    """

    door: HttpDoor
    host: str
    repository: str
    tokens: Tokens
    mount_from: str = ""
    _locations: _Locations = field(default_factory=_Locations)

    @property
    def label(self) -> str:
        """``oci://HOST/REPOSITORY``."""
        return f"oci://{self.host}/{self.repository}"

    def read(self, digest: str, offset: int, length: int, *, deadline: float) -> bytes:
        """Exactly `length` bytes of a blob."""
        name = plain_hex(digest)
        if not length:
            return b""  # no range can say so
        what, headers = f"{self.label}: object {name}", {"Range": render_range(offset, length)}
        if known := self._locations.find(name):
            with self.door.exchange("GET", known, deadline=deadline, what=what, headers=headers) as reply:
                if reply.status == 206:
                    return read_range(reply, offset, length)
            self._locations.drop(name)  # expired, most likely: the registry signs a new one
        with self.call("GET", self._blob(name), what=what, deadline=deadline, headers=headers) as reply:
            if reply.status == 206 and not same_origin(reply.url, self.door.origin):
                self._locations.keep(name, reply.url)
            return read_range(reply, offset, length)

    def size(self, digest: str, *, deadline: float) -> int:
        """Length of a blob."""
        name = plain_hex(digest)
        what = f"{self.label}: object {name}"
        with self.call("HEAD", self._blob(name), what=what, deadline=deadline) as reply:
            if reply.status != 200:
                raise status_error(reply.status, reply.headers, what)
            told = reply.headers.get("Content-Length", "")
        if not told.isascii() or not told.isdigit() or len(told) > 18:
            raise StoreError("bad_reply", f"{what}: the registry does not tell its length")
        return int(told)

    def has(self, digest: str, *, deadline: float, size: int | None = None) -> bool:
        """Whether the blob is there."""
        try:
            found = self.size(digest, deadline=deadline)
        except StoreError as error:
            if error.code != "not_found":
                raise
            return False
        return size in (None, found)

    def put(self, digest: str, path: Path, *, deadline: float, progress: Progress | None = None) -> bool:
        """Upload a file; the registry checks its digest too."""
        size = path.stat().st_size
        if self.has(digest, deadline=deadline, size=size):
            return False
        check_file(path, digest, deadline)
        with path.open("rb", buffering=0) as file:
            self._upload(plain_hex(digest)).send(file, size, deadline, progress)
        return True

    def _upload(self, digest: str) -> Upload:
        return Upload(
            call=self.call, door=self.door, path=self._path("blobs/uploads/"), digest=digest,
            what=f"{self.label}: upload of {digest}", mount_from=self.mount_from,
        )  # fmt: skip

    def _put_bytes(self, data: bytes, deadline: float) -> None:
        digest = hashlib.sha256(data).hexdigest()
        if not self.has(digest, deadline=deadline):
            self._upload(digest).send_bytes(data, deadline)

    def delete(self, digest: str, *, deadline: float) -> None:
        """Remove a blob; many registries forbid it (``unsupported``)."""
        self._delete(self._blob(plain_hex(digest)), f"{self.label}: object {plain_hex(digest)}", deadline)

    def put_image(self, image: str, manifest: bytes, objects: Sequence[StoredObject], *, deadline: float) -> None:
        """Publish an image; the registry refuses it (``bad_reply``) while an object is missing."""
        raw = artifact.render_image(image, manifest, objects)
        self._put_bytes(manifest, deadline)
        self._put_manifest(artifact.image_tag(image), raw, deadline)

    def get_image(self, image: str, *, deadline: float) -> bytes:
        """The manifest of an image."""
        tag = artifact.image_tag(image)
        _, item = artifact.parse_image(self._get_manifest(tag, deadline), f"{self.label}:{tag}")
        return self._document(item, deadline)

    def delete_image(self, image: str, *, deadline: float) -> None:
        """Remove an image's artifact, which takes all its names with it."""
        self._delete_manifest(artifact.image_tag(image), deadline)

    def put_ref(self, name: str, image: str, *, deadline: float) -> None:
        """Tag a published image."""
        tag = artifact.name_tag(name)
        self._put_manifest(tag, self._get_manifest(artifact.image_tag(image), deadline), deadline)

    def get_ref(self, name: str, *, deadline: float) -> str:
        """Digest of the image a tag is on."""
        tag = artifact.name_tag(name)
        return artifact.parse_image(self._get_manifest(tag, deadline), f"{self.label}:{tag}")[0]

    def delete_ref(self, name: str, *, deadline: float) -> None:
        """Remove a tag; registries before OCI distribution 1.1 can't (``unsupported``)."""
        tag = artifact.name_tag(name)
        self._delete(self._path(f"manifests/{tag}"), f"{self.label}:{tag}", deadline)

    def refs(self, *, deadline: float) -> tuple[str, ...]:
        """All tags that are names."""
        names: set[str] = set()
        last, what = "", f"{self.label}: tags"
        for _ in range(MAX_PAGES):
            page = self._path("tags/list") + "?n=1000" + (f"&last={last}" if last else "")
            with self.call("GET", page, what=what, deadline=deadline) as reply:
                if reply.status == 404:
                    break  # nothing was ever pushed
                if reply.status != 200:
                    raise status_error(reply.status, reply.headers, what)
                tags, more = _parse_tags(reply.whole(MAX_DOCUMENT_BYTES), what), "Link" in reply.headers
            names.update(name for tag in tags if (name := artifact.tag_name(tag)) is not None)
            # The link's own URL is not followed: where a page goes on is known without it.
            if not more or not tags or tags[-1] == last:
                break
            if len(names) > MAX_NAMES:
                raise StoreError("too_large", f"{what}: over {MAX_NAMES} names")
            last = tags[-1]
        return tuple(sorted(names))

    def put_trace(self, image: str, trace: bytes, *, deadline: float) -> None:
        """Keep a trace under a tag of its own."""
        raw = artifact.render_trace(image, trace)
        self._put_bytes(trace, deadline)
        self._put_bytes(artifact.EMPTY, deadline)
        self._put_manifest(artifact.trace_tag(image), raw, deadline)

    def get_trace(self, image: str, *, deadline: float) -> bytes:
        """The trace of an image."""
        tag = artifact.trace_tag(image)
        _, item = artifact.parse_trace(self._get_manifest(tag, deadline), f"{self.label}:{tag}")
        return self._document(item, deadline)

    def close(self) -> None:
        """Close connections."""
        self.door.close()

    def _path(self, rest: str) -> str:
        return f"/v2/{self.repository}/{rest}"

    def _blob(self, name: str) -> str:
        return self._path(f"blobs/sha256:{name}")

    def _document(self, item: StoredObject, deadline: float) -> bytes:
        if item.size > MAX_DOCUMENT_BYTES:
            raise StoreError("too_large", f"{self.label}: a document of {item.size} bytes")
        data = self.read(item.digest, 0, item.size, deadline=deadline) if item.size else b""
        return checked(data, item.digest, f"{self.label}: {item.kind} {item.digest}")

    def _get_manifest(self, tag: str, deadline: float) -> bytes:
        what, headers = f"{self.label}:{tag}", {"Accept": artifact.MANIFEST_TYPE}
        with self.call("GET", self._path(f"manifests/{tag}"), what=what, deadline=deadline, headers=headers) as reply:
            if reply.status != 200:
                raise status_error(reply.status, reply.headers, what)
            return reply.whole(artifact.MAX_ARTIFACT_BYTES)

    def _put_manifest(self, tag: str, raw: bytes, deadline: float) -> None:
        what, headers = f"{self.label}:{tag}", {"Content-Type": artifact.MANIFEST_TYPE}
        path = self._path(f"manifests/{tag}")
        with self.call("PUT", path, what=what, deadline=deadline, headers=headers, body=raw) as reply:
            if reply.status not in (200, 201):
                raise status_error(reply.status, reply.headers, what)

    def _delete_manifest(self, tag: str, deadline: float) -> None:
        what, headers = f"{self.label}:{tag}", {"Accept": artifact.MANIFEST_TYPE}
        with self.call("HEAD", self._path(f"manifests/{tag}"), what=what, deadline=deadline, headers=headers) as reply:
            if reply.status == 404:
                return
            digest = plain_hex(reply.headers.get("Docker-Content-Digest", ""))
        self._delete(self._path(f"manifests/sha256:{digest}"), what, deadline)

    def _delete(self, path: str, what: str, deadline: float) -> None:
        with self.call("DELETE", path, what=what, deadline=deadline) as reply:
            if reply.status == 400:  # distribution 2.x: a tag where it wants a digest
                raise status_error(405, reply.headers, what)
            if reply.status not in (200, 202, 204, 404):
                raise status_error(reply.status, reply.headers, what)

    @contextmanager
    def call(
        self,
        method: str,
        url: str,
        *,
        what: str,
        deadline: float,
        headers: Mapping[str, str] | None = None,
        body: bytes | Part | None = None,
    ) -> Iterator[Reply]:
        """One request with our authorization, renewed once when it is refused (401, or 403 at expiry)."""
        push = method in ("POST", "PATCH", "PUT", "DELETE")
        for last in (False, True):
            generation, ours = self.tokens.current()
            sent = {**(headers or {}), **(ours if not url.startswith("http") or self._is_ours(url) else {})}
            with self.door.exchange(method, url, deadline=deadline, what=what, headers=sent, body=body) as reply:
                if last or reply.status not in (401, 403):
                    self._pace(reply)
                    yield reply
                    return
                challenge = parse_challenge(reply.headers.get("WWW-Authenticate", ""))
                refused = status_error(reply.status, reply.headers, what)
                ours_refused = self._is_ours(reply.url)
            # A refusal by the storage behind a redirect is an expired signature: the registry makes a new one.
            if ours_refused and not self.tokens.renew(generation, challenge, push=push, deadline=deadline):
                raise refused
            if body is not None and not isinstance(body, bytes):
                body.seek(0)

    def _is_ours(self, url: str) -> bool:
        return same_origin(url, self.door.origin)

    def _pace(self, reply: Reply) -> None:
        if reply.status in (429, 503):
            wait_s = status_error(reply.status, reply.headers, reply.what).retry_after_s
            if wait_s is not None:
                self.door.pacer.hold(wait_s)


def _parse_tags(raw: bytes, what: str) -> list[str]:
    try:
        found: Any = json.loads(raw)
        tags = found.get("tags") or []
    except (ValueError, AttributeError, RecursionError) as error:
        raise StoreError("bad_reply", f"{what}: no list of tags") from error
    if not isinstance(tags, list):
        raise StoreError("bad_reply", f"{what}: no list of tags")
    return [tag for tag in tags if isinstance(tag, str) and len(tag) <= 128]
