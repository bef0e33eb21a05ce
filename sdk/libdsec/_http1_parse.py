"""HTTP/1.1 replies from bytes to status, headers and body (RFC 9112), bit by bit. Pure.

Only what a client of ours meets: no trailers for the caller, no upgrade, no other coding than chunked. What is doubtful
(two lengths, a folded header, bytes nobody asked for) is Malformed rather than guessed at.
"""

from __future__ import annotations

from typing import Final

HEAD_MAX: Final = 64 * 1024
LINE_MAX: Final = 4096  # a chunk's size with extensions
_HEAD, _SIZED, _TO_THE_END, _CHUNK_SIZE, _CHUNK, _CHUNK_END, _TRAILER = range(7)
_BODILESS: Final = frozenset({204, 304})


class Malformed(ValueError):
    """The peer does not speak HTTP/1.1 as we know it."""


class ReplyParser:
    """One reply. `status` is 0 until the head is whole; then `headers` (names in lower case) and `length` are set.

    pieces: the body as it came, for the caller to take. length: of the body, None when only its end will tell.
    is_whole: nothing more belongs to it. keeps: the connection may carry another exchange after it.
    """

    __slots__ = ("_left", "_rest", "_state", "headers", "is_whole", "keeps", "length", "pieces", "status")

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.length: int | None = None
        self.pieces: list[bytes] = []
        self.is_whole = False
        self.keeps = False
        self._rest = b""  # of a line or head that is not whole
        self._state = _HEAD
        self._left = 0

    def feed(self, data: bytes) -> None:
        """Take bytes. Malformed when they make no sense."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        while data:
            if self.is_whole:
                raise Malformed("bytes behind the end of a reply")
            data = _STEPS[self._state](self, data)

    def feed_eof(self) -> bool:
        """The peer has closed; whether the reply is whole by that."""
        if self._state == _TO_THE_END:
            self.is_whole = True
        return self.is_whole

    def _head(self, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0 or end > HEAD_MAX:
            if len(data) > HEAD_MAX:
                raise Malformed(f"a head of more than {HEAD_MAX} bytes")
            self._rest = data
            return b""
        status, newest, headers = parse_head(data[:end])
        if status >= 200:
            self._begin_body(status, headers, newest=newest)
        elif status == 101:
            raise Malformed("it switches protocols unasked")
        return data[end + 4 :]  # behind an interim reply the real one follows

    def _begin_body(self, status: int, headers: dict[str, str], *, newest: bool) -> None:
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        words = [word.strip() for word in headers.get("connection", "").lower().split(",")]
        self.keeps = newest and "close" not in words
        if status in _BODILESS:
            self.length, self.is_whole = 0, True
        elif coding is not None:
            if coding.lower() != "chunked" or length is not None:
                raise Malformed(f"a body coded {coding[:40]!r}, of length {length}")
            self._state = _CHUNK_SIZE
        elif length is not None:
            self.length = self._left = _number(length, 10)
            self._state, self.is_whole = _SIZED, not self._left
        else:
            self._state, self.keeps = _TO_THE_END, False
        self.status, self.headers = status, headers

    def _sized(self, data: bytes) -> bytes:
        part = data if len(data) <= self._left else data[: self._left]
        self.pieces.append(part)
        self._left -= len(part)
        self.is_whole = not self._left
        return data[len(part) :]

    def _to_the_end(self, data: bytes) -> bytes:
        self.pieces.append(data)
        return b""

    def _line(self, data: bytes) -> tuple[bytes | None, bytes]:
        end = data.find(b"\r\n")
        if end > LINE_MAX or (end < 0 and len(data) > LINE_MAX):
            raise Malformed(f"a line of more than {LINE_MAX} bytes in a chunked body")
        if end < 0:
            self._rest = data
            return None, b""
        return data[:end], data[end + 2 :]

    def _chunk_size(self, data: bytes) -> bytes:
        line, data = self._line(data)
        if line is not None:
            self._left = _number(line.partition(b";")[0].rstrip(b" \t").decode("latin-1"), 16)
            self._state = _CHUNK if self._left else _TRAILER
        return data

    def _chunk(self, data: bytes) -> bytes:
        part = data if len(data) <= self._left else data[: self._left]
        self.pieces.append(part)
        self._left -= len(part)
        if not self._left:
            self._state = _CHUNK_END
        return data[len(part) :]

    def _chunk_end(self, data: bytes) -> bytes:
        line, data = self._line(data)
        if line:
            raise Malformed("a chunk is longer than its size")
        if line is not None:
            self._state = _CHUNK_SIZE
        return data

    def _trailer(self, data: bytes) -> bytes:
        line, data = self._line(data)
        self._left += len(line or b"")
        if self._left > HEAD_MAX:
            raise Malformed(f"trailers of more than {HEAD_MAX} bytes")
        self.is_whole = line == b""
        return data


_STEPS: Final = (
    ReplyParser._head,
    ReplyParser._sized,
    ReplyParser._to_the_end,
    ReplyParser._chunk_size,
    ReplyParser._chunk,
    ReplyParser._chunk_end,
    ReplyParser._trailer,
)


def parse_head(raw: bytes) -> tuple[int, bool, dict[str, str]]:
    """Status, is it HTTP/1.1 (and not 1.0), and headers by lower-case name; one that came twice has both values."""
    first, *lines = raw.decode("utf-8", "surrogateescape").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (status.isascii() and status.isdecimal() and len(status) == 3):
        raise Malformed(f"no status line: {first[:80]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name.strip() != name:
            raise Malformed(f"no header: {line[:80]!r}")
        name, value = name.lower(), value.strip(" \t")
        known = headers.get(name)
        if known is not None and name != "content-length":
            value = f"{known}, {value}"
        elif known is not None and known != value:
            raise Malformed(f"two lengths: {known[:20]!r} and {value[:20]!r}")
        headers[name] = value
    return int(status), version == "HTTP/1.1", headers


def _number(text: str, base: int) -> int:
    digits = text.isascii() and text.isalnum() and len(text) <= 18
    try:
        return int(text if digits else "-", base)
    except ValueError as error:
        raise Malformed(f"no length: {text[:40]!r}") from error
