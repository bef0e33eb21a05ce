"""One read-only EROFS mount per image root and host, shared by everybody who asks for its digest.

What is mounted is the merged metadata, with the layers' data files as its devices: those that are here whole as they
are, others through the blob server. Who uses what is on disk (`users` in
the store, by table) and what is mounted is asked of the kernel, so a daemon that died or was replaced loses nothing:
the next `acquire` finds the mount and adopts it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_imagefs.durable import locked, write_durably
from dsec_imagefs.erofs.reader import ErofsReader
from dsec_imagefs.errors import ImageError, SyscallError
from dsec_imagefs.image import digest_hex
from dsec_imagefs.lazy import IMAGE_SETTINGS, LazyBlobs
from dsec_imagefs.loop import loop_device
from dsec_imagefs.mountapi import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY, mount_erofs
from dsec_imagefs.mountinfo import Mount, backing_file, read_mounts
from dsec_imagefs.syscalls import MNT_DETACH, MS_BIND, MS_PRIVATE, mount_fs, umount

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from dsec_imagefs.blobd import Settings
    from dsec_imagefs.image import Image
    from dsec_imagefs.store import ImageStore

# The mount is for overlays to stand on; overlay judges suid and devices by its own flags. What these two flags
# refuse is a host user who reaches the mounted tree directly.
_FLAGS = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID


class MountTable:
    """Mounted image roots below one directory. Synchronous; safe between threads and processes."""

    def __init__(
        self, store: ImageStore, mount_dir: Path, *, force_loop: bool = False, blobs: Settings | None = None
    ) -> None:
        """Nothing is mounted yet.

        Args:
            store: where the images are.
            mount_dir: gets a directory for each mounted root.
            force_loop: take the way of old kernels, for tests and for broken drivers.
            blobs: settings of the blob server, if it is this table that starts it.
        """
        mount_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._store = store
        self._dir = mount_dir.resolve()
        self._users = store.users.of_table(self._dir)
        self._lock = self._dir / ".lock"
        self._force_loop = force_loop
        self._lazy = LazyBlobs(store, blobs or IMAGE_SETTINGS)

    def acquire(self, digest: str, user: str = "node") -> Path:
        """Note `user` (any short id) as a user of the image and return its mounted root.

        Args:
            digest: ``sha256:...`` of an image in the store.
            user: who uses it; asking twice counts once.

        Raises:
            ImageError: ``not_found``, or ``syscall`` (a SyscallError) when the mount fails; the user is then not noted.
        """
        image = self._store.resolve(digest)
        root = digest_hex(image.rootfs)
        with self._exclusive():
            with self._store.exclusive():
                if not self._store.objects.path(root).is_file():
                    raise ImageError("not_found", f"the root {image.rootfs} of {digest} is not in the store")
                noted = self._users.add(root, user, image.digest)
            try:
                return self._mounted(image, root)
            except BaseException:
                if noted:
                    self._users.remove(user, image.digest)
                raise

    def release(self, digest: str, user: str = "node") -> None:
        """Forget a user of the image; idempotent, also after the image was removed by force.

        The mount stays until `unmount_unused`, so that the next start is quick.
        """
        full = digest if digest.startswith("sha256:") and len(digest) == 71 else self._store.resolve(digest).digest
        self._users.remove(user, full)

    def users(self, digest: str) -> frozenset[str]:
        """Everybody noted, through this table, as using the image or another one with the same root."""
        image = self._store.resolve(digest)
        return self._users.of(digest_hex(image.rootfs))

    def is_on_demand(self, digest: str) -> bool:
        """Whether the mounted image stands on the blob server, whose death `acquire` would mend."""
        return self._held_path(digest_hex(self._store.resolve(digest).rootfs)).exists()

    def retain_only(self, users: set[str]) -> int:
        """After a recovery: forget every user that is not among these; returns how many."""
        return self._users.retain_only(users)

    def retain(self, user: str, digests: Collection[str]) -> int:
        """Forget this user's notes about all images but these, also ones from before a restart; returns how many."""
        return self._users.retain(user, digests)

    def mounted(self) -> dict[str, Path]:
        """Root digest -> mounted path, as the kernel tells it."""
        return {f"sha256:{root}": Path(found.target) for root, found in self._ours().items()}

    def unmount_unused(self) -> tuple[str, ...]:
        """Unmount roots without users; a root that something still has open is left for the next time."""
        gone = []
        with self._exclusive():
            for root, found in self._ours().items():
                if self._users.of(root):
                    continue
                try:
                    umount(Path(found.target))
                except SyscallError as err:
                    if err.errno == errno.EBUSY:
                        continue
                    raise
                Path(found.target).rmdir()
                self._release_data(root)
                gone.append(f"sha256:{root}")
        return tuple(gone)

    def close(self) -> tuple[str, ...]:
        """`unmount_unused`, and when nothing is left, also give the directory's mount and an idle blob server back."""
        gone = self.unmount_unused()
        with self._exclusive():
            if not self._ours():
                self._lazy.stop_idle()
            if not self._ours() and any(m.target == str(self._dir) for m in read_mounts()):
                umount(self._dir, MNT_DETACH)  # our own lock file below keeps it busy
        return gone

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with locked(self._lock):
            yield

    def _ours(self) -> dict[str, Mount]:
        found: dict[str, Mount] = {}
        for one in read_mounts():
            target = Path(one.target)
            if one.fs_type == "erofs" and target.parent == self._dir and len(target.name) == 64:
                found[target.name] = one
        return found

    def _mounted(self, image: Image, root: str) -> Path:
        target = self._dir / root
        found = self._ours().get(root)
        if found is not None:
            behind = Path(backing_file(found)).name
            if behind != root and len(behind) == len(root):
                raise ImageError("conflict", f"{target} is a mount of {behind}", "unmount it")
            if not (self._held_path(root).exists() and self._lazy.is_stale(self._hold_of(root))):
                return target
            umount(target, MNT_DETACH)  # its server died whole: who stands on it has EIO, new users get a good one
            self._release_data(root)
        self._make_private()
        target.mkdir(mode=0o755, exist_ok=True)
        try:
            self._mount(image, root, target)
        except BaseException:
            self._release_data(root)
            raise
        return target

    def _mount(self, image: Image, root: str, target: Path) -> None:
        metadata = self._store.objects.path(root)
        devices = self._devices(image, root)
        if not self._force_loop:
            try:
                mount_erofs(str(metadata), target, devices=[str(path) for path in devices], flags=_FLAGS)
                return
            except SyscallError as err:
                # ENOTBLK: the kernel is older than 6.12, or the store lies on a stacked file system.
                if err.errno != errno.ENOTBLK:
                    raise
        with ExitStack() as stack:
            loops = [stack.enter_context(loop_device(path)) for path in (metadata, *devices)]
            mount_erofs(loops[0], target, devices=loops[1:], flags=_FLAGS)

    def _devices(self, image: Image, root: str) -> list[Path]:
        """The data files of a merged image in the order of its device table."""
        layers = {layer.blob.digest: layer for layer in self._store.layers(image)}
        metadata = self._store.objects.path(root)
        table = _device_table(metadata)
        if any(self._store.objects.origin(blob) for blob in table if blob in layers):
            # Before anything is held: what is held has to be known to whoever unmounts, also after our death.
            write_durably(self._held_path(root), json.dumps(table).encode())
        paths = []
        for blob in table:
            if blob not in layers:
                raise ImageError("corrupt", f"{metadata} wants data {blob[:64]!r}, which none of the layers has")
            paths.append(self._lazy.device(layers[blob], self._hold_of(root)))
        return paths

    def _hold_of(self, root: str) -> str:
        """The name under which our mount of a root holds data that the blob server could evict."""
        return f"{root[:16]}@{hashlib.sha256(os.fsencode(self._dir)).hexdigest()[:12]}"

    def _held_path(self, root: str) -> Path:
        return self._dir / f".{root}.held"

    def _release_data(self, root: str) -> None:
        path = self._held_path(root)
        if path.exists():
            self._lazy.release(json.loads(path.read_bytes()), self._hold_of(root))
            path.unlink()

    def _make_private(self) -> None:
        """Be a private mount of our own, so that no mount here shows up (and stays busy) in other namespaces."""
        here = [m for m in read_mounts() if m.target == str(self._dir)]
        if not here:
            mount_fs(str(self._dir), self._dir, None, MS_BIND)
        if not here or here[-1].shared:
            mount_fs("none", self._dir, None, MS_PRIVATE)


def _device_table(metadata: Path) -> list[str]:
    fd = os.open(metadata, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [device.blob for device in ErofsReader(fd, str(metadata)).devices]
    finally:
        os.close(fd)
