"""The one line on stdout that starts a plugin, and what must be true of the descriptors before and after it."""

from __future__ import annotations

import hmac
import io
import os
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

CORE_PROTOCOL = 1
_SOCKET_LIMIT = 107  # sun_path less its NUL, unix(7)


class HandshakeError(Exception):
    """The process was not started by a host that speaks our protocol; the text is for the person at the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What host and plugin must agree on. cookie_*: the environment variable by which a host identifies itself."""

    cookie_key: str
    cookie_value: str
    version: int


def check_environment(protocol: Protocol, environ: Mapping[str, str]) -> None:
    """HandshakeError when the cookie is missing or wrong, no version is shared, or TLS (not supported) is demanded."""
    given = environ.get(protocol.cookie_key, "")
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), protocol.cookie_value.encode()):
        raise HandshakeError(
            "This program is a plugin. It is started by the program that it extends, not by hand: put it into that "
            "program's plugin directory."
        )
    if environ.get("PLUGIN_CLIENT_CERT"):
        raise HandshakeError("The host demands AutoMTLS (PLUGIN_CLIENT_CERT), which this plugin does not speak.")
    offered = environ.get("PLUGIN_PROTOCOL_VERSIONS", "")
    if offered and str(protocol.version) not in [part.strip() for part in offered.split(",")]:
        raise HandshakeError(f"The host speaks plugin protocol {offered}; this plugin speaks {protocol.version}.")


def make_socket_dir(environ: Mapping[str, str], prefix: str) -> Path:
    """A fresh directory of mode 0700 whose socket path fits sun_path; stale ones of dead plugins are removed first."""
    parent = Path(environ.get("PLUGIN_UNIX_SOCKET_DIR") or tempfile.gettempdir())
    if len(os.fsencode(parent)) + len(prefix) + 16 > _SOCKET_LIMIT:
        parent = Path("/tmp")
    _sweep(parent, prefix)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def _sweep(parent: Path, prefix: str) -> None:
    """Remove directories of ours whose socket refuses connections: grpc unlinks its socket only on a clean end."""
    for directory in parent.glob(f"{prefix}*"):
        path = directory / "s"
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(0.2)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                directory.rmdir()


def handshake_line(protocol: Protocol, path: Path) -> bytes:
    """`1|<version>|unix|<path>|grpc|` and a newline."""
    return f"{CORE_PROTOCOL}|{protocol.version}|unix|{path}|grpc|\n".encode()


def claim_stdout() -> int:
    """Keep the real stdout for the handshake alone; fd 1 itself goes to fd 2, so that a stray print can't spoil it."""
    kept = os.dup(1)
    os.set_inheritable(kept, False)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what is printed is seen when it is printed, in the host's log
    return kept


def announce(kept: int, line: bytes) -> None:
    """Write the line, then point fd 1 at /dev/null: the host stops draining it after one over-long line."""
    while line:
        line = line[os.write(kept, line) :]
    os.close(kept)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
