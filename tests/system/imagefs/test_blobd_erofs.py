"""EROFS over the blob server's files: an image whose data is fetched when it is read."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from dsec_imagefs.blobd import BlobSpec, Settings
from dsec_imagefs.errors import SyscallError
from dsec_imagefs.mountapi import MOUNT_ATTR_RDONLY, mount_erofs
from dsec_imagefs.syscalls import umount

from tests.kit import tarbytes as t
from tests.kit.abilities import needs
from tests.kit.blobs import BLOCK, Machine, blob_machine, read_at, read_in_thread, wait_for
from tests.kit.layers import build, merge

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = needs("root", "fuse", "fuse-resend", "erofs")

LOW = {b"low": random.Random(1).randbytes(30 * BLOCK + 77), b"both": b"old" * 5000}
TOP = {b"top": random.Random(2).randbytes(9 * BLOCK), b"both": b"new" * 40_000}
TRUTH = {**LOW, **TOP}


@contextmanager
def mounted(machine: Machine, tmp_path: Path) -> Iterator[Path]:
    """An image of two layers with nothing of its data here."""
    out, target = tmp_path / "layers", tmp_path / "mnt"
    out.mkdir(exist_ok=True)
    target.mkdir(exist_ok=True)
    tars = [b"".join(t.file(name, data) for name, data in files.items()) for files in (LOW, TOP)]
    layers = build(tars, out, block_bytes=BLOCK)
    merged = merge(layers, out)
    devices = []
    for blob in merged.devices:
        layer = next(one for one in layers if one.blob.digest == blob)
        machine.store.put(blob, out / blob, deadline=time.monotonic() + 60)
        spec = BlobSpec(
            digest=blob,
            size=layer.blob.size,
            index=str(out / layer.index.digest),
            wire=layer.wire.digest,
            store=f"dir:{machine.store.root}",
        )
        devices.append(machine.client.attach(spec, user="image")["direct"])
    meta = tmp_path / "meta"
    meta.write_bytes(merged.metadata)
    try:
        mount_erofs(str(meta), target, devices=devices, flags=MOUNT_ATTR_RDONLY)
    except SyscallError as error:
        if error.errno == errno.ENOTBLK:
            pytest.skip("ability erofs: mounts of files need Linux 6.12")
        raise
    try:
        yield target
    finally:
        umount(target)


def test_files_come_when_they_are_read_and_only_once(tmp_path: Path) -> None:
    with blob_machine(tmp_path) as machine, mounted(machine, tmp_path) as root:
        assert sorted(os.listdir(root)) == ["both", "low", "top"]
        assert machine.counters()["fetched_bytes"] == 0, "names and attributes need no data"
        assert (root / "both").read_bytes() == TRUTH[b"both"]
        assert 0 < machine.counters()["fetched_bytes"] <= 4 * BLOCK, "what is not read is not fetched"
        for name, data in TRUTH.items():
            assert (root / os.fsdecode(name)).read_bytes() == data
        before = machine.counters()
        for name, data in TRUTH.items():
            assert (root / os.fsdecode(name)).read_bytes() == data
        after = machine.counters()
        assert (after["reads"], after["waited_reads"]) == (before["reads"], before["waited_reads"]), "page cache alone"


def test_any_user_reads_the_image(tmp_path: Path) -> None:
    """The blob server's own files are root's alone."""
    with blob_machine(tmp_path) as machine, mounted(machine, tmp_path) as root:
        program = "import os, sys; os.setuid(65534); sys.stdout.buffer.write(os.pread(0, 5000, 700_000))"
        with (root / "low").open("rb") as file:
            argv = [sys.executable, "-c", program]
            done = subprocess.run(argv, stdin=file, capture_output=True, timeout=30, check=True, cwd="/")
        assert done.stdout == LOW[b"low"][700_000:705_000]
        assert machine.counters()["waited_reads"] >= 1


def test_readers_of_the_image_outlive_either_process(tmp_path: Path) -> None:
    with blob_machine(tmp_path) as machine, mounted(machine, tmp_path) as root:
        machine.mode("slow 0.7")
        for turn, who in enumerate(("worker_pid", "supervisor_pid")):
            waiting = [read_in_thread(root / "low", (10 * turn + n) * BLOCK, 5000) for n in (1, 5)]
            wait_for(lambda: machine.client.stats()["gauges"]["waiting_reads"] >= 2)
            status = machine.client.status()
            os.kill(status[who], signal.SIGKILL)
            for number, future in zip((1, 5), waiting, strict=True):
                at = (10 * turn + number) * BLOCK
                assert future.result(timeout=30) == LOW[b"low"][at : at + 5000]
            machine.other_than(status["worker_pid"])
        machine.mode("ok")
        assert (root / "low").read_bytes() == LOW[b"low"]


def test_a_dead_server_is_eio_and_a_mount_made_anew_is_right(tmp_path: Path) -> None:
    with blob_machine(tmp_path, Settings(sync_s=0.1, readahead_blocks=0)) as machine:
        with mounted(machine, tmp_path) as root:
            known = read_at(root / "low", 0, 4096)
            assert known == LOW[b"low"][:4096]
            machine.kill_both()
            assert read_at(root / "low", 0, 4096) == known, "what is in the page cache needs nobody"
            with pytest.raises(OSError) as caught:
                read_at(root / "low", 20 * BLOCK, 4096)
            assert caught.value.errno == errno.EIO
            machine.start()
            assert list(machine.client.status()["stale"]) == ["image"]
            with pytest.raises(OSError):
                read_at(root / "low", 20 * BLOCK, 4096)
        with mounted(machine, tmp_path) as root:
            assert machine.client.status()["stale"] == {}
            for name, data in TRUTH.items():
                assert (root / os.fsdecode(name)).read_bytes() == data


def test_a_store_that_is_down_for_a_while_poisons_nothing(tmp_path: Path) -> None:
    with blob_machine(tmp_path, Settings(read_deadline_s=0.3)) as machine, mounted(machine, tmp_path) as root:
        machine.mode("wrong 1")
        with pytest.raises(OSError):
            read_at(root / "top", 0, 100)
        machine.mode("down")
        with pytest.raises(OSError):
            read_at(root / "low", 3 * BLOCK, 100)
        machine.mode("ok")
        for name, data in TRUTH.items():
            assert (root / os.fsdecode(name)).read_bytes() == data
