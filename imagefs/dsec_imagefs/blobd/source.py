"""From a blob's spec to its index and to fetches: the only place here that knows stores."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.fetch import BlockFetcher
from dsec_imagefs.layer.index import Index
from dsec_imagefs.stores.parse import parse_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_imagefs.blobd.spec import BlobSpec
    from dsec_imagefs.stores.base import Store

    OpenStore = Callable[[str, dict[str, str]], Store]
    FetchBlock = Callable[[int, float], bytes]


def open_store(url: str, options: dict[str, str]) -> Store:
    """The store of a URL (see `stores.parse`); the only option is ``authfile``, a containers-auth.json(5).

    Raises:
        ImageError: ``bad_store``, ``bad_source`` for another option.
    """
    if odd := sorted(set(options) - {"authfile"}):
        raise ImageError("bad_source", f"{odd[0]!r} is no option of a store", "authfile", "options")
    return parse_store(url, authfile=options.get("authfile", ""))


def load_index(spec: BlobSpec) -> Index:
    """The index of a blob; an object that is named by its digest is checked against it.

    Raises:
        ImageError: ``not_found``, ``corrupt``.
    """
    path = Path(spec.index)
    try:
        raw = path.read_bytes()
    except OSError as err:
        text = f"the index {spec.index} can't be read: {err.strerror}"
        raise ImageError("not_found", text, "pull the image's metadata again", "index") from err
    if len(path.name) == 64 and hashlib.sha256(raw).hexdigest() != path.name:
        raise ImageError("corrupt", f"the index {spec.index} does not match its digest", "pull it again", "index")
    index = Index.parse(raw)
    if index.blob_size != spec.size:
        text = f"the index is of a blob of {index.blob_size} bytes, not {spec.size}"
        raise ImageError("conflict", text, "give the index of this blob", "index")
    return index


class Sources:
    """Stores, opened at the first miss (a restart must not need them) and shared by the blobs that name the same."""

    def __init__(self, opener: OpenStore = open_store) -> None:
        self._open = opener
        self._stores: dict[tuple[str, tuple[tuple[str, str], ...]], Store] = {}
        self._lock = threading.Lock()

    def fetch_of(self, spec: BlobSpec, index: Index) -> FetchBlock:
        """The function that fetches a verified block of a blob."""
        if not spec.store:

            def nowhere(number: int, deadline: float) -> bytes:
                del deadline
                text = f"block {number} of {spec.digest} is not here, and the blob has no store"
                raise ImageError("not_found", text, "attach it with its store", "store")

            return nowhere
        fetcher: list[BlockFetcher] = []

        def fetch(number: int, deadline: float) -> bytes:
            if not fetcher:
                store = self._store(spec)
                fetcher.append(BlockFetcher(store=store, index=index, wire_digest=spec.wire or spec.digest))
            return fetcher[0].fetch(number, deadline=deadline)

        return fetch

    def _store(self, spec: BlobSpec) -> Store:
        key = (spec.store, tuple(sorted(spec.options.items())))
        with self._lock:
            if key not in self._stores:
                self._stores[key] = self._open(spec.store, spec.options)
            return self._stores[key]

    def close(self) -> None:
        """Give up connections."""
        with self._lock:
            for store in self._stores.values():
                store.close()
            self._stores.clear()
