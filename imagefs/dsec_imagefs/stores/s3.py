"""A store in a bucket of S3, or of anything that speaks S3 (MinIO, Ceph, GCS, R2)."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsec_imagefs.stores.base import MAX_DOCUMENT_BYTES, StoreError, escape_name, plain_hex, unescape_name
from dsec_imagefs.stores.bodies import Part
from dsec_imagefs.stores.digests import check_file
from dsec_imagefs.stores.directory import missing_object
from dsec_imagefs.stores.ranges import read_range, render_range, status_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from dsec_imagefs.stores.base import Progress, StoredObject
    from dsec_imagefs.stores.http import HttpDoor, Reply
    from dsec_imagefs.stores.s3_client import S3Client

PART_BYTES = 64 << 20
MAX_PARTS = 10_000
PART_ATTEMPTS = 3
MAX_NAMES = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Store:
    """Objects under ``PREFIX/objects/<hex>``, and one small object for each image, name and trace.

    Two writers of one object do no harm: S3 replaces whole objects at once, and equal digests are equal bytes.
    """

    client: S3Client
    door: HttpDoor
    prefix: str = ""
    part_bytes: int = PART_BYTES

    @property
    def label(self) -> str:
        """``s3://BUCKET/PREFIX``."""
        return f"s3://{self.client.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def read(self, digest: str, offset: int, length: int, *, deadline: float) -> bytes:
        """Exactly `length` bytes of an object."""
        name = plain_hex(digest)
        if not length:
            return b""  # no range can say so
        what, headers = f"{self.label}: object {name}", {"Range": render_range(offset, length)}
        with self._signed("get_object", f"objects/{name}", what, deadline, headers=headers) as reply:
            return read_range(reply, offset, length)

    def size(self, digest: str, *, deadline: float) -> int:
        """Length of an object."""
        name = plain_hex(digest)
        what = f"{self.label}: object {name}"
        with self._signed("head_object", f"objects/{name}", what, deadline) as reply:
            if reply.status != 200:
                raise status_error(reply.status, reply.headers, what)
            told = reply.headers.get("Content-Length", "")
        if not told.isascii() or not told.isdigit() or len(told) > 18:
            raise StoreError("bad_reply", f"{what}: the store does not tell its length")
        return int(told)

    def has(self, digest: str, *, deadline: float, size: int | None = None) -> bool:
        """Whether the object is there; needs the right to list, without which S3 refuses instead of saying no."""
        try:
            found = self.size(digest, deadline=deadline)
        except StoreError as error:
            if error.code != "not_found":
                raise
            return False
        return size in (None, found)

    def put(self, digest: str, path: Path, *, deadline: float, progress: Progress | None = None) -> bool:
        """Upload a file, a large one in parts; it appears whole or not at all."""
        name, size = plain_hex(digest), path.stat().st_size
        if self.has(name, deadline=deadline, size=size):
            return False
        check_file(path, name, deadline)
        key, what = f"objects/{name}", f"{self.label}: upload of {name}"
        with path.open("rb", buffering=0) as file:
            if size <= self.part_bytes:
                self._put_part("put_object", key, Part(file=file, offset=0, size=size, deadline=deadline, what=what))
            else:
                self._put_parts(key, file, size, what, deadline, progress)
        if progress is not None:
            progress(size, size)
        return True

    def _put_parts(
        self, key: str, file: BinaryIO, size: int, what: str, deadline: float, progress: Progress | None
    ) -> None:
        step = max(self.part_bytes, -(-size // MAX_PARTS))
        full = self._key(key)
        upload = self.client.start_parts(full, what, deadline)
        try:
            tags: list[str] = []
            for at in range(0, size, step):
                part = Part(file=file, offset=at, size=min(step, size - at), deadline=deadline, what=what)
                tags.append(self._put_part("upload_part", key, part, UploadId=upload, PartNumber=len(tags) + 1))
                if progress is not None:
                    progress(at + part.size, size)
            self.client.finish_parts(full, upload, tags, what, deadline)
        except BaseException:
            try:
                self.client.abort_parts(full, upload, what)
            except StoreError:
                pass  # a lifecycle rule of the bucket removes it; the first error is the one to tell
            raise

    def _put_part(self, operation: str, key: str, part: Part, **parameters: Any) -> str:
        """Send one body; a part of a long upload is worth more than one attempt. Returns the part's ETag."""
        attempts = PART_ATTEMPTS if parameters else 1
        for attempt in range(1, attempts + 1):
            part.seek(0)
            headers = {"Content-Length": str(part.size)}
            try:
                with self._signed(
                    operation, key, part.what, part.deadline, method="PUT", headers=headers, body=part, **parameters
                ) as reply:
                    if reply.status != 200:
                        raise status_error(reply.status, reply.headers, part.what)
                    return str(reply.headers.get("ETag", ""))
            except StoreError as error:
                if attempt == attempts or not error.retryable:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def delete(self, digest: str, *, deadline: float) -> None:
        """Remove an object."""
        self._remove(f"objects/{plain_hex(digest)}", deadline)

    def put_image(self, image: str, manifest: bytes, objects: Sequence[StoredObject], *, deadline: float) -> None:
        """Publish an image manifest; raises StoreError ``not_found`` while an object of it is missing."""
        for item in objects:
            if not self.has(item.digest, deadline=deadline):
                raise missing_object(self.label, item)
        self._put_document(f"images/{plain_hex(image)}", manifest, deadline)

    def get_image(self, image: str, *, deadline: float) -> bytes:
        """The manifest of an image."""
        return self._get_document(f"images/{plain_hex(image)}", deadline)

    def delete_image(self, image: str, *, deadline: float) -> None:
        """Remove an image's manifest."""
        self._remove(f"images/{plain_hex(image)}", deadline)

    def put_ref(self, name: str, image: str, *, deadline: float) -> None:
        """Let a name point to a published image."""
        key, target = f"refs/{escape_name(name)}", plain_hex(image)
        self._get_document(f"images/{target}", deadline)
        self._put_document(key, target.encode() + b"\n", deadline)

    def get_ref(self, name: str, *, deadline: float) -> str:
        """Digest of the image a name points to."""
        text = self._get_document(f"refs/{escape_name(name)}", deadline).decode("ascii", "replace").strip()
        try:
            return plain_hex(text)
        except StoreError as error:
            raise StoreError("corrupt", f"{self.label}: the name {name} holds no digest", "push it again") from error

    def delete_ref(self, name: str, *, deadline: float) -> None:
        """Remove a name."""
        self._remove(f"refs/{escape_name(name)}", deadline)

    def refs(self, *, deadline: float) -> tuple[str, ...]:
        """All names, sorted."""
        words = self.client.keys(self._key("refs/"), f"{self.label}: names", MAX_NAMES, deadline)
        return tuple(sorted(name for word in words if (name := unescape_name(word)) is not None))

    def put_trace(self, image: str, trace: bytes, *, deadline: float) -> None:
        """Keep a trace."""
        self._put_document(f"traces/{plain_hex(image)}", trace, deadline)

    def get_trace(self, image: str, *, deadline: float) -> bytes:
        """The trace of an image."""
        return self._get_document(f"traces/{plain_hex(image)}", deadline)

    def close(self) -> None:
        """Close connections."""
        self.client.close()
        self.door.close()

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _get_document(self, key: str, deadline: float) -> bytes:
        what = f"{self.label}: {key}"
        with self._signed("get_object", key, what, deadline) as reply:
            if reply.status != 200:
                raise status_error(reply.status, reply.headers, what)
            return reply.whole(MAX_DOCUMENT_BYTES)

    def _put_document(self, key: str, data: bytes, deadline: float) -> None:
        what = f"{self.label}: {key}"
        if len(data) > MAX_DOCUMENT_BYTES:
            raise StoreError("too_large", f"{what} has {len(data)} bytes; a store takes {MAX_DOCUMENT_BYTES}")
        headers = {"Content-Length": str(len(data))}
        with self._signed("put_object", key, what, deadline, method="PUT", headers=headers, body=data) as reply:
            if reply.status != 200:
                raise status_error(reply.status, reply.headers, what)

    def _remove(self, key: str, deadline: float) -> None:
        what = f"{self.label}: {key}"
        with self._signed("delete_object", key, what, deadline, method="DELETE") as reply:
            if reply.status not in (200, 204, 404):
                raise status_error(reply.status, reply.headers, what)

    @contextmanager
    def _signed(
        self,
        operation: str,
        key: str,
        what: str,
        deadline: float,
        *,
        method: str = "",
        headers: Mapping[str, str] | None = None,
        body: bytes | Part | None = None,
        **parameters: Any,
    ) -> Iterator[Reply]:
        """One request by a signed URL, signed anew once when it is refused: keys change, and clocks of signers too."""
        verb = method or ("HEAD" if operation == "head_object" else "GET")
        for last in (False, True):
            url = self.client.url(operation, self._key(key), fresh=last, **parameters)
            with self.door.exchange(
                verb, url, deadline=deadline, what=what, headers=headers, body=body, follow=False
            ) as reply:
                if last or reply.status not in (400, 401, 403):
                    self._pace(reply)
                    yield reply
                    return
            if body is not None and not isinstance(body, bytes):
                body.seek(0)

    def _pace(self, reply: Reply) -> None:
        if reply.status in (301, 307, 308):
            found = f"{reply.what}: the bucket is elsewhere (HTTP {reply.status})"
            raise StoreError("bad_store", found, "give region= or endpoint= in the store's URL", "store")
        if reply.status in (429, 503):
            wait_s = status_error(reply.status, reply.headers, reply.what).retry_after_s
            if wait_s is not None:
                self.door.pacer.hold(wait_s)
