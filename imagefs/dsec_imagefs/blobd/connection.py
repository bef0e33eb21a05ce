"""The FUSE connection of one mount: made, negotiated and asked about. See fuse(4) and the kernel's fuse.rst."""

from __future__ import annotations

import errno
import os
import select
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_imagefs.blobd.fuse_wire import HAS_RESEND, MAX_READ_BYTES, PASSTHROUGH, REQUEST_BYTES, answer_init
from dsec_imagefs.errors import SyscallError
from dsec_imagefs.mountinfo import read_mounts
from dsec_imagefs.syscalls import MNT_DETACH, MS_NODEV, MS_NOSUID, MS_RDONLY, mount_fs, umount

if TYPE_CHECKING:
    from dsec_imagefs.blobd.fuse_wire import Negotiated

SUBTYPE = "dsec-blobd"
INIT_TIMEOUT_S = 10.0
_CONNECTIONS = Path("/sys/fs/fuse/connections")
_MS_NOEXEC = 0x8


def detach_stale(target: Path) -> int:
    """Detach whatever is mounted at the place, dead or alive; returns how many mounts that were.

    Image mounts that stand on them keep their files open: they go on answering EIO until they are unmounted too.
    """
    found = [one for one in read_mounts() if one.target == str(target)]
    for _ in found:
        umount(target, MNT_DETACH)
    return len(found)


def mount_blobs(target: Path, *, resend: bool, passthrough: bool) -> tuple[int, Negotiated]:
    """Mount, and settle with the kernel what we can; returns the connection's descriptor.

    Raises:
        SyscallError: no FUSE here, no right to mount, or a kernel before 5.4 (ENOSYS).
    """
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as err:
        raise SyscallError("open", err.errno or 0, "/dev/fuse", "images are then fetched whole") from err
    try:
        target.mkdir(mode=0o700, exist_ok=True)
        # No allow_other: names are for root. Whoever reads an EROFS mount over them needs no right here.
        options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,max_read={MAX_READ_BYTES}"
        mount_fs(SUBTYPE, target, f"fuse.{SUBTYPE}", MS_RDONLY | MS_NOSUID | MS_NODEV | _MS_NOEXEC, options)
        try:
            return fd, _negotiate(fd, resend=resend, passthrough=passthrough)
        except BaseException:
            umount(target, MNT_DETACH)
            raise
    except BaseException:
        os.close(fd)
        raise


def _negotiate(fd: int, *, resend: bool, passthrough: bool) -> Negotiated:
    if not select.select([fd], [], [], INIT_TIMEOUT_S)[0]:
        raise SyscallError("read", errno.ETIMEDOUT, "/dev/fuse")
    wanted = (HAS_RESEND if resend else 0) | (PASSTHROUGH if passthrough else 0)
    try:
        reply, settled = answer_init(os.read(fd, REQUEST_BYTES), wanted=wanted)
    except ValueError as err:
        raise SyscallError("FUSE_INIT", errno.ENOSYS, "/dev/fuse", str(err)) from err
    os.write(fd, reply)
    return settled


def connection_number(target: Path) -> int:
    """The number of the mount in /sys/fs/fuse/connections: its device's minor number; 0 when it is not mounted."""
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines():
        fields = line.split(" ")
        if fields[4] == str(target).replace(" ", "\\040") and " - fuse" in line:
            return int(fields[2].partition(":")[2])
    return 0


def may_wait(number: int) -> bool:
    """Whether readers may be waiting for answers: told by fusectl; yes where that is not mounted."""
    try:
        return int((_CONNECTIONS / str(number) / "waiting").read_text()) > 0
    except (OSError, ValueError):
        return True
