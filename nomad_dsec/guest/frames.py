"""The codec of PROTOCOL.md: frames and fields to and from bytes. Pure. Numbers are those of c/wire.h."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libdsec.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = 0x43455344 << 32 | 1
MAX_PAYLOAD = 2 * 1024 * 1024
MAX_SMALL = 160 * 1024
MAX_DATA = 64 * 1024
WINDOW = 256 * 1024
HEADER = struct.Struct("<IBBHI")
OUTPUT_PREFIX = struct.Struct("<BQ")
_FIELD = struct.Struct("<HI")
_INT = struct.Struct("<Q")
_INT_FIELD = struct.Struct("<HIQ")
_RLIMIT = struct.Struct("<IQQ")
_MASK = 2**64 - 1


class Frame(enum.IntEnum):
    """Frame types."""

    HELLO = 0x01
    PING = 0x02
    SHUTDOWN = 0x03
    CREDIT = 0x04
    CANCEL = 0x05
    DATA = 0x06
    DATA_END = 0x07
    EXEC = 0x10
    ATTACH = 0x11
    SIGNAL = 0x12
    RESIZE = 0x13
    LIST_EXECS = 0x14
    FORGET = 0x15
    READ = 0x20
    WRITE = 0x21
    LIST_DIR = 0x22
    STAT = 0x23
    MKDIR = 0x24
    MOVE = 0x25
    REMOVE = 0x26
    CHMOD = 0x27
    DOWNLOAD = 0x28
    UPLOAD = 0x29
    WATCH = 0x2A
    CLOCK_SET = 0x30
    RESEED = 0x31
    POLICY_PROBE = 0x32
    HELLO_OK = 0x81
    OK = 0x82
    ERROR = 0x83
    ITEM = 0x84
    STARTED = 0x90
    OUTPUT = 0x91
    EXITED = 0x92


class Tag(enum.IntEnum):
    """Fields."""

    VERSION = 1
    FEATURES = 2
    MAX_PAYLOAD = 3
    BOOT_ID = 4
    CODE = 5
    MESSAGE = 6
    FIELD = 7
    ERRNO = 8
    EXEC_ID = 10
    ARGV = 11
    ENV = 12
    CWD = 13
    USER = 14
    RLIMIT = 15
    PTY = 16
    STDIN = 17
    TIMEOUT_MS = 18
    MAX_OUTPUT = 19
    CREDIT = 20
    COLLECT = 21
    NO_NEW_PRIVS = 22
    SINCE = 23
    SIGNUM = 24
    TREE = 25
    PID = 26
    EXIT_CODE = 27
    TERMSIG = 28
    TIMED_OUT = 29
    TOTAL = 30
    HEAD_END = 31
    TAIL_START = 32
    DURATION_US = 33
    CPU_US = 34
    MAXRSS_KIB = 35
    START_CODE = 36
    RUNNING = 37
    BACKGROUND = 38
    HOST_SIGNAL = 39
    ATTACHED = 40
    OOM_KILLED = 41
    HOLD = 42
    PATH = 50
    TARGET = 51
    OFFSET = 52
    LENGTH = 53
    MODE = 54
    APPEND = 55
    PARENTS = 56
    ATOMIC = 57
    SIZE = 58
    RECURSIVE = 59
    FOLLOW = 60
    REPLACE = 61
    KIND = 62
    UID = 63
    GID = 64
    MTIME_NS = 65
    NLINK = 66
    LINK = 67
    ENTRY = 68
    NAME = 69
    REASON = 70
    COOKIE = 71
    IS_DIR = 72
    KEEP_OWNER = 73
    MISSING_OK = 74
    FILES = 75
    CLOCK_NS = 80
    ENTROPY = 81
    ATTEMPT = 82
    ARG = 83
    EXPECT = 84


_BYTES_TAGS = frozenset(
    {
        Tag.BOOT_ID, Tag.CODE, Tag.MESSAGE, Tag.FIELD, Tag.EXEC_ID, Tag.ARGV, Tag.ENV, Tag.CWD, Tag.USER, Tag.RLIMIT,
        Tag.START_CODE, Tag.PATH, Tag.TARGET, Tag.KIND, Tag.LINK, Tag.NAME, Tag.REASON, Tag.ENTROPY,
    }
)  # fmt: skip
_NESTED_TAGS = frozenset({Tag.ENTRY, Tag.ATTEMPT})
_KIND: tuple[str, ...] = tuple(
    "B" if t in _BYTES_TAGS else "N" if t in _NESTED_TAGS else "I" if t in set(Tag) else "" for t in range(128)
)
Fields = list[tuple[int, int | bytes]]


@dataclass(frozen=True, slots=True)
class RawFrame:
    """One frame; the payload is not looked into yet."""

    type: int
    stream: int
    payload: bytes


def encode_fields(fields: Fields) -> bytes:
    """Field list to bytes; integers are taken modulo 2**64, so that negative ones work."""
    parts: list[bytes] = []
    for tag, value in fields:
        if isinstance(value, int):
            parts.append(_INT_FIELD.pack(tag, 8, value & _MASK))
        else:
            parts.append(_FIELD.pack(tag, len(value)))
            parts.append(value)
    return b"".join(parts)


def encode_frame(frame_type: int, stream: int, payload: bytes = b"") -> bytes:
    """One whole frame. ProtocolError when the payload is larger than the guest takes."""
    bound = MAX_PAYLOAD if frame_type == Frame.EXEC else MAX_DATA if frame_type == Frame.DATA else MAX_SMALL
    if len(payload) > bound:
        raise ProtocolError("frame_too_large", f"{len(payload)} bytes where {bound} are allowed")
    return HEADER.pack(len(payload), frame_type, 0, 0, stream) + payload


def encode_credit(stream: int, count: int) -> bytes:
    """A CREDIT frame for `count` more bytes."""
    return HEADER.pack(8, Frame.CREDIT, 0, 0, stream) + _INT.pack(count)


def encode_rlimit(resource: int, soft: int, hard: int) -> bytes:
    """The value of a RLIMIT field."""
    return _RLIMIT.pack(resource, soft & _MASK, hard & _MASK)


def decode_credit(payload: bytes) -> int:
    """The count in a CREDIT frame."""
    if len(payload) != 8:
        raise ProtocolError("bad_frame", "CREDIT holds 8 bytes", field="credit")
    return int(_INT.unpack(payload)[0])


def iter_fields(payload: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields in order; ENTRY and ATTEMPT come as bytes, to be iterated again. Ignorable unknown ones are left out.

    Raises ProtocolError naming the field.
    """
    at, end = 0, len(payload)
    while at < end:
        if end - at < 6:
            raise ProtocolError("bad_field", "fields are cut short")
        tag, size = _FIELD.unpack_from(payload, at)
        at += 6
        if size > end - at:
            raise ProtocolError("bad_field", f"field {tag} is longer than its frame", field=tag_name(tag))
        kind = _KIND[tag] if tag < 128 else ""
        if kind == "I":
            if size != 8:
                raise ProtocolError("bad_field", f"an integer of {size} bytes", field=tag_name(tag))
            yield tag, _INT.unpack_from(payload, at)[0]
        elif kind:
            yield tag, payload[at : at + size]
        elif not tag & 0x8000:
            raise ProtocolError("bad_field", f"unknown field {tag}")
        at += size


def tag_name(tag: int) -> str:
    """Lower-case name of a field, "" when unknown."""
    try:
        return Tag(tag).name.lower()
    except ValueError:
        return ""


class Record:
    """Fields of a frame by tag, the first of each. A missing one reads as 0 or empty; `has` tells."""

    __slots__ = ("_fields",)

    def __init__(self, payload: bytes) -> None:
        self._fields: dict[int, int | bytes] = {}
        for tag, value in iter_fields(payload):
            self._fields.setdefault(tag, value)

    def has(self, tag: int) -> bool:
        """Is the field there."""
        return tag in self._fields

    def num(self, tag: int, otherwise: int = 0) -> int:
        """Its integer."""
        value = self._fields.get(tag, otherwise)
        return value if isinstance(value, int) else otherwise

    def signed(self, tag: int) -> int:
        """Its integer, as a signed one."""
        value = self.num(tag)
        return value - 2**64 if value >= 2**63 else value

    def raw(self, tag: int) -> bytes:
        """Its bytes."""
        value = self._fields.get(tag, b"")
        return value if isinstance(value, bytes) else b""

    def text(self, tag: int) -> str:
        """Its bytes as text."""
        return self.raw(tag).decode("utf-8", "replace")


def entries(payload: bytes) -> list[Record]:
    """The ENTRY fields of a payload."""
    return [Record(value) for tag, value in iter_fields(payload) if tag == Tag.ENTRY and isinstance(value, bytes)]


class FrameReader:
    """Splits a byte stream into frames; holds at most one frame that is not whole."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[RawFrame]:
        """Add bytes; returns the frames that are whole now. ProtocolError when framing is lost."""
        buffer = self._buffer
        buffer += data
        frames: list[RawFrame] = []
        at, end = 0, len(buffer)
        while end - at >= HEADER.size:
            length, kind, zero, zeros, stream = HEADER.unpack_from(buffer, at)
            if zero or zeros or length > MAX_PAYLOAD:
                raise ProtocolError("bad_frame", "not a frame header", field="length")
            if end - at - HEADER.size < length:
                break
            at += HEADER.size
            frames.append(RawFrame(kind, stream, bytes(buffer[at : at + length])))
            at += length
        del buffer[:at]
        return frames

    @property
    def pending(self) -> int:
        """Bytes held of a frame that is not whole."""
        return len(self._buffer)
