"""A blob's way into a registry: one request when it is small, else in chunks that go on where a lost one ended."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol

from dsec_imagefs.stores.base import StoreError
from dsec_imagefs.stores.bodies import Part
from dsec_imagefs.stores.ranges import status_error

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from dsec_imagefs.stores.base import Progress
    from dsec_imagefs.stores.http import HttpDoor, Reply

CHUNK_BYTES = 32 << 20
MAX_CHUNK_BYTES = 1 << 30
CHUNK_ATTEMPTS = 4
_RANGE = re.compile(r"(?:bytes=)?0-(\d{1,18})")
_OCTETS = "application/octet-stream"


class Call(Protocol):
    """`RegistryStore.call`."""

    def __call__(
        self,
        method: str,
        url: str,
        *,
        what: str,
        deadline: float,
        headers: Mapping[str, str] | None = None,
        body: bytes | Part | None = None,
    ) -> AbstractContextManager[Reply]:
        """One authorized request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """One upload of one blob."""

    call: Call
    door: HttpDoor
    path: str
    digest: str
    what: str
    mount_from: str = ""
    chunk_bytes: int = CHUNK_BYTES

    def send_bytes(self, data: bytes, deadline: float) -> None:
        """Upload what is in memory."""
        self.send(io.BytesIO(data), len(data), deadline)

    def send(self, file: BinaryIO, size: int, deadline: float, progress: Progress | None = None) -> None:
        """Upload `size` bytes of a file; a failed upload is given up at the registry too."""
        location, chunk = self._start(deadline)
        if not location:
            return  # mounted from another repository
        try:
            done = 0
            while size > chunk and done < size:
                location, done = self._chunk(file, location, done, min(chunk, size - done), deadline)
                if progress is not None:
                    progress(done, size)
            self._finish(file, location, done, size, deadline)
        except BaseException:
            self._cancel(location, deadline)
            raise
        if progress is not None:
            progress(size, size)

    def _start(self, deadline: float) -> tuple[str, int]:
        query = f"?mount=sha256:{self.digest}&from={self.mount_from}" if self.mount_from else ""
        headers = {"Content-Length": "0"}
        with self.call("POST", self.path + query, what=self.what, deadline=deadline, headers=headers) as reply:
            if reply.status == 201 and query:
                return "", 0
            if reply.status != 202:
                raise status_error(reply.status, reply.headers, self.what)
            least = reply.headers.get("OCI-Chunk-Min-Length", "0")
            chunk = max(self.chunk_bytes, int(least) if least.isdigit() and len(least) < 12 else 0)
            return self._location(reply), min(chunk, MAX_CHUNK_BYTES)

    def _chunk(self, file: BinaryIO, location: str, at: int, length: int, deadline: float) -> tuple[str, int]:
        """Send a chunk; returns where to go on and how many bytes the registry has now."""
        for attempt in range(1, CHUNK_ATTEMPTS + 1):
            part = Part(file=file, offset=at, size=length, deadline=deadline, what=self.what)
            headers = {
                "Content-Type": _OCTETS, "Content-Length": str(length), "Content-Range": f"{at}-{at + length - 1}",
            }  # fmt: skip
            try:
                with self.call(
                    "PATCH", location, what=self.what, deadline=deadline, headers=headers, body=part
                ) as reply:
                    if reply.status not in (202, 204):
                        raise status_error(reply.status, reply.headers, self.what)
                    return self._location(reply), self._reached(reply, at + length)
            except StoreError as error:
                if attempt == CHUNK_ATTEMPTS or not error.retryable:
                    raise
            location, reached = self._progress(location, deadline)
            if not at <= reached <= at + length:
                raise StoreError("bad_reply", f"{self.what}: the registry lost what it had", retryable=True)
            if reached > at:
                return location, reached
        raise AssertionError("the last attempt returns or raises")

    def _progress(self, location: str, deadline: float) -> tuple[str, int]:
        with self.call("GET", location, what=self.what, deadline=deadline) as reply:
            if reply.status != 204:
                raise StoreError("bad_reply", f"{self.what}: the registry forgot it", retryable=True)
            return self._location(reply), self._reached(reply, 0)

    def _finish(self, file: BinaryIO, location: str, done: int, size: int, deadline: float) -> None:
        url = location + ("&" if "?" in location else "?") + f"digest=sha256:{self.digest}"
        part = Part(file=file, offset=done, size=size - done, deadline=deadline, what=self.what)
        headers = {"Content-Type": _OCTETS, "Content-Length": str(size - done)}
        with self.call("PUT", url, what=self.what, deadline=deadline, headers=headers, body=part) as reply:
            if reply.status not in (201, 204):
                raise status_error(reply.status, reply.headers, self.what)

    def _cancel(self, location: str, deadline: float) -> None:
        try:
            with self.call("DELETE", location, what=self.what, deadline=deadline):
                pass
        except StoreError:
            pass  # the registry sweeps forgotten uploads itself; the first error is the one to tell

    def _location(self, reply: Reply) -> str:
        """Where the upload goes on: by the same rules as a redirect."""
        location = reply.headers.get("Location", "")
        if not location:
            raise StoreError("bad_reply", f"{self.what}: no place to send it to")
        return self.door.redirect_target(reply.url, location, self.what)

    def _reached(self, reply: Reply, expected: int) -> int:
        """Bytes the registry has, from its ``Range: 0-N``; some leave it out when all is well."""
        match = _RANGE.fullmatch(reply.headers.get("Range", ""))
        if match is None:
            return expected
        reached = int(match[1]) + 1
        return 0 if reached == 1 and expected == 0 else reached
