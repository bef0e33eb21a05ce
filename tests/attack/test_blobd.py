"""Those who may open the blob server's files or socket: what they can't do, what refuses it, and what they can."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from dsec_imagefs.blobd import BlobdError
from dsec_imagefs.blobd.client import connect

from tests.kit.abilities import needs
from tests.kit.blobs import BLOCK, Blob, Machine, blob_machine, read_at, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = needs("root", "fuse")

ANYBODY = 65534
_AS_USER = """
import os, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
fd = os.open(sys.argv[1], os.O_RDONLY)
print(os.pread(fd, 16, 0).hex())
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with blob_machine(tmp_path_factory.mktemp("blobd")) as made:
        yield made


@pytest.fixture(scope="module")
def blob(machine: Machine) -> Blob:
    return machine.blob(8 * BLOCK, seed=5)


@pytest.fixture
def path(machine: Machine, blob: Blob) -> Path:
    """The attached blob, which reads right before and after."""
    return machine.attach(blob)


def refused(call, *numbers: int) -> None:
    with pytest.raises(OSError) as caught:
        call()
    assert caught.value.errno in numbers, caught.value


def test_names_outside_the_table_are_not_there(machine: Machine, blob: Blob, path: Path) -> None:
    (machine.root / "blobs" / ("f" * 64)).write_bytes(b"not attached")
    names = ["", ".", "..", "f" * 64 + ".d", blob.digest, f"{blob.digest}.x", f"{blob.digest}.d.d", "\n", "a" * 255]
    for name in names[3:]:
        refused(lambda name=name: os.open(path.parent / name, os.O_RDONLY), errno.ENOENT)
    refused(lambda: os.open(f"{path}/x", os.O_RDONLY), errno.ENOTDIR)
    assert read_at(path, 0, 10) == blob.data[:10]


def test_nothing_can_be_changed(machine: Machine, blob: Blob, path: Path) -> None:
    parent = path.parent
    # the kernel's own answer, by the mount's flag
    for call in (
        lambda: os.open(path, os.O_RDWR),
        lambda: os.open(path, os.O_WRONLY | os.O_TRUNC),
        lambda: os.truncate(path, 0),
        lambda: os.unlink(path),
        lambda: os.rename(path, parent / "y"),
        lambda: os.mkdir(parent / "d"),
        lambda: os.symlink("/etc/passwd", parent / "s"),
        lambda: os.open(parent / "new", os.O_CREAT | os.O_WRONLY),
        lambda: os.chmod(path, 0o777),
        lambda: os.setxattr(path, "user.x", b"1"),
        lambda: os.utime(path, (0, 0)),
    ):
        refused(call, errno.EROFS, errno.EACCES)
    # and the server's, where the flag was taken away
    os.system(f"mount -o remount,rw {parent}")
    try:
        refused(lambda: os.open(path, os.O_RDWR), errno.EROFS, errno.EACCES)
        refused(lambda: os.truncate(path, 0), errno.EROFS)
        refused(lambda: os.unlink(path), errno.EROFS)
        refused(lambda: os.open(parent / "new", os.O_CREAT | os.O_WRONLY), errno.EROFS)
    finally:
        os.system(f"mount -o remount,ro {parent}")
    assert path.read_bytes() == blob.data


def test_odd_requests_get_an_errno_and_end_nothing(machine: Machine, blob: Blob, path: Path) -> None:
    worker = machine.client.status()["worker_pid"]
    fd = os.open(path, os.O_RDONLY)
    try:
        for request in (0x40049409, 0x4020940D, 0x4010E501, 0x5401, 0xC0185879):  # FICLONE, ..., FITRIM
            with pytest.raises(OSError):
                fcntl.ioctl(fd, request, bytes(64))
        refused(lambda: os.getxattr(path, "user.x"), errno.EOPNOTSUPP, errno.ENODATA)
        refused(lambda: os.listxattr(path), errno.EOPNOTSUPP)
        assert os.lseek(fd, 0, os.SEEK_END) == len(blob.data)
        assert os.pread(fd, 10, 1 << 60) == b""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
        assert os.statvfs(path).f_bfree == 0
    finally:
        os.close(fd)
    assert machine.client.status()["worker_pid"] == worker
    assert read_at(path, 0, 10) == blob.data[:10]


def test_a_forget_storm_leaves_the_names_right(machine: Machine, blob: Blob, path: Path) -> None:
    for _ in range(300):
        os.stat(path)
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("2")  # FORGET and BATCH_FORGET for everything that is not open
    for _ in range(300):
        os.close(os.open(path, os.O_RDONLY))
    assert sorted(os.listdir(path.parent)) == [f"{blob.digest}.d", f"{blob.digest}.m"]
    wait_for(lambda: machine.client.stats()["gauges"]["open_files"] == 0)


def test_a_killed_reader_is_let_go_and_the_next_one_gets_the_bytes(machine: Machine, path: Path) -> None:
    other = machine.blob(4 * BLOCK, seed=77)
    there = machine.attach(other)
    machine.mode("slow 1.5")
    try:
        child = subprocess.Popen(["dd", f"if={there}", "of=/dev/null", "bs=4096", "count=1"], stderr=subprocess.DEVNULL)
        wait_for(lambda: machine.client.stats()["gauges"]["waiting_reads"] == 1)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=20)
        wait_for(lambda: machine.client.stats()["gauges"]["waiting_reads"] == 0)
        assert machine.counters()["interrupted_reads"] >= 1
    finally:
        machine.mode("ok")
    assert there.read_bytes() == other.data


def test_other_users_are_refused_by_the_mount_itself(machine: Machine, blob: Blob, path: Path) -> None:
    """Not by the directories above it: they are given a descriptor of the mount. Root is the positive twin."""
    directory = os.open(path.parent, os.O_PATH)
    try:
        for uid, wanted in ((0, blob.data[:16].hex()), (ANYBODY, "PermissionError")):
            argv = [sys.executable, "-c", _AS_USER, f"/proc/self/fd/{directory}/{path.name}", str(uid)]
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=20, check=False, pass_fds=[directory], cwd="/"
            )
            assert wanted in done.stdout + done.stderr
    finally:
        os.close(directory)


def talk(machine: Machine, raw: bytes, *, then_close: bool = False) -> bytes:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(20)
        connect(link, machine.root / "blobd" / "control.sock")
        link.sendall(raw)
        if then_close:
            return b""
        link.shutdown(socket.SHUT_WR)
        answer = b""
        while part := link.recv(65536):
            answer += part
        return answer[4:]


def framed(body: bytes) -> bytes:
    return struct.pack("=I", len(body)) + body


@pytest.mark.parametrize(
    "raw",
    [
        framed(b"{"),
        framed(b"[]"),
        framed(b"null"),
        framed(b'{"verb": 7}'),
        framed(b'{"verb": "nope"}'),
        framed(b'{"verb": "attach", "blob": 5}'),
        framed(b'{"verb": "attach", "blob": {"digest": "../../etc", "size": 5, "index": "/x"}}'),
        framed(b'{"verb": "attach", "blob": {"digest": "%s", "size": -1, "index": "/x"}}' % (b"a" * 64)),
        framed(b'{"verb": "attach", "blob": {"digest": "%s", "size": 10, "index": "/dev/null"}}' % (b"a" * 64)),
        framed(b'{"verb": "detach", "digest": ["x"]}'),
        framed(b'{"verb": "prefetch", "digest": "%s", "ranges": [[0]]}' % (b"a" * 64)),
        framed(b'{"verb": "evict", "bytes_wanted": 1e999}'),
        framed(b'{"verb": "evict", "bytes_wanted": NaN}'),
        framed(b"\xff\xfe"),
        framed(b"[" * 200_000),
        struct.pack("=I", 0xFFFFFFFF),
    ],
)
def test_malformed_messages_are_refused_by_name(machine: Machine, blob: Blob, path: Path, raw: bytes) -> None:
    worker = machine.client.status()["worker_pid"]
    answer = json.loads(talk(machine, raw))
    assert answer["error"]["code"] in ("bad_source", "not_found", "corrupt"), answer
    assert answer["error"]["message"]
    assert machine.client.status()["worker_pid"] == worker
    assert [row["digest"] for row in machine.client.stats()["blobs"]][:1]


def test_callers_that_say_nothing_do_not_keep_others_out(machine: Machine) -> None:
    links = []
    try:
        for _ in range(20):
            link = socket.socket(socket.AF_UNIX)
            connect(link, machine.root / "blobd" / "control.sock")
            links.append(link)
        assert machine.client.status()["mount"]
    finally:
        for link in links:
            link.close()
    talk(machine, b"\x10", then_close=True)
    assert machine.client.status()["mount"]


def test_an_index_that_lies_attaches_nothing(machine: Machine, blob: Blob, path: Path, tmp_path: Path) -> None:
    raw = blob.index.render()
    for name, content in (("f" * 64, raw), ("short", raw[:-1]), ("other", raw.replace(raw[16:20], b"\0\0\1\0", 1))):
        (tmp_path / name).write_bytes(content)
        spec = type(blob.spec)(digest="b" * 64, size=blob.spec.size, index=str(tmp_path / name))
        with pytest.raises(BlobdError) as caught:
            machine.client.attach(spec)
        assert caught.value.code in ("corrupt", "conflict", "unsupported")
    assert not (machine.root / "blobs" / ("b" * 64)).exists()
    assert len(machine.client.stats()["blobs"]) <= 2
    assert path.read_bytes() == blob.data
