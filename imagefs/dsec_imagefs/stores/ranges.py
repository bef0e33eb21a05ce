"""What counts as an answer to a request for one range, and what a status says about trying again. No sockets here."""

from __future__ import annotations

import email.utils
import re
import time
from typing import TYPE_CHECKING

from dsec_imagefs.stores.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsec_imagefs.stores.http import Reply

MAX_DISCARD_BYTES = 64 << 20  # a store that ignores ranges is read from the start, up to here
_CONTENT_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20}|\*)")
_RETRYABLE = (408, 425, 429, 500, 502, 503, 504)


def render_range(offset: int, length: int) -> str:
    """The value of ``Range`` for one range; many in a request are answered in too many ways."""
    return f"bytes={offset}-{offset + length - 1}"


def read_range(reply: Reply, offset: int, length: int) -> bytes:
    """The bytes of a range from a reply: 206 of exactly this range, or 200 with the rest thrown away.

    Raises:
        StoreError: ``short``, ``bad_reply``, or what the status says.
    """
    if reply.headers.get("Content-Encoding", "identity") != "identity":
        raise StoreError("bad_reply", f"{reply.what}: encoded, which was not asked for", retryable=True)
    if reply.status == 206:
        check_content_range(reply.headers, offset, length, reply.what)
        return _exact(reply, 0, length)
    if reply.status == 200:
        if offset + length > MAX_DISCARD_BYTES:
            hint = "a store or proxy without ranges can't serve blocks"
            raise StoreError("unsupported", f"{reply.what}: gave the whole object for a range", hint, retryable=True)
        return _exact(reply, offset, length)
    raise status_error(reply.status, reply.headers, reply.what)


def check_content_range(headers: Mapping[str, str], offset: int, length: int, what: str) -> None:
    """Raise StoreError ``bad_reply`` (or ``short``) unless a 206 is of exactly the asked range."""
    given = headers.get("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(given)
    if match is None or (int(match[1]), int(match[2])) != (offset, offset + length - 1):
        cut = match is not None and int(match[1]) == offset and int(match[2]) < offset + length - 1
        text = f"{what}: asked for {offset}+{length}, was given Content-Range {given[:80]!r}"
        raise StoreError("short" if cut else "bad_reply", text, retryable=True)
    told = headers.get("Content-Length")
    if told is not None and told != str(length):
        raise StoreError(
            "bad_reply", f"{what}: a range of {length} bytes with Content-Length {told[:20]}", retryable=True
        )


def _exact(reply: Reply, skip: int, length: int) -> bytes:
    """`length` bytes after `skip`; for a 206 (`skip` 0 and nothing after) a longer body is an error too."""
    parts = []
    for chunk in reply.chunks(skip + length + (reply.status == 206)):
        part = chunk[skip:] if skip else chunk
        skip -= len(chunk) - len(part)
        parts.append(part)
    body = b"".join(parts)  # one part, the usual case, is not copied
    if len(body) < length:
        raise StoreError("short", f"{reply.what}: {len(body)} of {length} bytes came", retryable=True)
    if len(body) > length:
        raise StoreError("bad_reply", f"{reply.what}: more than the {length} bytes asked for", retryable=True)
    return body


def status_error(status: int, headers: Mapping[str, str], what: str) -> StoreError:
    """The error a status stands for; the body is not read, since it may be as long as it likes (416)."""
    wait_s = parse_retry_after(headers.get("Retry-After", ""))
    if status == 404:
        return StoreError("not_found", f"{what}: not there")
    if status in (401, 403):
        return StoreError("denied", f"{what}: refused (HTTP {status})", "check the credentials for this store")
    if status == 429 or (status == 503 and wait_s is not None):
        return StoreError("throttled", f"{what}: asked to wait (HTTP {status})", retryable=True, retry_after_s=wait_s)
    if status in _RETRYABLE:
        return StoreError("unavailable", f"{what}: HTTP {status}", retryable=True, retry_after_s=wait_s)
    if status == 416:
        return StoreError(
            "short", f"{what}: the object ends before the range (HTTP 416)", "push it again", retryable=True
        )
    if status in (405, 501):
        return StoreError("unsupported", f"{what}: not allowed by this store (HTTP {status})")
    if status in (413, 507):
        return StoreError("no_space", f"{what}: the store has no room (HTTP {status})")
    return StoreError("bad_reply", f"{what}: HTTP {status}", retryable=status >= 500)


def parse_retry_after(value: str) -> float | None:
    """Seconds of a ``Retry-After`` (a number or a date), or None when there is none that makes sense."""
    if value.isascii() and value.isdigit() and len(value) < 10:
        return float(value)
    if not value:
        return None
    try:
        then = email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, OverflowError, TypeError):
        return None
    return max(0.0, then - time.time())
