"""The blob server's parts without a kernel: codec, maps, single flight, cache files and their bound, checked input."""

from __future__ import annotations

import errno
import hashlib
import random
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest
from dsec_imagefs.blobd import BlobSpec, Settings
from dsec_imagefs.blobd import fuse_wire as wire
from dsec_imagefs.blobd.block_map import ABSENT, SUSPECT, TRUSTED, MapKey, parse_map, render_map
from dsec_imagefs.blobd.budget import Budget
from dsec_imagefs.blobd.cached import CachedBlob
from dsec_imagefs.blobd.dedup import BlockPlaces
from dsec_imagefs.blobd.fill import Filler
from dsec_imagefs.blobd.flight import Flights
from dsec_imagefs.blobd.metrics import Counters
from dsec_imagefs.blobd.recorder import Recorder
from dsec_imagefs.blobd.shared import OPENS, SharedState
from dsec_imagefs.blobd.spec import Record
from dsec_imagefs.blobd.table import nodeid_of
from dsec_imagefs.errors import ImageError
from dsec_imagefs.layer.index import Index
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 64 << 10
BOOT, OTHER_BOOT = "a" * 36, "b" * 36
KEY = MapKey(blob=bytes(32), block_bytes=BLOCK, count=21)


def init_request(minor: int, flags: int) -> bytes:
    body = struct.pack("=IIIII44x", 7, minor, 1 << 17, flags & 0xFFFFFFFF, flags >> 32)
    return wire.IN_HEADER.pack(40 + len(body), wire.INIT, 5, 0, 0, 0, 0, 0, 0) + body


def test_init_settles_what_both_can() -> None:
    offered = wire.INIT_EXT | wire.HAS_RESEND | wire.PASSTHROUGH | wire.MAX_PAGES
    reply, settled = wire.answer_init(init_request(45, offered), wanted=wire.HAS_RESEND | wire.PASSTHROUGH)
    assert (len(reply), settled.minor, settled.resend, settled.passthrough) == (16 + 64, wire.MINOR, True, True)
    assert wire.OUT_HEADER.unpack_from(reply) == (80, 0, 5)
    _, old = wire.answer_init(init_request(36, wire.INIT_EXT | wire.HAS_RESEND), wanted=wire.PASSTHROUGH)
    assert (old.minor, old.resend, old.passthrough) == (36, False, False)
    # without INIT_EXT the high half is not there, whatever lies in its place
    _, older = wire.answer_init(init_request(31, wire.HAS_RESEND), wanted=wire.HAS_RESEND)
    assert not older.resend
    with pytest.raises(ValueError, match=r"7\.31"):
        wire.answer_init(init_request(30, 0), wanted=0)
    with pytest.raises(ValueError, match="no INIT"):
        wire.answer_init(init_request(31, 0).replace(struct.pack("=I", wire.INIT), struct.pack("=I", 3), 1), wanted=0)


def test_directory_entries_come_in_pieces_that_fit() -> None:
    names = [(number + 2, b"n" * (number % 70 + 1), False) for number in range(50)]
    found, offset = [], 0
    while piece := wire.dirents(names, offset, 300):
        assert len(piece) <= 300
        at = 0
        while at < len(piece):
            _, offset, length, kind = struct.unpack_from("=QQII", piece, at)
            found.append(piece[at + 24 : at + 24 + length])
            assert kind == 8
            at += 24 + length + -length % 8
    assert found == [name for _, name, _ in names]


@pytest.mark.parametrize(
    ("opcode", "number"), [(16, errno.EROFS), (wire.IOCTL, errno.ENOTTY), (999, errno.ENOSYS), (10, errno.EROFS)]
)
def test_requests_without_an_answer_are_refused(opcode: int, number: int) -> None:
    assert wire.refusal(opcode) == number


@given(st.sets(st.integers(0, 20)))
def test_maps_are_believed_in_their_boot_and_suspect_after(present: set[int]) -> None:
    raw = render_map(KEY, BOOT, present)
    assert {n for n, state in enumerate(parse_map(raw, KEY, BOOT)) if state == TRUSTED} == present
    assert {n for n, state in enumerate(parse_map(raw, KEY, OTHER_BOOT)) if state == SUSPECT} == present
    for other in (
        MapKey(blob=b"x" * 32, block_bytes=BLOCK, count=21),
        MapKey(blob=bytes(32), block_bytes=4096, count=21),
    ):
        assert not any(parse_map(raw, other, BOOT))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_map_says_nothing(at: int, flip: int) -> None:
    raw = bytearray(render_map(KEY, BOOT, range(0, 21, 2)))
    raw[at % len(raw)] ^= flip
    assert not any(parse_map(bytes(raw), KEY, BOOT))
    assert not any(parse_map(bytes(raw[: at % len(raw)]), KEY, BOOT))


def make_blob(directory: Path, blocks: int, *, seed: int = 1, boot: str = BOOT) -> tuple[bytes, CachedBlob]:
    data = random.Random(seed).randbytes(blocks * BLOCK - 4096)
    parts = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    table = [(hashlib.sha256(part).digest(), n * BLOCK, len(part)) for n, part in enumerate(parts)]
    index = Index.of(table, block_bytes=BLOCK, blob_size=len(data), encoding="raw")
    digest = hashlib.sha256(data).hexdigest()
    blob = CachedBlob(directory / digest, digest, index, boot)
    blob.source = lambda number, deadline: parts[number]
    return data, blob


def part_of(data: bytes, number: int) -> bytes:
    return data[number * BLOCK : (number + 1) * BLOCK]


def test_a_blob_goes_from_empty_to_complete(tmp_path: Path) -> None:
    data, blob = make_blob(tmp_path, 5)
    assert (blob.complete, blob.present_bytes(), blob.map_path.exists()) == (False, 0, True)
    for number in range(4):
        assert blob.store(number, part_of(data, number)) == BLOCK
    assert blob.store(0, part_of(data, 0)) == 0, "counted once"
    assert (blob.sync(), blob.promote(), blob.present_bytes()) == (4, False, 4 * BLOCK)
    assert blob.store(4, part_of(data, 4))
    assert blob.promote()
    assert not blob.map_path.exists()
    assert blob.path.read_bytes() == data
    blob.close()
    _, again = make_blob(tmp_path, 5, boot=OTHER_BOOT)
    assert again.complete
    with pytest.raises(ImageError, match="complete"):
        again.drop([0])
    assert again.reset() == len(data)
    assert (again.complete, again.present_bytes(), again.map_path.exists()) == (False, 0, True)
    assert again.read(0) == bytes(BLOCK)
    again.close()


def test_a_file_of_another_size_without_a_map_is_refused(tmp_path: Path) -> None:
    _, blob = make_blob(tmp_path, 2)
    blob.close()
    blob.map_path.unlink()
    blob.path.write_bytes(b"short")
    with pytest.raises(ImageError, match="5 bytes and no map"):
        make_blob(tmp_path, 2)


def test_after_another_boot_blocks_are_hashed_before_use(tmp_path: Path) -> None:
    data, blob = make_blob(tmp_path, 4)
    for number in range(3):
        blob.store(number, part_of(data, number))
    blob.sync()
    blob.store(3, part_of(data, 3))  # not noted
    blob.close()
    with blob.path.open("r+b") as file:
        file.seek(BLOCK + 5)
        file.write(bytes([data[BLOCK + 5] ^ 1]))
    _, same = make_blob(tmp_path, 4)
    assert list(same.states) == [TRUSTED, TRUSTED, TRUSTED, SUSPECT]
    same.close()
    _, after = make_blob(tmp_path, 4, boot=OTHER_BOOT)
    assert list(after.states) == [SUSPECT] * 4
    assert after.check(0) == (part_of(data, 0), 0)
    assert after.check(1) == (None, BLOCK)
    assert after.check(3) == (part_of(data, 3), 0)
    assert list(after.states) == [TRUSTED, ABSENT, SUSPECT, TRUSTED]
    after.close()


def test_a_dropped_block_is_out_of_the_map_before_it_is_punched(tmp_path: Path) -> None:
    data, blob = make_blob(tmp_path, 4)
    for number in range(3):
        blob.store(number, part_of(data, number))
    blob.sync()
    generation = blob.generation
    assert blob.drop([1, 3, 1]) == BLOCK
    assert blob.generation > generation
    assert blob.read(1) == bytes(BLOCK)
    key = MapKey(blob=bytes.fromhex(blob.digest), block_bytes=BLOCK, count=4)
    assert list(parse_map(blob.map_path.read_bytes(), key, BOOT)) == [TRUSTED, ABSENT, TRUSTED, ABSENT]
    blob.close()


def test_blocks_that_were_read_get_a_second_chance(tmp_path: Path) -> None:
    data, blob = make_blob(tmp_path, 6)
    budget = Budget(4 * BLOCK, 0.5)
    budget.add_blob(blob)
    for number in range(4):
        assert budget.has_room(BLOCK)
        blob.store(number, part_of(data, number))
        budget.add_block(blob, number)
    blob.referenced[0] = 1
    assert budget.has_room(BLOCK)
    assert blob.states[0] == TRUSTED
    assert blob.states[1] == ABSENT
    assert budget.used_bytes == blob.present_bytes() <= 3 * BLOCK
    assert not budget.has_room(5 * BLOCK)
    left = blob.present_bytes()
    assert budget.evict(1 << 40) == left
    assert budget.used_bytes == 0
    blob.close()


class Waiter:
    def __init__(self, timeout_s: float = 20.0) -> None:
        self.deadline = time.monotonic() + timeout_s
        self.event = threading.Event()
        self.result: bytes | ImageError = b""

    def got(self, number: int, data: bytes) -> None:
        self.result = data
        self.event.set()

    def failed(self, number: int, error: ImageError) -> None:
        self.result = error
        self.event.set()

    def wait(self) -> bytes | ImageError:
        assert self.event.wait(20)
        return self.result


def test_one_fetch_for_all_who_wait_and_demand_before_prefetch(tmp_path: Path) -> None:
    _, blob = make_blob(tmp_path, 16)
    order: list[int] = []
    gate = threading.Semaphore(0)

    def obtain(_: CachedBlob, number: int, deadline: float, deliver) -> None:
        assert gate.acquire(timeout=20)
        order.append(number)
        deliver(b"%d" % number)

    flights = Flights(obtain, threads=1, limit=12, read_deadline_s=20)
    assert flights.prefetch(blob, [0, 1, 2, 3], 10) == 4
    assert flights.prefetch(blob, [3, 4], 5) == 1
    waiters = [Waiter() for _ in range(3)]
    flights.demand(blob, 3, waiters[0])  # raised from prefetch to demand
    flights.demand(blob, 9, waiters[1])
    flights.demand(blob, 9, waiters[2])
    with pytest.raises(ImageError, match="12 at most"):
        flights.prefetch(blob, list(range(16)), 10)
    flights.start()
    for _ in range(6):
        gate.release()
    assert [waiter.wait() for waiter in waiters] == [b"3", b"9", b"9"]
    flights.stop(timeout_s=0)
    for _ in range(6):
        gate.release()
    flights.stop(timeout_s=20)
    assert order[:2] == [3, 9]
    assert order[2:] == [4, 0, 1, 2][: len(order) - 2]
    assert order.count(9) == 1
    blob.close()


def test_a_failure_reaches_all_and_poisons_nothing(tmp_path: Path) -> None:
    _, blob = make_blob(tmp_path, 2)
    faults: list[Exception] = [ImageError("unavailable", "down"), RuntimeError("a client's bug")]

    def obtain(_: CachedBlob, number: int, deadline: float, deliver) -> None:
        if faults:
            raise faults.pop(0)
        deliver(b"right")

    flights = Flights(obtain, threads=1, limit=4, read_deadline_s=20)
    flights.start()
    for wanted in ("down", "a client's bug", "right"):
        waiter = Waiter()
        flights.demand(blob, 0, waiter)
        assert wanted in str(waiter.wait())
    late = Waiter(timeout_s=-1)
    flights.demand(blob, 1, late)
    assert "not begun in time" in str(late.wait())
    flights.stop(timeout_s=20)
    blob.close()


def test_who_comes_while_a_block_is_being_kept_gets_it_at_once(tmp_path: Path) -> None:
    _, blob = make_blob(tmp_path, 2)
    delivered, kept = threading.Event(), threading.Event()

    def obtain(_: CachedBlob, number: int, deadline: float, deliver) -> None:
        deliver(b"data")
        delivered.set()
        assert kept.wait(20)

    flights = Flights(obtain, threads=1, limit=4, read_deadline_s=20)
    flights.start()
    first, second = Waiter(), Waiter()
    flights.demand(blob, 0, first)
    assert delivered.wait(20)
    flights.demand(blob, 0, second)
    assert (first.wait(), second.wait()) == (b"data", b"data")
    assert flights.waiting(blob, [0]) == 1, "it is in flight until it is kept"
    kept.set()
    flights.stop(timeout_s=20)
    blob.close()


def fill(filler: Filler, blob: CachedBlob, number: int) -> bytes:
    found: list[bytes] = []
    filler.obtain(blob, number, 0.0, found.append)
    assert len(found) == 1
    return found[0]


def test_filling_looks_near_before_it_fetches(tmp_path: Path) -> None:
    data, blob = make_blob(tmp_path, 3)
    counters, budget = Counters(), Budget(100 * BLOCK, 0.5)
    filler = Filler(budget, BlockPlaces(), counters)
    assert fill(filler, blob, 0) == part_of(data, 0)
    assert counters.fetched_bytes == BLOCK
    (tmp_path / "other").mkdir()
    _, twin = make_blob(tmp_path / "other", 3)
    twin.source = lambda number, deadline: pytest.fail("fetched what is here")
    assert fill(filler, twin, 0) == part_of(data, 0)
    assert counters.copied_blocks + counters.reflinked_blocks == 1
    with blob.path.open("r+b") as file:  # the neighbour was damaged since: it is not believed
        file.write(bytes(100))
    twin.drop([0])
    twin.source = lambda number, deadline: part_of(data, number)
    assert fill(filler, twin, 0) == part_of(data, 0)
    assert counters.fetched_bytes == 2 * BLOCK
    small = Filler(Budget(0, 0.5), BlockPlaces(), counters)
    assert fill(small, twin, 1) == part_of(data, 1)
    twin.source = lambda number, deadline: pytest.fail("fetched what is in memory")
    assert fill(small, twin, 1) == part_of(data, 1)
    assert (counters.uncached_blocks, twin.states[1]) == (1, ABSENT)
    blob.close()
    twin.close()


def test_shared_state_is_seen_by_the_next_worker() -> None:
    shared = SharedState.create()
    for handle in range(1, OPENS + 1):
        assert shared.opens.put(handle, handle << 1)
    assert not shared.opens.put(OPENS + 1, 2), "bounded"
    assert shared.opens.put(7, 99), "a request that is resent takes no second place"
    assert shared.opens.remove(8) == 16
    assert shared.opens.remove(8) is None
    shared.backings.put(5, 1)
    shared.count_death()
    after = SharedState(shared.fd)
    assert (len(after.opens.values), after.opens.values[7], after.backings.values) == (OPENS - 1, 99, {5: 1})
    assert after.deaths == 1
    after.clear()
    assert (after.opens.values, after.deaths) == ({}, 1)


def test_traces_join_what_continues() -> None:
    recorder = Recorder(60)
    for offset, length in ((0, 4096), (4096, 4096), (100_000, 10), (8192, 5)):
        recorder.note(offset, length)
    assert [(offset, length) for _, offset, length in recorder.accesses()] == [(0, 8192), (100_000, 10), (8192, 5)]
    over = Recorder(0)
    over.note(0, 1)
    assert (over.is_over, over.accesses()) == (True, [])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"digest": "A" * 64}, "digest"),
        ({"digest": "../x"}, "digest"),
        ({"size": 0}, "size"),
        ({"size": True}, "size"),
        ({"size": 1 << 45}, "size"),
        ({"index": "relative"}, "index"),
        ({"index": "/a\0b"}, "index"),
        ({"wire": "zz"}, "wire"),
        ({"options": {"a": 1}}, "options"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_wrong_blob_specs_name_the_field(change: dict, field: str) -> None:
    with pytest.raises(ImageError) as caught:
        BlobSpec.from_json({"digest": "a" * 64, "size": 5, "index": "/i"} | change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"readers": 0}', "readers"),
        ('{"readers": true}', "readers"),
        ('{"passthrough": 1}', "passthrough"),
        ('{"cache_bytes": -1}', "cache_bytes"),
        ('{"pinned_share": 2}', "pinned_share"),
        ('{"read_deadline_s": 0}', "read_deadline_s"),
        ('{"speed": 9}', "speed"),
    ],
)
def test_wrong_settings_name_the_field(text: str, field: str) -> None:
    with pytest.raises(ImageError) as caught:
        Settings.from_json(text)
    assert caught.value.field == field


def test_records_and_settings_come_back_as_they_went() -> None:
    spec = BlobSpec(digest="a" * 64, size=5, index="/i", store="dir:/s", options={"authfile": "/x"})
    record = Record(spec=spec, ours=True, holds={"user": "mount"})
    assert Record.parse(record.render()) == record
    assert Settings.from_json(Settings(readers=2).to_json()) == Settings(readers=2)
    for raw in (b"", b"[]", b'{"spec": {}, "ours": 1, "holds": {}}'):
        with pytest.raises(ImageError):
            Record.parse(raw)


@given(st.text("0123456789abcdef", min_size=64, max_size=64))
def test_node_ids_are_told_apart_and_never_the_roots(digest: str) -> None:
    ids = {nodeid_of(digest, mapped=False), nodeid_of(digest, mapped=True)}
    assert len(ids) == 2
    assert all(wire.ROOT_ID < one < 1 << 62 for one in ids)
