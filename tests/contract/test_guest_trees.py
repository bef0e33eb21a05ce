"""Trees, archives and watches of a real dsec-init: what is left out, what is hostile, paths outside (F4, F5)."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import tarfile
from contextlib import aclosing
from pathlib import Path

import pytest
from libdsec.errors import DsecError, NotFoundError, UsageError

from nomad_dsec.guest.spec import ExecSpec
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


async def test_a_tree_deeper_than_any_path_is_removed(guest, room):
    script = f"import os\nos.chdir({str(room)!r})\nfor i in range(1500):\n os.mkdir('d'*50); os.chdir('d'*50)\n"
    done = await guest.channel.run(ExecSpec(argv=(b"/usr/bin/python3", b"-c", script.encode())), timeout_s=30)
    assert done.exit_code == 0
    await guest.channel.remove(str(room / ("d" * 50)), recursive=True)
    assert list(room.iterdir()) == []


def make_tree(room: Path) -> Path:
    tree = room / "tree"
    long = "n" * 120
    (tree / "sub" / long).mkdir(parents=True)
    (tree / "sub" / long / ("f" * 200)).write_bytes(b"long")
    (tree / "run").write_bytes(b"#!/bin/sh\n")
    (tree / "run").chmod(0o755)
    os.utime(tree / "run", (1_000_000_000, 1_000_000_000))
    os.link(tree / "run", tree / "sub" / "again")
    (tree / "l").symlink_to("x" * 150)
    with (tree / "sparse").open("wb") as file:
        file.seek(1 << 30)
        file.write(b"end")
    (tree / os.fsdecode(b"\xff\n")).write_bytes(b"")
    (tree / "empty").mkdir()
    return tree


async def test_f4_download_names_what_it_leaves_out(guest, room):
    tree = make_tree(room)
    os.mkfifo(tree / "fifo")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tree / "sock"))
    os.mknod(tree / "dev", 0o600 | 0o020000, os.makedev(1, 3))
    skipped = []
    data = b"".join([piece async for piece in guest.channel.download_tree(str(tree), skipped=skipped)])
    assert {(s.name, s.reason) for s in skipped} == {(b"fifo", "fifo"), (b"sock", "socket"), (b"dev", "device")}
    assert len(data) < 1 << 20  # the hole was not sent
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as archive:
        archive.extractall(room / "out", filter="tar")
    same_tree(tree, room / "out")
    one = b"".join([piece async for piece in guest.channel.download_tree(str(tree / "run"))])
    with tarfile.open(fileobj=io.BytesIO(one)) as archive:
        assert archive.getnames() == ["run"]


def same_tree(tree: Path, out: Path) -> None:
    names = {p.relative_to(tree) for p in tree.rglob("*") if p.is_dir() or p.is_file() or p.is_symlink()}
    assert names - {Path("fifo"), Path("sock"), Path("dev")} == {p.relative_to(out) for p in out.rglob("*")}
    assert (out / "run").stat().st_mode & 0o7777 == 0o755
    assert (out / "run").stat().st_mtime == 1_000_000_000
    assert (out / "run").stat().st_ino == (out / "sub" / "again").stat().st_ino
    assert os.readlink(out / "l") == "x" * 150
    assert (out / "sparse").stat().st_size == (1 << 30) + 3
    assert (out / "sparse").stat().st_blocks < 1000


async def test_what_was_downloaded_can_be_uploaded(guest, room):
    tree = make_tree(room)
    stream = guest.channel.download_tree(str(tree))
    data = b"".join([piece async for piece in stream])
    done = await guest.channel.upload_tree(str(room / "new" / "place"), pieces(data))
    same_tree(tree, room / "new" / "place")
    assert done.skipped == ()
    assert done.files == len(list(tree.rglob("*")))
    again = await guest.channel.upload_tree(str(room / "new" / "place"), data)  # over what is there
    assert again.files == done.files
    same_tree(tree, room / "new" / "place")


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
async def test_archives_of_python_unpack(guest, room, form):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, size in (("./a", 0), ("d/e/f", 513), ("g" * 90 + "/" + "h" * 90, 70_000)):
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.uid, info.gid, info.mtime = size, 0o604, 77, 88, 12345
            archive.addfile(info, io.BytesIO(b"z" * size))
        fifo = tarfile.TarInfo("pipe")
        fifo.type = tarfile.FIFOTYPE
        archive.addfile(fifo)
    done = await guest.channel.upload_tree(str(room / "t"), buffer.getvalue(), keep_owner=True)
    assert [(s.name, s.reason) for s in done.skipped] == [(b"pipe", "fifo")]
    made = (room / "t" / ("g" * 90) / ("h" * 90)).stat()
    assert (made.st_size, made.st_mode & 0o7777, made.st_uid, made.st_gid, made.st_mtime) == (
        70_000,
        0o604,
        77,
        88,
        12345,
    )
    assert (done.files, done.total_bytes) == (3, 70_513)


def archive_of(*members: tuple[str, bytes, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind, value in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(value)
            else:
                info.linkname = value
            archive.addfile(info, io.BytesIO(value.encode()) if kind == tarfile.REGTYPE else None)
    return buffer.getvalue()


async def test_hostile_archives_stay_below_the_target(guest, room):
    outside = room / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"kept")
    file, link, hard = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
    for members in (
        (("../evil", file, "x"),),
        (("a/../../evil", file, "x"),),
        (("out", link, str(outside)), ("out/evil", file, "x")),
        (("up", link, ".."), ("up/outside/evil", file, "x")),
        (("h", hard, "../outside/kept"),),
        (("out", link, str(outside)), ("h", hard, "out/kept")),
    ):
        with pytest.raises(UsageError) as caught:
            await guest.channel.upload_tree(str(room / "t"), archive_of(*members))
        assert code_of(caught) == "unsafe_path"
    await guest.channel.upload_tree(
        str(room / "t"), archive_of(("/abs", file, "in"), ("k", link, str(outside / "kept")), ("k", file, "new"))
    )
    assert (room / "t" / "abs").read_bytes() == b"in"
    assert (room / "t" / "k").read_bytes() == b"new"  # the link was replaced, not followed
    assert [p.name for p in outside.iterdir()] == ["kept"]
    assert (outside / "kept").read_bytes() == b"kept"


async def test_broken_archives_are_named(guest, room):
    good = archive_of(("f", tarfile.REGTYPE, "x" * 2000))
    for bad in (b"", good[:700], good[:1536], b"garbage" * 200, good[:148] + b"9" + good[149:]):
        with pytest.raises(UsageError) as caught:
            await guest.channel.upload_tree(str(room / "t"), bad)
        assert code_of(caught) == "bad_archive"


async def test_f5_no_path_leads_outside(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "a" / "b").mkdir(parents=True)
    (root / "file").write_bytes(b"inside")
    outside.mkdir()
    (outside / "secret").write_bytes(b"SECRET")
    (root / "abs").symlink_to(outside)
    (root / "rel").symlink_to("../../outside")
    (root / "a" / "up").symlink_to("../../../../../../.." + str(outside))
    async with running_guest("release", "--root", str(root)) as guest:
        channel = guest.channel
        for path in (
            "abs/secret",
            "rel/secret",
            "a/up/secret",
            "../outside/secret",
            "/../outside/secret",
            str(outside / "secret"),
        ):
            with pytest.raises(NotFoundError):
                await read(channel, path)
            with pytest.raises(NotFoundError):
                await channel.write_file(path, b"x")
            with pytest.raises(DsecError):
                await channel.remove(path)
        assert await read(channel, "/../../file") == b"inside"
        await channel.write_file("abs", b"x", parents=True)  # lands at the same name inside
        assert sorted(p.name for p in outside.iterdir()) == ["secret"]
        assert (outside / "secret").read_bytes() == b"SECRET"


async def test_f5_races_reach_nothing_outside(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "d").mkdir(parents=True)
    outside.mkdir()
    (root / "d" / "f").write_bytes(b"inside")
    (outside / "f").write_bytes(b"SECRET")
    (root / "s").symlink_to("../" * 20 + str(outside).lstrip("/"))
    flip = (
        "import ctypes,sys\nlibc=ctypes.CDLL(None)\na,b=sys.argv[1].encode(),sys.argv[2].encode()\n"
        "while True: libc.renameat2(-100,a,-100,b,2)\n"
    )
    argv = (b"/usr/bin/python3", b"-c", flip.encode(), os.fsencode(root / "d"), os.fsencode(root / "s"))
    async with running_guest("release", "--root", str(root)) as guest:
        flipper = await guest.channel.exec(ExecSpec(argv=argv, timeout_s=30))
        tries = {"read": 0, "missed": 0}
        deadline = asyncio.get_running_loop().time() + 3

        async def race() -> None:
            while asyncio.get_running_loop().time() < deadline:
                try:
                    assert await read(guest.channel, "d/f") in (b"inside", b"new")
                    await guest.channel.write_file("d/f", b"new")
                    tries["read"] += 1
                except (NotFoundError, UsageError):
                    tries["missed"] += 1

        await asyncio.gather(*(race() for _ in range(4)))
        await flipper.signal(9)
        await flipper.wait(timeout_s=10)
        assert tries["read"]
        assert tries["missed"]  # the race was real
    assert (outside / "f").read_bytes() == b"SECRET"
    assert [p.name for p in outside.iterdir()] == ["f"]


async def test_watch_tells_what_changes(guest, room):
    (room / "old").mkdir()
    seen = []

    async def collect() -> None:
        async with aclosing(guest.channel.watch(str(room), recursive=True, announce=True)) as events:
            async for event in events:
                seen.append((event.kind, event.path))
                if event.path == b"last":
                    return

    task = asyncio.create_task(collect())
    while not seen:
        await asyncio.sleep(0.01)
    (room / "f").write_bytes(b"x")
    (room / "f").rename(room / "g")
    (room / "old" / "in").touch()
    (room / "new" / "deep").mkdir(parents=True)
    await asyncio.sleep(0.2)
    (room / "new" / "deep" / "x").touch()
    (room / "g").unlink()
    await guest.channel.write_file(str(room / "w"), b"1")
    (room / "last").touch()
    await asyncio.wait_for(task, 10)
    wanted = {
        ("created", b"f"), ("modified", b"f"), ("moved_from", b"f"), ("moved_to", b"g"), ("removed", b"g"),
        ("created", b"old/in"), ("created", b"new"), ("created", b"new/deep"), ("created", b"new/deep/x"),
    }  # fmt: skip
    assert wanted <= set(seen)
    assert not any(b".dsec-" in path for _, path in seen)


async def test_watch_of_many_changes_reports_what_it_lost(guest, room):
    async with aclosing(guest.channel.watch(str(room), announce=True)) as events:
        assert (await anext(events)).kind == "ready"
        script = f"cd {room}; i=0; while [ $i -lt 20000 ]; do : > f$i; : > g$i; i=$((i+1)); done"
        done = await guest.channel.run(ExecSpec(argv=(b"/bin/sh", b"-c", script.encode())), timeout_s=60)
        assert done.exit_code == 0
        async with asyncio.timeout(60):
            count, lost = 0, False
            async for event in events:
                lost = lost or event.kind == "overflow"
                count += event.kind == "created"
                if lost or count == 40_000:
                    break
        assert lost or count == 40_000
