"""Blocks of a blob from a store: nothing is handed on before its digest is right."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsec_imagefs.errors import ImageError
from dsec_imagefs.layer.wire import decode_block
from dsec_imagefs.stores.base import StoreError, plain_hex
from dsec_imagefs.stores.retry import TICKER, Backoff, Ticker, retry

if TYPE_CHECKING:
    from dsec_imagefs.layer.index import Index
    from dsec_imagefs.stores.base import Store

MAX_RUN_BYTES = 16 << 20  # memory of one request, whatever a caller asks for


@dataclass(slots=True)
class FetchCounts:
    """What fetching cost so far; read it from any thread."""

    requests: int = 0
    wire_bytes: int = 0
    blocks: int = 0
    failures: int = 0
    wrong_blocks: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: int) -> None:
        """Add to the counters of these names."""
        with self.lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFetcher:
    """Fetches blocks of one blob; used by many threads at once. Bounding their number is the caller's.

    Attributes:
        store: where the wire blob lies.
        index: the blob's block index, itself verified by its digest.
        wire_digest: the object in the store.
        backoff: how often and how patiently an attempt is repeated.
        counts: shared with other fetchers when given.
    """

    store: Store
    index: Index
    wire_digest: str
    backoff: Backoff = field(default_factory=Backoff)
    counts: FetchCounts = field(default_factory=FetchCounts)
    ticker: Ticker = TICKER

    def fetch(self, number: int, *, deadline: float) -> bytes:
        """The raw bytes of a block, verified.

        Args:
            number: which block, from 0.
            deadline: instant of `time.monotonic()`; attempts are repeated until then at most.

        Raises:
            StoreError: the last attempt's; ``corrupt`` names block, store and both digests.
        """
        _, offset, length = self.index.block(number)
        if not length:
            return bytes(self.index.raw_length(number))

        def attempt(until: float) -> bytes:
            return self._checked(number, self._read(offset, length, until))

        return retry(attempt, deadline=deadline, backoff=self.backoff, ticker=self.ticker)

    def fetch_run(self, first: int, count: int, *, deadline: float) -> list[bytes]:
        """Adjacent blocks by as few requests as their wire bytes allow: for prefetch, where latency rules.

        A block that comes wrong is fetched again alone. Raises as `fetch`.
        """
        blocks: list[bytes] = []
        while len(blocks) < count:
            number = first + len(blocks)
            blocks += self._run(number, self._run_end(number, first + count), deadline)
        return blocks

    def _run_end(self, first: int, limit: int) -> int:
        """The end of what one request may cover: neighbours on the wire, within a bound of memory."""
        _, start, length = self.index.block(first)
        number, end = first + 1, start + length
        while length and number < limit:
            _, offset, more = self.index.block(number)
            if offset != end or not more or end + more - start > MAX_RUN_BYTES:
                break
            number, end = number + 1, end + more
        return number

    def _run(self, first: int, end: int, deadline: float) -> list[bytes]:
        if end - first == 1:
            return [self.fetch(first, deadline=deadline)]
        _, start, _ = self.index.block(first)
        _, last, length = self.index.block(end - 1)

        def attempt(until: float) -> bytes:
            return self._read(start, last + length - start, until)

        wire = memoryview(retry(attempt, deadline=deadline, backoff=self.backoff, ticker=self.ticker))
        blocks = []
        for number in range(first, end):
            _, offset, size = self.index.block(number)
            try:
                blocks.append(self._checked(number, wire[offset - start : offset - start + size]))
            except StoreError:
                blocks.append(self.fetch(number, deadline=deadline))
        return blocks

    def _read(self, offset: int, length: int, deadline: float) -> bytes:
        try:
            data = self.store.read(self.wire_digest, offset, length, deadline=deadline)
        except StoreError:
            self.counts.add(requests=1, failures=1)
            raise
        self.counts.add(requests=1, wire_bytes=len(data))
        if len(data) != length:  # a store that breaks its own promise must not be believed
            raise StoreError("short", f"{self.store.label} gave {len(data)} of {length} bytes", retryable=True)
        return data

    def _checked(self, number: int, wire: bytes | memoryview) -> bytes:
        where = f"block {number} of {plain_hex(self.wire_digest)} from {self.store.label}"
        try:
            data = decode_block(self.index, number, wire)
        except ImageError as error:
            self.counts.add(wrong_blocks=1)
            raise StoreError("corrupt", f"{where}: {error.message}", retryable=True) from error
        if not self.index.verify(number, data):
            self.counts.add(wrong_blocks=1)
            found = hashlib.sha256(data).hexdigest()
            text = f"{where} is {found}, not {self.index.digest(number).hex()}"
            raise StoreError("corrupt", text, "the store or the way to it damages data", retryable=True)
        self.counts.add(blocks=1)
        return data
