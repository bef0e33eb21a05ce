"""The socket of a container's dsec-init, on the host: bound below its runtime directory, reached from nowhere inside.

sun_path holds 107 bytes and data directories may be longer, so both ends go through /proc/self/fd (unix(7)).
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from nomad_dsec.backends.container.spec import SOCKET_NAME

if TYPE_CHECKING:
    from pathlib import Path

BACKLOG = 64


def bind_listener(run_dir: Path) -> socket.socket:
    """A listening stream socket at run_dir/init.sock, which must not exist yet. The caller closes it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
        finally:
            os.close(directory)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


async def connect_socket(run_dir: Path) -> socket.socket:
    """A connected, non-blocking stream; OSError when nobody listens. Connecting to a unix socket does not wait."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        stream.setblocking(False)
        directory = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            stream.connect(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
        finally:
            os.close(directory)
    except BaseException:
        stream.close()
        raise
    return stream
