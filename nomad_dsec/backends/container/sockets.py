"""The socket of a container's dsec-init, on the host: bound outside of its root, so that nothing inside can reach it.

sun_path holds 107 bytes and data directories may be longer, so both ends go through /proc/self/fd (unix(7)). All of a
node lie in one directory: to remove a directory for each sandbox can cost milliseconds (ext4 with discard).
"""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BACKLOG = 64


def bind_listener(path: Path) -> socket.socket:
    """A listening stream socket at a path that must not exist yet. The caller closes it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _short_name(path) as name:
            listener.bind(name)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


async def connect_socket(path: Path) -> socket.socket:
    """A connected, non-blocking stream; OSError when nobody listens. Connecting to a unix socket does not wait."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        stream.setblocking(False)
        with _short_name(path) as name:
            stream.connect(name)
    except BaseException:
        stream.close()
        raise
    return stream


@contextmanager
def _short_name(path: Path) -> Iterator[str]:
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
