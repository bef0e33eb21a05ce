"""Data that is not here yet: attached to the blob server, which fetches what is read; or fetched whole without one."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_imagefs.blobd import BlobClient, BlobdError, BlobSpec, Settings, ensure_server
from dsec_imagefs.blobd.settings import Places
from dsec_imagefs.durable import sync_directory
from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dsec_imagefs.layer.manifest import Layer
    from dsec_imagefs.objects import Origin
    from dsec_imagefs.store import ImageStore
    from dsec_imagefs.tree import Progress

# In a burst many blocks are fetched at once anyway: reading ahead of tasks that read 8 % of their images fetched a
# quarter more than they read, and was no quicker (tests/bench/bench_images.py).
IMAGE_SETTINGS = Settings(readahead_blocks=0)
FETCH_TIMEOUT_S = 3600.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class LazyBlobs:
    """The data of one store's layers that lies elsewhere. Holds are named by the mount that stands on the data."""

    store: ImageStore
    settings: Settings = IMAGE_SETTINGS

    def device(self, layer: Layer, user: str) -> Path:
        """A file that has all of a layer's data, at the latest when it is read.

        What is here whole is given to the kernel as it is; it is held too where the server might evict it.

        Args:
            layer: one with data.
            user: who holds it from now on, see `release`.

        Raises:
            ImageError: ``not_found`` when it has no origin; the server's errors; StoreError.
        """
        objects, digest = self.store.objects, layer.blob.digest
        if objects.has_whole_blob(digest, layer.blob.size) and not self._is_attached(digest):
            return objects.blob(digest)
        answer = self.attach(layer, user=user)
        return objects.blob(digest) if answer["complete"] else Path(answer["direct"])

    def attach(self, layer: Layer, *, user: str = "", record_s: float = 0.0) -> dict[str, Any]:
        """Have a layer's data served, see `BlobClient.attach`; raises as `device`."""
        origin = self._origin(layer)
        if problem := fuse_problem():
            raise ImageError(
                "unsupported", f"the data {layer.blob.digest} can't be fetched when it is read: {problem}",
                "fetch it whole: dsec image pull --whole", "image",
            )  # fmt: skip
        spec = BlobSpec(
            digest=layer.blob.digest,
            size=layer.blob.size,
            index=str(self.store.objects.path(layer.index.digest)),
            wire=origin.wire,
            store=origin.store,
            options={"authfile": origin.authfile} if origin.authfile else {},
        )
        try:
            return self.server().attach(spec, user=user, record_s=record_s)
        except BlobdError as err:
            if err.code != "conflict" or not self.forget(layer.blob.digest):
                raise
        return self.server().attach(spec, user=user, record_s=record_s)  # it had another store before

    def server(self) -> BlobClient:
        """The blob server of this store, started when it does not run."""
        return ensure_server(self.store.root, self.settings)

    def _is_attached(self, digest: str) -> bool:
        return (Places(root=self.store.root).records / f"{digest}.json").exists()

    def release(self, blobs: Iterable[str], user: str) -> None:
        """Give back what a mount held; idempotent."""
        attached = [digest for digest in blobs if self._is_attached(digest)]
        if not attached:
            return
        client = self.server()
        for digest in attached:
            try:
                client.drop(digest, user)
            except BlobdError as err:
                if err.code != "not_found":
                    raise

    def is_stale(self, user: str) -> bool:
        """Whether this mount stands on the files of a server that died whole, so that it can only answer EIO."""
        if not any(Places(root=self.store.root).records.glob("*.json")):
            return False
        return user in self.server().status()["stale"]

    def stop_idle(self) -> None:
        """End the blob server if it runs and no mount stands on its files."""
        client = BlobClient(self.store.root)
        if not client.is_running():
            return
        with self.store.exclusive():
            if not any(row.get("holds") for row in client.stats()["blobs"]):
                client.stop()

    def forget(self, digest: str) -> bool:
        """Let the server give a blob up before its files are removed; False when it is held or open."""
        if not self._is_attached(digest):
            return True
        try:
            self.server().detach(digest)
        except BlobdError as err:
            if err.code == "in_use":
                return False
            if err.code != "not_found":
                raise
        return True

    def fetch_whole(
        self, layer: Layer, progress: Progress | None = None, *, timeout_s: float = FETCH_TIMEOUT_S
    ) -> None:
        """Bring all data here at once; idempotent. What the blob server has in part is completed by it."""
        # Only here are stores needed in this process, and they bring an HTTP library along.
        from dsec_imagefs.fetch import BlockFetcher
        from dsec_imagefs.layer.index import Index
        from dsec_imagefs.stores.parse import parse_store
        from dsec_imagefs.stores.transfer import fetch_blob

        objects, blob = self.store.objects, layer.blob
        if not blob.size or objects.has_whole_blob(blob.digest, blob.size):
            return
        if objects.map(blob.digest).exists() or self._is_attached(blob.digest):
            self._complete(layer, timeout_s)
            return
        origin = self._origin(layer)
        index = Index.parse(objects.read(layer.index.digest))
        arrived = objects.blob(blob.digest).with_name(f".{secrets.token_hex(8)}.tmp")
        store = parse_store(origin.store, authfile=origin.authfile)
        try:
            fetcher = BlockFetcher(store=store, index=index, wire_digest=origin.wire)
            report = None if progress is None else lambda done, total: progress("fetch", done, total)
            fetch_blob(fetcher, arrived, deadline=time.monotonic() + timeout_s, progress=report)
            with self.store.exclusive():
                if not objects.map(blob.digest).exists():  # else a server serves it meanwhile: its file is the one
                    arrived.rename(objects.blob(blob.digest))
                    sync_directory(arrived.parent)
        finally:
            arrived.unlink(missing_ok=True)
            store.close()

    def _complete(self, layer: Layer, timeout_s: float) -> None:
        """Have the server fetch the rest of what it has in part."""
        digest = layer.blob.digest
        deadline = time.monotonic() + timeout_s
        self.attach(layer)
        done = self.server().prefetch(digest, wait_s=timeout_s)
        if done["left"] or done["failed"]:
            text = f"{done['left'] + done['failed']} blocks of the data {digest} could not be fetched"
            raise ImageError("unavailable", text, "is the store reachable? see dsec image cache", "ref")
        while not self.attach(layer)["complete"]:  # the last blocks are being synced
            if time.monotonic() > deadline:
                raise ImageError("busy", f"the data {digest} is here and not yet synced", "try again")
            time.sleep(_POLL_S)

    def check_present(self, digest: str) -> None:
        """Have the server read again what it has of a blob; wrong blocks are dropped, and come anew when read.

        Raises:
            ImageError: ``corrupt`` naming the first wrong block.
        """
        if not self._is_attached(digest):
            return
        found = self.server().verify(digest)
        if found["bad"]:
            raise ImageError(
                "corrupt", f"block {found['bad'][0]} of the data {digest} was wrong on this disk", "verify again"
            )

    def _origin(self, layer: Layer) -> Origin:
        origin = self.store.objects.origin(layer.blob.digest)
        if origin is None:
            raise ImageError(
                "not_found", f"the data {layer.blob.digest} is not here, and no store is known to have it",
                "pull or import the image again", "image",
            )  # fmt: skip
        return origin


def fuse_problem() -> str:
    """Why no blob server can run here, or ""; tried by opening the device."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as err:
        return f"/dev/fuse: {os.strerror(err.errno or 0)}"
    return ""
