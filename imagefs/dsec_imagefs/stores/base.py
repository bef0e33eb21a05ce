"""What a store is: objects by digest, images, names and traces; and the one error that all stores raise."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Progress = Callable[[int, int], None]  # bytes done, bytes in all

MAX_DOCUMENT_BYTES = 32 << 20  # manifests and traces, which are read whole
_HEX = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_ESCAPES = {"_": "__", "/": "_s", ":": "_c", "@": "_a"}
_UNESCAPES = {code: char for char, code in _ESCAPES.items()}
_ESCAPED = re.compile(r"_[_sca]|[A-Za-z0-9.-]")
MAX_ESCAPED_NAME = 128  # the length of a registry's tag, the shortest of all stores


class StoreError(ImageError):
    """A store did not do what it was asked.

    Attributes:
        code: ``not_found``, ``denied`` (credentials), ``unavailable`` (no connection, 5xx), ``throttled`` (told to
            wait), ``deadline``, ``short`` (fewer bytes than promised), ``bad_reply`` (against the protocol),
            ``corrupt`` (a digest differs), ``unsupported``, ``no_space``, ``too_large``, ``bad_store`` (its URL),
            ``bad_name``, ``tool_missing``.
        retryable: the same request may succeed later.
        retry_after_s: how long the store asked to wait, or None when it said nothing.
    """

    def __init__(
        self,
        code: str,
        message: str,
        hint: str = "",
        field: str = "",
        *,
        retryable: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(code, message, hint, field)
        self.retryable = retryable
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One immutable object of an image. `kind`: ``layer``, ``meta``, ``index``, ``wire``, ``merged`` or ``image``."""

    digest: str
    size: int
    kind: str


class Store(Protocol):
    """A store of images. All digests are 64 hex digits; ``sha256:`` before them is accepted and never returned.

    Everything is synchronous and may be called from many threads at once. `deadline` is an instant of
    `time.monotonic()`; a call that can't end before it raises StoreError ``deadline``. One call is one attempt:
    bounded repetition is the caller's (see `stores.retry`). What is read is not verified: that is done by
    `BlockFetcher` and `stores.transfer`, which know the digests.
    """

    @property
    def label(self) -> str:
        """The store for people: its URL without credentials or query."""

    def read(self, digest: str, offset: int, length: int, *, deadline: float) -> bytes:
        """Exactly `length` bytes of an object from `offset` on; raises StoreError rather than give fewer."""

    def size(self, digest: str, *, deadline: float) -> int:
        """Length of an object; raises StoreError ``not_found``."""

    def has(self, digest: str, *, deadline: float, size: int | None = None) -> bool:
        """Whether the object is there, whole: of this length when one is given. False too where no store is yet."""

    def put(self, digest: str, path: Path, *, deadline: float, progress: Progress | None = None) -> bool:
        """Publish a file under its digest; the bytes are checked first.

        Readers see the whole object or none, also when two nodes push the same one or the pusher dies.

        Returns:
            False when it was there already and nothing was sent.

        Raises:
            StoreError: ``corrupt`` when the file has another digest.
        """

    def delete(self, digest: str, *, deadline: float) -> None:
        """Remove an object; one that is not there is no error. The caller knows that no image needs it."""

    def put_image(self, image: str, manifest: bytes, objects: Sequence[StoredObject], *, deadline: float) -> None:
        """Publish an image manifest under the image's digest, when all its objects are there. Idempotent."""

    def get_image(self, image: str, *, deadline: float) -> bytes:
        """The manifest of an image; raises StoreError ``not_found``."""

    def delete_image(self, image: str, *, deadline: float) -> None:
        """Remove an image's manifest, not its objects."""

    def put_ref(self, name: str, image: str, *, deadline: float) -> None:
        """Let a name point to a published image, replacing what it pointed to."""

    def get_ref(self, name: str, *, deadline: float) -> str:
        """Digest of the image a name points to; raises StoreError ``not_found``."""

    def delete_ref(self, name: str, *, deadline: float) -> None:
        """Remove a name; one that is not there is no error."""

    def refs(self, *, deadline: float) -> tuple[str, ...]:
        """All names, sorted."""

    def put_trace(self, image: str, trace: bytes, *, deadline: float) -> None:
        """Keep the record of an image's first accesses, replacing an older one."""

    def get_trace(self, image: str, *, deadline: float) -> bytes:
        """The record of first accesses; raises StoreError ``not_found``."""

    def close(self) -> None:
        """Give up connections; the store is not used afterwards."""


def plain_hex(digest: str) -> str:
    """The 64 hex digits of a digest with or without ``sha256:``; raises StoreError ``bad_name`` for anything else."""
    match = _HEX.fullmatch(digest)
    if match is None:
        raise StoreError("bad_name", f"{digest[:100]!r} is no digest", "64 hex digits of a sha256", "digest")
    return match[1]


def escape_name(name: str) -> str:
    """An image name as one word of ``[A-Za-z0-9_.-]``, so that it can be a file, a key and a tag; injective.

    Raises:
        StoreError: ``bad_name`` when it holds anything else, leads with a dot or dash, or becomes longer than a tag.
    """
    word = "".join(_ESCAPES.get(char, char) for char in name)
    if not name or not all(_ESCAPED.fullmatch(part) for part in _parts(word)) or word[0] in ".-":
        raise StoreError("bad_name", f"{name[:200]!r} is no image name", "letters, digits and . _ - / : @", "name")
    if len(word) > MAX_ESCAPED_NAME:
        hint = f"at most {MAX_ESCAPED_NAME} characters, where _ / : and @ count twice"
        raise StoreError("bad_name", f"the name {name[:200]!r} is too long for a store", hint, "name")
    return word


def unescape_name(word: str) -> str | None:
    """The image name that `escape_name` wrote, or None for a word that is none of ours."""
    parts = _parts(word)
    if not parts or not all(_ESCAPED.fullmatch(part) for part in parts):
        return None
    return "".join(_UNESCAPES.get(part, part) for part in parts)


def _parts(word: str) -> list[str]:
    return re.findall(r"_.?|.", word, re.DOTALL)


def remaining(deadline: float, what: str) -> float:
    """Seconds until an instant of `time.monotonic()`; raises StoreError ``deadline`` when it is over."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise StoreError("deadline", f"{what}: the time for it is over", retryable=True)
    return left
