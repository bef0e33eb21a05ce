"""The blob server when something dies or the store misbehaves: right bytes or EIO, never anything else."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from dsec_imagefs.blobd import Settings

from tests.kit.abilities import needs
from tests.kit.blobs import BLOCK, Machine, blob_machine, read_at, read_in_thread, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = needs("root", "fuse")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with blob_machine(tmp_path) as made:
        yield made


@needs("fuse-resend")
@pytest.mark.parametrize("who", ["worker_pid", "supervisor_pid"])
def test_one_death_in_mid_fetch_is_not_noticed(machine: Machine, who: str) -> None:
    blob = machine.blob(6 * BLOCK)
    path = machine.attach(blob)
    assert read_at(path, 0, 100) == blob.data[:100]
    mount_id = machine.client.status()["mount_id"]
    machine.mode("slow 1")
    with path.open("rb", buffering=0) as file:
        futures = [read_in_thread(path, number * BLOCK + 5, BLOCK) for number in range(1, 5)]
        wait_for(lambda: machine.client.stats()["gauges"]["waiting_reads"] == 4)
        status = machine.client.status()
        os.kill(status[who], signal.SIGKILL)
        machine.mode("ok")
        for number, future in enumerate(futures, 1):
            at = number * BLOCK + 5
            assert future.result(timeout=20) == blob.data[at : at + BLOCK]
        assert os.pread(file.fileno(), 4096, 5 * BLOCK) == blob.data[5 * BLOCK : 5 * BLOCK + 4096]
    machine.other_than(status["worker_pid"])
    after = machine.client.status()
    assert after["mount_id"] == mount_id
    assert after["worker_deaths"] == 1
    assert after["supervisor_pid"] == (status["worker_pid"] if who == "supervisor_pid" else status["supervisor_pid"])
    assert after["stale"] == {}
    assert sorted(os.listdir(path.parent)) == [f"{blob.digest}.d", f"{blob.digest}.m"]


def test_everything_killed_is_eio_and_a_new_server_mounts_anew(machine: Machine) -> None:
    blob = machine.blob(6 * BLOCK)
    path = machine.attach(blob)
    machine.client.hold(blob.digest, "image-1")
    machine.client.hold(blob.digest, "image-2")
    old = os.open(path, os.O_RDONLY)
    try:
        assert os.pread(old, 100, 0) == blob.data[:100]
        machine.mode("slow 3")
        waiting = read_in_thread(path, 2 * BLOCK, 100)
        wait_for(lambda: machine.client.stats()["gauges"]["waiting_reads"] == 1)
        machine.kill_both()
        with pytest.raises(OSError) as caught:
            waiting.result(timeout=20)
        assert caught.value.errno in (errno.EIO, errno.ECONNABORTED, errno.ENOTCONN)
        with pytest.raises(OSError):
            os.pread(old, 100, 3 * BLOCK)
        machine.mode("ok")
        machine.start()
        status = machine.client.status()
        assert status["stale"] == {"image-1": [blob.digest], "image-2": [blob.digest]}
        machine.client.drop(blob.digest, "image-1")
        machine.client.hold(blob.digest, "image-2")
        assert machine.client.status()["stale"] == {}
        assert path.read_bytes() == blob.data
        with pytest.raises(OSError):  # the dead mount stays dead: never zeros, never stale data
            os.pread(old, 100, 3 * BLOCK)
    finally:
        with suppress(OSError):  # close(2) asks the server, which is gone
            os.close(old)


def test_without_resend_lost_readers_get_eio(tmp_path: Path) -> None:
    settings = Settings(resend=False, sync_s=0.1)
    with blob_machine(tmp_path, settings) as machine:
        blob = machine.blob(4 * BLOCK)
        path = machine.attach(blob)
        machine.client.hold(blob.digest, "image")
        assert not machine.client.status()["resend"]
        machine.mode("slow 2")
        waiting = read_in_thread(path, 0, 100)
        wait_for(lambda: machine.client.stats()["gauges"]["waiting_reads"] == 1)
        machine.kill_worker()
        with pytest.raises(OSError):
            waiting.result(timeout=20)
        machine.mode("ok")
        assert machine.client.status()["stale"] == {"image": [blob.digest]}
        assert path.read_bytes() == blob.data


@pytest.mark.parametrize("mode", ["down", "wrong 1", "short 1", "hang 1.5"])
def test_a_store_that_fails_is_eio_in_time_and_no_more(tmp_path: Path, mode: str) -> None:
    with blob_machine(tmp_path, Settings(read_deadline_s=0.4, fetchers=2)) as machine:
        blob = machine.blob(3 * BLOCK)
        path = machine.attach(blob)
        assert read_at(path, 0, 50) == blob.data[:50]
        machine.mode(mode)
        with pytest.raises(OSError) as caught:
            read_at(path, BLOCK - 10, 20)
        assert caught.value.errno == errno.EIO
        assert read_at(path, 10, 50) == blob.data[10:60], "what is here needs no store"
        machine.mode("ok")
        wait_for(lambda: machine.client.stats()["gauges"]["flights"] == 0)
        assert path.read_bytes() == blob.data
        assert machine.counters()["failed_reads"] >= 1
        if mode == "hang 1.5":
            assert machine.counters()["expired_reads"] >= 1


@needs("fuse-resend")
def test_a_worker_that_hangs_is_replaced(tmp_path: Path) -> None:
    with blob_machine(tmp_path, Settings(heartbeat_s=1.5, sync_s=0.1)) as machine:
        blob = machine.blob(4 * BLOCK)
        path = machine.attach(blob)
        pid = machine.client.status()["worker_pid"]
        os.kill(pid, signal.SIGSTOP)
        assert read_at(path, BLOCK, 100) == blob.data[BLOCK : BLOCK + 100]
        assert machine.client.status()["worker_pid"] != pid


@needs("fuse-resend")
def test_a_read_that_kills_each_worker_is_eio_in_the_end(machine: Machine) -> None:
    blob = machine.blob(4 * BLOCK)
    path = machine.attach(blob)
    assert read_at(path, 0, 100) == blob.data[:100]
    machine.client.hold(blob.digest, "image")
    machine.mode("die")
    waiting = read_in_thread(path, BLOCK, 100)
    with pytest.raises(OSError):
        waiting.result(timeout=40)
    machine.mode("ok")
    assert machine.client.status()["stale"] == {"image": [blob.digest]}
    assert path.read_bytes() == blob.data


def test_sigterm_ends_it_cleanly_and_what_was_fetched_is_there_again(machine: Machine) -> None:
    blob = machine.blob(4 * BLOCK)
    path = machine.attach(blob)
    assert read_at(path, BLOCK, BLOCK) == blob.data[BLOCK : 2 * BLOCK]
    os.kill(machine.client.status()["supervisor_pid"], signal.SIGTERM)
    wait_for(lambda: not machine.client.is_running())
    assert not os.path.ismount(path.parent)
    machine.mode("down")
    machine.start()
    assert machine.row(blob)["suspect"] == 0, "all was noted"
    assert read_at(path, BLOCK, BLOCK) == blob.data[BLOCK : 2 * BLOCK]


@needs("fuse-resend")
def test_soak_under_faults(tmp_path: Path) -> None:
    """Seconds of everything at once; each byte that is read is compared."""
    settings = Settings(
        cache_bytes=20 * BLOCK, sync_s=0.05, fetchers=4, read_deadline_s=20, pinned_share=0.3, quick_deaths=1000
    )
    with blob_machine(tmp_path, settings) as machine:
        blobs = [machine.blob(size * BLOCK + 4096, seed=size) for size in (4, 11, 17)]
        paths = [machine.attach(blob) for blob in blobs]
        end = time.monotonic() + 6
        errors: list[str] = []

        def read_on(seed: int) -> int:
            rng, count = random.Random(seed), 0
            while time.monotonic() < end:
                which = rng.randrange(3)
                data, path = blobs[which].data, paths[which]
                offset, length = rng.randrange(len(data)), rng.choice([4096, 9000, 2 * BLOCK])
                if rng.random() < 0.3:
                    path = path.with_suffix(".m")
                try:
                    found = read_at(path, offset, length)
                except OSError as error:
                    if error.errno != errno.EIO:
                        errors.append(repr(error))
                    continue
                wanted = data[offset : offset + length]
                if found[: len(wanted)] != wanted or any(found[len(wanted) :]):
                    errors.append(f"wrong bytes at {offset}+{length} of {which}")
                count += 1
            return count

        def disturb() -> None:
            rng = random.Random(99)
            while time.monotonic() < end:
                machine.mode(rng.choice(["ok", "ok", "flaky 0.3", "wrong 0.3", "short 0.3", "slow 0.02"]))
                time.sleep(rng.uniform(0.1, 0.4))
                chance = rng.random()
                if chance < 0.5:
                    status = machine.client.status()
                    with suppress(ProcessLookupError):
                        os.kill(status["supervisor_pid" if chance < 0.15 else "worker_pid"], signal.SIGKILL)
                    machine.other_than(status["worker_pid"])
                elif chance < 0.7:
                    machine.client.evict(bytes_wanted=5 * BLOCK)
            machine.mode("ok")

        disturber = threading.Thread(target=disturb)
        disturber.start()
        with ThreadPoolExecutor(6) as pool:
            counts = list(pool.map(read_on, range(6)))
        disturber.join()
        assert errors == []
        assert sum(counts) > 50
        assert machine.client.status()["worker_deaths"] >= 3
        assert [path.read_bytes() for path in paths] == [blob.data for blob in blobs]
        for blob in blobs:
            assert machine.client.verify(blob.digest)["bad"] == []
