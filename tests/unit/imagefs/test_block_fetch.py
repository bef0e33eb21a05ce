"""Blocks from a store: never a wrong byte, whatever the store gives; bounded attempts, bounded memory."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from concurrent.futures import Future

import pytest
import zstandard
from dsec_imagefs import fetch
from dsec_imagefs.fetch import BlockFetcher, FetchCounts
from dsec_imagefs.layer.index import Index
from dsec_imagefs.stores.base import StoreError
from dsec_imagefs.stores.hedge import Budget, HedgedStore
from dsec_imagefs.stores.retry import Backoff, Ticker
from dsec_imagefs.stores.transfer import fetch_blob
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.memory_store import MemoryStore

BLOCK = 64 << 10
NO_WAIT = Ticker(sleep=lambda _: None)


def make_blob(blocks: int = 9, *, tail: int = 4096, seed: int = 1) -> bytes:
    """Some random blocks, some of text, the third all zeros, the last one short."""
    rng = random.Random(seed)
    kinds = [lambda: rng.randbytes(BLOCK), lambda: (b"dsec %d " % rng.random().as_integer_ratio()[0] * BLOCK)[:BLOCK]]
    return b"".join(bytes(BLOCK) if n == 2 else kinds[n % 2]() for n in range(blocks - 1)) + rng.randbytes(tail)


def encode(blob: bytes, encoding: str) -> tuple[Index, bytes]:
    rows, wire, at = [], b"", 0
    for start in range(0, len(blob), BLOCK):
        raw = blob[start : start + BLOCK]
        sent = b"" if not any(raw) else raw if encoding == "raw" else zstandard.compress(raw)
        rows.append((hashlib.sha256(raw).digest(), start if encoding == "raw" else at, len(sent)))
        wire, at = wire + sent, at + len(sent)
    index = Index.of(rows, block_bytes=BLOCK, blob_size=len(blob), encoding=encoding)  # type: ignore[arg-type]
    return index, blob if encoding == "raw" else wire


def make(encoding: str = "raw", **options) -> tuple[bytes, MemoryStore, BlockFetcher]:
    blob, store = make_blob(**options), MemoryStore()
    index, wire = encode(blob, encoding)
    fetcher = BlockFetcher(store=store, index=index, wire_digest=store.add(wire), ticker=NO_WAIT)
    return blob, store, fetcher


def soon() -> float:
    return time.monotonic() + 30


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def lost(_data: bytes) -> bytes:
    raise StoreError("short", "the connection broke", retryable=True)


FAULTS = [flip, lost, lambda d: d[:-1], lambda d: d + b"x", lambda d: b"", lambda d: bytes(len(d)), lambda d: d[::-1]]


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_every_block_is_the_blobs(encoding: str) -> None:
    blob, store, fetcher = make(encoding)
    got = b"".join(fetcher.fetch(n, deadline=soon()) for n in range(fetcher.index.count))
    assert got == blob
    assert len(store.reads) == fetcher.index.count - 1, "the block of zeros needs no request"


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_adjacent_blocks_come_by_few_requests(encoding: str) -> None:
    blob, store, fetcher = make(encoding)
    got = fetcher.fetch_run(0, fetcher.index.count, deadline=soon())
    assert b"".join(got) == blob
    assert len(store.reads) == 2, "before and after the block of zeros"


def test_the_memory_of_a_run_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(fetch, "MAX_RUN_BYTES", 2 * BLOCK)
    blob, store, fetcher = make()
    assert b"".join(fetcher.fetch_run(0, fetcher.index.count, deadline=soon())) == blob
    assert max(length for _, _, length in store.reads) == 2 * BLOCK


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([None, *FAULTS]), max_size=8), st.sampled_from(["raw", "zstd"]), st.booleans())
def test_what_faults_leave_is_right_or_an_error(faults, encoding: str, run: bool) -> None:
    blob, store, fetcher = make(encoding, blocks=4)
    store.faults.extend(fault or (lambda d: d) for fault in faults)
    try:
        if run:
            got = b"".join(fetcher.fetch_run(0, 4, deadline=soon()))
        else:
            got = b"".join(fetcher.fetch(n, deadline=soon()) for n in range(4))
    except StoreError as error:
        assert error.code in ("corrupt", "short")
        return
    assert got == blob


def test_a_wrong_block_is_fetched_again() -> None:
    blob, store, fetcher = make()
    store.faults.append(flip)
    assert fetcher.fetch(1, deadline=soon()) == blob[BLOCK : 2 * BLOCK]
    assert (fetcher.counts.requests, fetcher.counts.wrong_blocks, fetcher.counts.blocks) == (2, 1, 1)


def test_in_a_run_only_the_wrong_block_is_fetched_again() -> None:
    blob, store, fetcher = make()
    store.faults.append(flip)
    assert b"".join(fetcher.fetch_run(3, 3, deadline=soon())) == blob[3 * BLOCK : 6 * BLOCK]
    assert [(offset // BLOCK, length // BLOCK) for _, offset, length in store.reads] == [(3, 3), (5, 1)]


def test_a_block_that_stays_wrong_names_block_store_and_digests() -> None:
    _, store, fetcher = make()
    store.faults.extend([flip] * 50)
    with pytest.raises(StoreError) as caught:
        fetcher.fetch(3, deadline=soon())
    text = str(caught.value)
    assert caught.value.code == "corrupt"
    assert "block 3 of" in text
    assert fetcher.wire_digest in text
    assert "memory:" in text
    assert fetcher.index.digest(3).hex() in text
    assert len(store.reads) == Backoff().attempts


def test_a_store_that_is_down_is_asked_a_bounded_number_of_times() -> None:
    _, store, fetcher = make()
    store.faults.extend([lost] * 1000)
    with pytest.raises(StoreError):
        fetcher.fetch(0, deadline=soon())
    assert len(store.reads) == Backoff().attempts
    assert fetcher.counts.failures == Backoff().attempts


def test_what_is_gone_is_asked_once() -> None:
    _, store, fetcher = make()
    store.objects.clear()
    with pytest.raises(StoreError) as caught:
        fetcher.fetch(0, deadline=soon())
    assert caught.value.code == "not_found"
    assert len(store.reads) == 1


def test_a_frame_that_unpacks_to_gigabytes_is_not_unpacked() -> None:
    blob = make_blob()
    index, wire = encode(blob, "zstd")
    _, _, length = index.block(0)
    bomb = zstandard.compress(bytes(1 << 30))  # 32 KiB
    assert len(bomb) <= length
    store = MemoryStore()
    store.faults.extend([lambda d: bomb.ljust(len(d), b"\0")] * 50)
    fetcher = BlockFetcher(store=store, index=index, wire_digest=store.add(wire), ticker=NO_WAIT)
    before = time.process_time()
    with pytest.raises(StoreError, match="frame of another size"):
        fetcher.fetch(0, deadline=soon())
    assert time.process_time() - before < 10, "a gigabyte each time would take longer"


def test_counts_are_shared() -> None:
    counts = FetchCounts()
    _, _, one = make()
    two = BlockFetcher(store=one.store, index=one.index, wire_digest=one.wire_digest, counts=counts)
    two.fetch(0, deadline=soon())
    assert (counts.blocks, counts.wire_bytes, one.counts.blocks) == (1, BLOCK, 0)


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_a_whole_blob_is_fetched_to_a_file(tmp_path, encoding: str) -> None:
    blob, store, fetcher = make(encoding, blocks=200)
    store.faults.extend([flip, lost, flip])
    seen: list[tuple[int, int]] = []
    fetch_blob(fetcher, tmp_path / "blob", deadline=soon(), progress=lambda *step: seen.append(step))
    assert (tmp_path / "blob").read_bytes() == blob
    assert seen[-1] == (len(blob), len(blob))
    assert (tmp_path / "blob").stat().st_blocks * 512 < len(blob), "zeros are a hole"


def test_a_blob_that_can_not_be_had_leaves_nothing(tmp_path) -> None:
    _, store, fetcher = make()
    store.faults.extend([flip] * 1000)
    with pytest.raises(StoreError):
        fetch_blob(fetcher, tmp_path / "blob", deadline=soon())
    assert list(tmp_path.iterdir()) == []


# --- a second request


class Gates:
    """A store whose reads wait until the test lets them go; `open` holds what each next read does."""

    label = "gates:"

    def __init__(self) -> None:
        self.asked: list[threading.Event] = []
        self.answers: list[bytes | StoreError] = []
        self.changed = threading.Condition()

    def read(self, _digest: str, _offset: int, _length: int, *, deadline: float) -> bytes:
        with self.changed:
            mine, gate = len(self.asked), threading.Event()
            self.asked.append(gate)
            self.changed.notify_all()
        gate.wait(20)
        answer = self.answers[mine]
        if isinstance(answer, StoreError):
            raise answer
        return answer

    def gate(self, number: int) -> threading.Event:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) > number, timeout=20)
        return self.asked[number]

    def close(self) -> None:
        for gate in self.asked:
            gate.set()


@pytest.fixture
def gates():
    found = Gates()
    yield found
    found.close()


def hedged(gates: Gates, **options) -> tuple[HedgedStore, Future[bytes]]:
    store = HedgedStore(store=gates, after_s=options.pop("after_s", 0.0), **options)  # type: ignore[arg-type]
    future: Future[bytes] = Future()

    def run() -> None:
        try:
            future.set_result(store.read("ab" * 32, 0, 1, deadline=soon()))
        except StoreError as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return store, future


def test_the_second_request_overtakes_the_first(gates: Gates) -> None:
    gates.answers = [b"1", b"2"]
    store, future = hedged(gates)
    gates.gate(1).set()
    assert future.result(20) == b"2"
    assert store.budget.hedges == 1
    store.close()


def test_one_failure_of_two_does_not_count(gates: Gates) -> None:
    gates.answers = [StoreError("short", "x", retryable=True), b"2"]
    store, future = hedged(gates)
    gates.gate(1)
    gates.gate(0).set()
    gates.gate(1).set()
    assert future.result(20) == b"2"
    store.close()


def test_two_failures_are_an_error(gates: Gates) -> None:
    gates.answers = [StoreError("short", "x", retryable=True)] * 2
    store, future = hedged(gates)
    gates.gate(1).set()
    gates.gate(0).set()
    assert isinstance(future.exception(20), StoreError)
    store.close()


def test_a_quick_answer_has_no_second(gates: Gates) -> None:
    gates.answers = [b"1"]
    store, future = hedged(gates, after_s=15.0)
    gates.gate(0).set()
    assert future.result(20) == b"1"
    assert (store.budget.reads, store.budget.hedges, len(gates.asked)) == (1, 0, 1)
    store.close()


def test_second_requests_have_a_budget(gates: Gates) -> None:
    gates.answers = [b"1"]
    store, future = hedged(gates, budget=Budget(share=0.0, first=0))
    gates.gate(0).set()
    assert future.result(20) == b"1"
    assert (store.budget.hedges, len(gates.asked)) == (0, 1)
    store.close()
    budget = Budget()
    for _ in range(100):
        budget.count_read()
    assert sum(budget.take() for _ in range(100)) == 14


def test_a_read_that_hangs_in_the_kernel_ends_at_its_deadline(gates: Gates) -> None:
    gates.answers = [b"1", b"2"]
    store = HedgedStore(store=gates, after_s=0.01)  # type: ignore[arg-type]
    with pytest.raises(StoreError) as caught:
        store.read("ab" * 32, 0, 1, deadline=time.monotonic() + 0.05)
    assert caught.value.code == "deadline"
    gates.close()
    store.close()
