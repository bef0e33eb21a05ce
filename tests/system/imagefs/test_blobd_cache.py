"""The blob server's cache: its bound, a full disk, unclean ends and damage."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from dsec_imagefs.blobd import Settings

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


def test_cache_stays_within_its_bound_and_every_byte_is_right(tmp_path: Path) -> None:
    limit = 12 * BLOCK
    with blob_machine(tmp_path, Settings(cache_bytes=limit, sync_s=0.05, fetchers=4)) as machine:
        blobs = [machine.blob(16 * BLOCK, seed=seed) for seed in (1, 2)]
        paths = [machine.attach(blob) for blob in blobs]

        def read_some(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(60):
                which, offset = rng.randrange(2), rng.randrange(16 * BLOCK - 6000)
                assert read_at(paths[which], offset, 6000) == blobs[which].data[offset : offset + 6000]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read_some, range(4)))
        machine.settle()
        stats = machine.client.stats()
        assert stats["counters"]["evicted_blocks"] > 20
        assert stats["gauges"]["cache_bytes"] <= limit
        on_disk = sum(machine.local(blob).stat().st_blocks * 512 for blob in blobs)
        assert on_disk <= limit
        freed = machine.client.evict(bytes_wanted=limit)
        assert freed == stats["gauges"]["cache_bytes"]
        assert [path.read_bytes() for path in paths] == [blob.data for blob in blobs]


def test_whole_blobs_beyond_the_pinned_share_stay_evictable(tmp_path: Path) -> None:
    with blob_machine(tmp_path, Settings(cache_bytes=16 * BLOCK, pinned_share=0.25, sync_s=0.05)) as machine:
        small, big = machine.blob(3 * BLOCK, seed=1), machine.blob(10 * BLOCK, seed=2)
        for blob in (small, big):
            machine.attach(blob)
            assert machine.client.prefetch(blob.digest, wait_s=20)["left"] == 0
        wait_for(lambda: machine.row(small)["complete"])
        assert not machine.row(big)["complete"]
        assert machine.client.evict(bytes_wanted=1 << 30) == 10 * BLOCK


def test_unclean_end_costs_hashes_and_no_fetches(tmp_path: Path) -> None:
    with blob_machine(tmp_path, Settings(sync_s=3600)) as machine:
        blob = machine.blob(8 * BLOCK)
        path = machine.attach(blob)
        assert read_at(path, 0, 5 * BLOCK) == blob.data[: 5 * BLOCK]
        machine.settle()
        machine.kill_both()  # nothing was noted in the map
        machine.mode("down")
        machine.start()
        assert machine.row(blob)["suspect"] == 5
        assert read_at(path, 0, 5 * BLOCK) == blob.data[: 5 * BLOCK]
        assert machine.counters()["rehashed_blocks"] == 5


def test_what_was_damaged_before_an_unclean_end_is_fetched_again(tmp_path: Path) -> None:
    with blob_machine(tmp_path, Settings(sync_s=3600)) as machine:
        blob = machine.blob(8 * BLOCK)
        path = machine.attach(blob)
        assert path.read_bytes() == blob.data
        machine.settle()
        machine.kill_both()
        with machine.local(blob).open("r+b") as file:
            file.seek(3 * BLOCK + 17)
            file.write(bytes([blob.data[3 * BLOCK + 17] ^ 4]))
        machine.start()
        assert path.read_bytes() == blob.data
        assert machine.counters()["wrong_local_blocks"] == 1
        assert machine.counters()["fetched_bytes"] == BLOCK


def test_scrub_finds_a_flipped_bit(machine: Machine) -> None:
    blob = machine.blob(6 * BLOCK)
    path = machine.attach(blob)
    assert read_at(path, 0, 4 * BLOCK) == blob.data[: 4 * BLOCK]
    machine.settle()
    assert machine.client.verify(blob.digest) == {"checked": 4, "bad": [], "dropped": 0}
    with machine.local(blob).open("r+b") as file:
        file.seek(2 * BLOCK + 99)
        file.write(bytes([blob.data[2 * BLOCK + 99] ^ 128]))
    assert machine.client.verify(blob.digest) == {"checked": 4, "bad": [2], "dropped": 1}
    assert path.read_bytes() == blob.data


def test_full_disk_serves_from_memory(tmp_path: Path) -> None:
    machine = Machine(tmp_path, Settings(sync_s=0.1))
    directory = tmp_path / "root" / "blobs"
    directory.mkdir(parents=True)
    os.system(f"mount -t tmpfs -o size={6 * BLOCK} none {directory}")
    try:
        machine.start()
        blob = machine.blob(20 * BLOCK)
        path = machine.attach(blob)
        assert path.read_bytes() == blob.data
        assert path.read_bytes() == blob.data
        machine.settle()
        counters = machine.counters()
        assert counters["disk_full"] >= 1
        assert counters["uncached_blocks"] >= 10
        assert machine.client.evict(bytes_wanted=1 << 30) >= 3 * BLOCK
    finally:
        machine.client.stop()
        os.system(f"umount {directory}")
