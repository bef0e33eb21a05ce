"""Messages of the control socket: four bytes of length, then one JSON object. Bounded on both ends."""

from __future__ import annotations

import json
from struct import Struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

_LENGTH = Struct("=I")
MAX_BYTES = 32 << 20  # a trace of a million accesses


class BadMessage(ValueError):
    """Not one of our messages; the connection is of no more use."""


def send(link: socket.socket, message: dict[str, Any]) -> None:
    """Send one."""
    body = json.dumps(message).encode()
    link.sendall(_LENGTH.pack(len(body)) + body)


def receive(link: socket.socket) -> dict[str, Any]:
    """Receive one.

    Raises:
        EOFError: the other end closed before it was whole.
        BadMessage: too long, or no JSON object.
    """
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    if length > MAX_BYTES:
        raise BadMessage(f"a message of {length} bytes; {MAX_BYTES} at most")
    try:
        message = json.loads(_exactly(link, length))
    except (ValueError, RecursionError) as err:
        raise BadMessage(f"a message that is no JSON: {err}") from err
    if not isinstance(message, dict):
        raise BadMessage("a message must be a JSON object")
    return message


def _exactly(link: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = link.recv(min(length, 1 << 20))
        if not part:
            raise EOFError("the connection ended within a message")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
