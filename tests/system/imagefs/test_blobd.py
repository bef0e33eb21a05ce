"""The blob server on the kernel: right bytes, complete blobs without requests, prefetch, equal blocks."""

from __future__ import annotations

import mmap
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from dsec_imagefs.blobd import BlobdError, Settings

from tests.kit.abilities import needs
from tests.kit.blobs import BLOCK, Machine, blob_machine, read_at, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = needs("root", "fuse")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with blob_machine(tmp_path) as made:
        yield made


def test_every_byte_is_right_and_fetched_once(machine: Machine) -> None:
    blob = machine.blob(20 * BLOCK + 8192)
    path = machine.attach(blob)
    assert path.stat().st_size == len(blob.data)
    rng = random.Random(7)

    def read_some(seed: int) -> None:
        mine = random.Random(seed)
        for _ in range(40):
            offset, length = mine.randrange(len(blob.data)), mine.randrange(1, 3 * BLOCK)
            assert read_at(path, offset, length) == blob.data[offset : offset + length]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(read_some, [rng.random() for _ in range(6)]))
    assert path.read_bytes() == blob.data
    assert machine.counters()["fetched_bytes"] == len(blob.data)
    assert read_at(path, len(blob.data), 10) == b""


def test_a_sequence_is_fetched_ahead_and_scattered_reads_are_not(machine: Machine) -> None:
    scattered, sequence = machine.blob(40 * BLOCK, seed=1), machine.blob(40 * BLOCK, seed=2)
    path = machine.attach(scattered)
    for number in (30, 2, 17, 8, 25, 12):
        read_at(path, number * BLOCK, 100)
    machine.settle()
    assert machine.row(scattered)["present"] == 6
    path = machine.attach(sequence)
    for number in range(6):
        assert read_at(path, number * BLOCK, 100) == sequence.data[number * BLOCK : number * BLOCK + 100]
    machine.settle()
    assert 7 <= machine.row(sequence)["present"] <= 6 + 2 * machine.settings.readahead_blocks
    assert path.read_bytes() == sequence.data


def test_mapped_file_is_padded_with_zeros(machine: Machine) -> None:
    blob = machine.blob(3 * BLOCK + 4096)
    machine.attach(blob)
    path = machine.root / "blobs.mnt" / f"{blob.digest}.m"
    assert path.stat().st_size == 2 << 20
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        assert memory[: len(blob.data)] == blob.data
        assert memory[len(blob.data) :] == bytes((2 << 20) - len(blob.data))


def test_complete_blob_makes_no_requests(machine: Machine) -> None:
    blob = machine.blob(9 * BLOCK)
    path = machine.attach(blob)
    machine.client.prefetch(blob.digest, wait_s=20)
    wait_for(lambda: machine.row(blob)["complete"])
    assert not machine.local(blob).with_suffix(".map").exists()
    with path.open("rb", buffering=0) as file:
        before = machine.counters()
        if not machine.client.status()["passthrough"]:
            pytest.skip("ability fuse: no passthrough before Linux 6.9")
        assert before["passthrough_opens"] == 1
        assert os.pread(file.fileno(), len(blob.data), 0) == blob.data
        with path.open("rb", buffering=0) as second:
            assert os.pread(second.fileno(), 4096, BLOCK) == blob.data[BLOCK : BLOCK + 4096]
        assert machine.counters()["reads"] == before["reads"]
        with pytest.raises(BlobdError, match="is open"):
            machine.client.evict(digest=blob.digest)
    wait_for(lambda: machine.client.stats()["gauges"]["open_files"] == 0)
    assert machine.client.evict(digest=blob.digest) == len(blob.data)
    assert path.read_bytes() == blob.data


def test_open_direct_file_may_be_joined_by_passthrough(machine: Machine) -> None:
    blob = machine.blob(4 * BLOCK)
    path = machine.attach(blob)
    with path.open("rb", buffering=0) as early:
        assert os.pread(early.fileno(), 10, 0) == blob.data[:10]
        machine.client.prefetch(blob.digest, wait_s=20)
        wait_for(lambda: machine.row(blob)["complete"])
        assert path.read_bytes() == blob.data
        assert os.pread(early.fileno(), 4096, BLOCK) == blob.data[BLOCK : BLOCK + 4096]
        machine.kill_worker()
        with path.open("rb", buffering=0) as late:
            assert os.pread(late.fileno(), 4096, 0) == blob.data[:4096]
        assert os.pread(early.fileno(), 4096, BLOCK) == blob.data[BLOCK : BLOCK + 4096]


def test_equal_blocks_are_fetched_once(machine: Machine) -> None:
    one = machine.blob(8 * BLOCK, seed=1)
    other = machine.blob(0, data=one.data[4 * BLOCK :] + bytes(BLOCK) + one.data[:BLOCK])
    machine.attach(one).read_bytes()
    machine.settle()
    path = machine.attach(other)
    machine.mode("down")
    assert path.read_bytes() == other.data
    machine.settle()
    counters = machine.counters()
    assert counters["copied_blocks"] + counters["reflinked_blocks"] == 5
    assert counters["fetched_bytes"] == len(one.data)


@needs("xfs", "mkfs.xfs")
def test_equal_blocks_share_disk_where_the_file_system_can(tmp_path: Path) -> None:
    image, directory = tmp_path / "xfs.img", tmp_path / "root"
    with image.open("wb") as file:
        file.truncate(320 << 20)
    directory.mkdir()
    assert os.system(f"mkfs.xfs -q -m reflink=1 {image} && mount -o loop {image} {directory}") == 0
    machine = Machine(tmp_path, Settings(sync_s=0.1))
    try:
        machine.start()
        one = machine.blob(16 * BLOCK, seed=1)
        other = machine.blob(0, data=one.data[8 * BLOCK :] + one.data[: 8 * BLOCK])
        machine.attach(one).read_bytes()
        machine.settle()
        path = machine.attach(other)
        machine.mode("down")
        assert path.read_bytes() == other.data
        machine.settle()
        assert machine.counters()["reflinked_blocks"] == 16
    finally:
        machine.client.stop()
        os.system(f"umount {directory}")


def test_prefetch_of_ranges_holds_and_traces(machine: Machine) -> None:
    blob = machine.blob(12 * BLOCK)
    path = machine.attach(blob)
    machine.client.record(blob.digest, seconds=60)
    assert machine.client.prefetch(blob.digest, [(0, 10), (5 * BLOCK, 2 * BLOCK)], wait_s=20) == {
        "queued": 3,
        "left": 0,
        "failed": 0,
    }
    assert machine.row(blob)["present"] == 3
    read_at(path, 5 * BLOCK, 4096)
    read_at(path, 9 * BLOCK, 8192)
    accesses = machine.client.trace(blob.digest)
    assert [(offset, length) for _, offset, length in accesses] == [(5 * BLOCK, 4096), (9 * BLOCK, 8192)]
    machine.client.hold(blob.digest, "image")
    with pytest.raises(BlobdError, match="held by image"):
        machine.client.detach(blob.digest)
    machine.client.drop(blob.digest, "image")
    wait_for(lambda: machine.client.stats()["gauges"]["open_files"] == 0)
    machine.client.detach(blob.digest)
    with pytest.raises(BlobdError, match="no blob"):
        machine.client.trace(blob.digest)
    assert not path.exists()
    assert machine.client.stats()["gauges"]["cache_bytes"] == 0
    assert read_at(machine.attach(blob), 0, 4096) == blob.data[:4096]
