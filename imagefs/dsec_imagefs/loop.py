"""Read-only loop devices by ioctl, for kernels that can't mount EROFS from a file (before 6.12). See loop(4)."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dsec_imagefs.errors import SyscallError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOOP_CTL_GET_FREE = 0x4C82
LOOP_CONFIGURE = 0x4C0A  # Linux 5.8
LO_FLAGS_READ_ONLY = 1
LO_FLAGS_AUTOCLEAR = 4
_TRIES = 50

# struct loop_config: fd, block_size, struct loop_info64 (232 bytes, lo_flags at 52), 64 reserved bytes.
_LOOP_CONFIG = struct.Struct("=II52xI64s112x64x")
assert _LOOP_CONFIG.size == 304


@contextmanager
def loop_device(image: Path) -> Iterator[str]:
    """A loop device on a file, with AUTOCLEAR: once mounted, the unmount frees it; unmounted, leaving does."""
    image_fd = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
    try:
        device, device_fd = _configure(image_fd, image)
        try:
            yield device
        finally:
            os.close(device_fd)
    finally:
        os.close(image_fd)


def _configure(image_fd: int, image: Path) -> tuple[str, int]:
    config = _LOOP_CONFIG.pack(image_fd, 4096, LO_FLAGS_READ_ONLY | LO_FLAGS_AUTOCLEAR, os.fsencode(image.name)[:63])
    for _ in range(_TRIES):
        try:
            control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
            try:
                device = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
            finally:
                os.close(control)
            device_fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as err:
            raise SyscallError("open", err.errno or 0, "/dev/loop-control", "load the loop module") from err
        try:
            fcntl.ioctl(device_fd, LOOP_CONFIGURE, config)
        except OSError as err:
            os.close(device_fd)
            if err.errno == errno.EBUSY:  # another process took the free one first
                continue
            raise SyscallError("ioctl LOOP_CONFIGURE", err.errno or 0, f"{device} <- {image}") from err
        return device, device_fd
    raise SyscallError("ioctl LOOP_CONFIGURE", errno.EBUSY, str(image))
