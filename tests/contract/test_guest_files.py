"""What every dsec-init promises about files (contract.md, Files; cases F1-F5), on a release and a sanitized build."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest
from libdsec.errors import DeniedError, DsecError, NotFoundError, UsageError

from nomad_dsec.guest.frames import Frame, Tag
from nomad_dsec.guest.spec import PolicyAttempt
from tests.kit.abilities import needs
from tests.kit.guest import code_of, open_room, pieces, read, running_guest

pytestmark = [needs("root", "cgroup", "cc"), pytest.mark.timeout(180)]


@pytest.fixture(params=["release", "sanitized"])
async def guest(request):
    async with running_guest(request.param) as running:
        yield running


@pytest.fixture
def room():
    with open_room() as made:
        yield made


@pytest.mark.parametrize("size", [0, 1, 18_000, 96_000, 200_000, 16 << 20])
async def test_f1_f2_every_size_arrives_and_comes_back(guest, room, size):
    data = os.urandom(size)
    target = room / "f"
    assert await guest.channel.write_file(str(target), pieces(data), size=size) == size
    assert hashlib.sha256(target.read_bytes()).digest() == hashlib.sha256(data).digest()
    assert await read(guest.channel, str(target)) == data
    assert await read(guest.channel, str(target), 10, 5) == data[10:15]
    assert [p.name for p in room.iterdir()] == ["f"]


async def test_hundreds_of_requests_at_once_wait_for_their_turn(guest, room):
    (room / "f").write_bytes(b"x" * 100_000)
    found = await asyncio.gather(*(guest.channel.stat(str(room / "f")) for _ in range(300)))
    assert {info.size for info in found} == {100_000}
    read_back = await asyncio.gather(*(read(guest.channel, str(room / "f")) for _ in range(200)))
    assert set(read_back) == {b"x" * 100_000}


async def test_f3_many_transfers_at_once_in_bounded_memory(guest, room):
    size, many = 12 << 20, 16
    data = os.urandom(1 << 20)

    async def one(number: int) -> None:
        async def source():
            for _ in range(size // len(data)):
                yield data

        await guest.channel.write_file(str(room / f"f{number}"), source(), size=size)
        count = 0
        async for piece in guest.channel.read_file(str(room / f"f{number}")):
            count += len(piece)
        assert count == size

    await asyncio.gather(*(one(number) for number in range(many)))
    if not guest.sanitized:  # a sanitizer keeps freed memory for a while
        assert guest.rss_kib() < 16 * 1024  # 192 MiB went through, each way


async def test_a_failed_write_shows_the_old_file_and_leaves_nothing(guest, room):
    target = room / "f"
    target.write_bytes(b"old")
    for announced, sent in ((10, b"short"), (3, b"too long")):
        with pytest.raises(UsageError) as caught:
            await guest.channel.write_file(str(target), pieces(sent), size=announced)
        assert code_of(caught) == "length_mismatch"
    other = await guest.connect()

    async def endless():
        yield b"x" * 200_000
        await other.close()
        yield b"x"

    with pytest.raises(DsecError) as caught:
        await other.write_file(str(target), endless())
    assert code_of(caught) == "connection_lost"

    async def failing():
        yield b"x"
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        await guest.channel.write_file(str(target), failing())
    await asyncio.sleep(0.1)
    assert target.read_bytes() == b"old"
    assert [p.name for p in room.iterdir()] == ["f"]


async def test_append_that_fails_is_taken_back(guest, room):
    target = room / "log"
    assert await guest.channel.write_file(str(target), b"one", append=True) == 3
    assert await guest.channel.write_file(str(target), b"two", append=True) == 3
    with pytest.raises(UsageError):
        await guest.channel.write_file(str(target), pieces(b"three"), append=True, size=99)
    assert target.read_bytes() == b"onetwo"


async def test_modes_owners_links_and_parents(guest, room):
    target = room / "a" / "b" / "run"
    with pytest.raises(NotFoundError):
        await guest.channel.write_file(str(target), b"x")
    await guest.channel.write_file(str(target), b"x", parents=True, mode=0o4751)
    assert target.stat().st_mode & 0o7777 == 0o4751
    os.chown(target, 1234, 4321)
    target.chmod(0o750)
    await guest.channel.write_file(str(target), b"y")
    assert (target.stat().st_mode & 0o7777, target.stat().st_uid, target.stat().st_gid) == (0o750, 1234, 4321)
    (room / "link").symlink_to("a/b/run")
    (room / "dangling").symlink_to("a/new")
    await guest.channel.write_file(str(room / "link"), b"through")
    await guest.channel.write_file(str(room / "dangling"), b"made")
    assert (room / "link").is_symlink()
    assert target.read_bytes() == b"through"
    assert (room / "a" / "new").read_bytes() == b"made"
    await guest.channel.write_file(str(room / "own"), b"z", user="nobody")
    assert (room / "own").stat().st_uid == 65534
    (room / "a").chmod(0o700)
    with pytest.raises(DeniedError):
        await guest.channel.write_file(str(room / "a" / "no"), b"z", user="nobody")


async def test_what_is_no_regular_file_is_refused(guest, room):
    os.mkfifo(room / "fifo")
    (room / "dir").mkdir()
    for path, wanted in (("fifo", "not_regular"), ("dir", "is_a_directory"), ("none", "not_found")):
        with pytest.raises(DsecError) as caught:
            await read(guest.channel, str(room / path))
        assert code_of(caught) == wanted
        if path != "none":
            with pytest.raises(DsecError) as caught:
                await guest.channel.write_file(str(room / path), b"x")
            assert code_of(caught) == wanted
    with pytest.raises(DsecError) as caught:
        await read(guest.channel, "/dev/zero")
    assert code_of(caught) == "not_regular"
    assert await read(guest.channel, "/proc/self/cgroup") != b""


async def test_directories_and_entries(guest, room):
    strange = bytes(set(range(1, 256)) - {ord("/")})[:200]
    await guest.channel.write_file(os.fsencode(room) + b"/" + strange, b"12345")
    (room / "l").symlink_to("nowhere")
    os.mkfifo(room / "p")
    await guest.channel.mkdir(str(room / "d"), mode=0o711)
    found = {entry.name: entry for entry in await guest.channel.list_dir(str(room))}
    assert {name: entry.kind for name, entry in found.items()} == {
        strange: "file",
        b"l": "symlink",
        b"p": "fifo",
        b"d": "dir",
    }
    assert (found[strange].size, found[b"l"].link, found[b"d"].mode) == (5, b"nowhere", 0o711)
    seen = await guest.channel.stat(str(room / "l"), follow=False)
    assert (seen.kind, seen.link, seen.name) == ("symlink", b"nowhere", b"l")
    with pytest.raises(NotFoundError):
        await guest.channel.stat(str(room / "l"))
    assert (await guest.channel.stat("/")).kind == "dir"
    with pytest.raises(UsageError) as caught:
        await guest.channel.mkdir(str(room / "d"))
    assert code_of(caught) == "exists"
    await guest.channel.mkdir(str(room / "d"), parents=True)
    await guest.channel.mkdir(str(room / "x" / "y" / "z"), parents=True)
    await guest.channel.chmod(str(room / "d"), 0o2750)
    assert (room / "d").stat().st_mode & 0o7777 == 0o2750
    for number in range(3000):
        (room / "d" / f"{number:04}").touch()
    assert len(await guest.channel.list_dir(str(room / "d"))) == 3000


async def test_move_and_remove(guest, room):
    (room / "a").write_bytes(b"a")
    (room / "b").write_bytes(b"b")
    with pytest.raises(UsageError) as caught:
        await guest.channel.move(str(room / "a"), str(room / "b"), replace=False)
    assert code_of(caught) == "exists"
    await guest.channel.move(str(room / "a"), str(room / "b"))
    assert (room / "b").read_bytes() == b"a"
    tree = room / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "f").write_bytes(b"x" * 100_000)
    (tree / "deep" / "f").chmod(0o640)
    (tree / "l").symlink_to("deep/f")
    other = Path("/dev/shm") / f"dsec-guest-{os.getpid()}"  # another file system: copied, then removed
    try:
        await guest.channel.move(str(tree), str(other))
        assert not tree.exists()
        assert (other / "l").read_bytes() == b"x" * 100_000
        assert (other / "deep" / "f").stat().st_mode & 0o7777 == 0o640
        with pytest.raises(UsageError) as caught:
            await guest.channel.remove(str(other))
        assert code_of(caught) == "not_empty"
    finally:
        await guest.channel.remove(str(other), recursive=True)
    assert not other.exists()
    with pytest.raises(NotFoundError):
        await guest.channel.remove(str(other))
    await guest.channel.remove(str(other), missing_ok=True)


async def test_policy_probe_reports_each_attempt(guest):
    attempts = [
        PolicyAttempt(kind="open_read", target=b"/etc/passwd", errnos=(0,)),
        PolicyAttempt(kind="open_read", target=b"/no/such"),
        PolicyAttempt(kind="open_write", target=b"/etc", errnos=(21,)),
        PolicyAttempt(kind="socket", args=(2, 1, 0), errnos=(0,)),
        PolicyAttempt(kind="socket", args=(999, 1, 0), errnos=(97,)),
        PolicyAttempt(kind="connect", target=b"127.0.0.1 1", errnos=(111,)),
        PolicyAttempt(kind="syscall", args=(39,), errnos=(0,)),
        PolicyAttempt(kind="syscall", args=(231, 3), errnos=(0,)),  # exit_group: the child is gone, the rest goes on
        PolicyAttempt(kind="syscall", args=(62, 0, 9), errnos=(1009,)),  # kill(0, SIGKILL): so does a signal
        PolicyAttempt(kind="syscall", args=(39,), errnos=(0,)),
    ]
    found = await guest.channel.policy_probe(attempts)
    assert [f.errno for f in found][:7] == [0, 2, 21, 0, 97, 111, 0]
    assert [f.passed for f in found] == [True, False, True, True, True, True, True, False, True, True]


async def test_clock_and_seed_refuse_nonsense(guest):
    for call in (guest.channel.clock_set(0), guest.channel.reseed(b""), guest.channel.reseed(b"x" * 513)):
        with pytest.raises(UsageError) as caught:
            await call
        assert code_of(caught) == "bad_field"


async def test_bad_requests_name_the_field_and_cost_nothing(guest):
    link = guest.channel._link
    for frame, fields, field in (
        (Frame.READ, [], "path"),
        (Frame.READ, [(Tag.PATH, b"")], "path"),
        (Frame.READ, [(Tag.PATH, b"a\0b")], "path"),
        (Frame.EXEC, [(Tag.EXEC_ID, b"a/b"), (Tag.ARGV, b"x")], "exec_id"),
        (Frame.EXEC, [(Tag.EXEC_ID, b"a")], "argv"),
        (Frame.EXEC, [(Tag.EXEC_ID, b"a"), (Tag.ARGV, b"x"), (Tag.CWD, b"rel")], "cwd"),
        (Frame.EXEC, [(Tag.EXEC_ID, b"a"), (Tag.ARGV, b"x"), (Tag.RLIMIT, b"123")], "rlimit"),
        (Frame.EXEC, [(Tag.EXEC_ID, b"a"), (Tag.ARGV, b"x"), (Tag.MAX_OUTPUT, 1 << 40)], "max_output"),
        (Frame.CHMOD, [(Tag.PATH, b"/"), (Tag.MODE, 0o10000)], "mode"),
        (Frame.STAT, [(Tag.PATH, b"/"), (Tag.USER, b"no one")], "user"),
    ):
        with pytest.raises(DsecError) as caught:
            await link.call(frame, fields, timeout_s=10)
        assert caught.value.field == field
    with pytest.raises(DsecError) as caught:
        await link.call(0x77, [], timeout_s=10)  # type: ignore[arg-type]
    assert code_of(caught) == "unknown_verb"
    assert await guest.channel.list_execs() == []
