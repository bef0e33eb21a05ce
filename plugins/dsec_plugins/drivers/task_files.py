"""Files of a task's own directory: templates, artifacts, the payload of a dispatch."""

from __future__ import annotations

import os
import stat

from dsec_plugins.drivers.schema import ConfigError

MAX_BYTES = 64 * 1024 * 1024


def read_file(directory: str, name: str, where: str) -> bytes:
    """The content of a regular file below the directory; ConfigError names the setting.

    An artifact may hold links: one that leads out of the directory is refused, as we read as the host's root.
    """
    base = os.path.realpath(directory)
    path = os.path.realpath(os.path.join(base, name))
    if name.startswith("/") or os.path.commonpath([base, path]) != base:
        raise ConfigError(f"{where}: {name!r} leads out of the task's directory")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            regular = stat.S_ISREG(os.fstat(fd).st_mode)
            data = _read_all(fd) if regular else b""
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"{where}: {name!r}: {error.strerror}") from error
    if not regular:
        raise ConfigError(f"{where}: {name!r} is no regular file")
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{where}: {name!r} is over {MAX_BYTES} bytes")
    return data


def _read_all(fd: int) -> bytes:
    """At most one byte more than is allowed."""
    parts, size = [], 0
    while size <= MAX_BYTES and (part := os.read(fd, MAX_BYTES + 1 - size)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)
