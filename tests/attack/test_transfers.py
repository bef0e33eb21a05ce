"""Hostile trees through the file verbs: docker cp and kubectl cp (CVE-2018-15664, CVE-2019-14271, CVE-2019-1002101) and
tarfile (CVE-2007-4559, CVE-2025-4517) in one. Layer: openat2 below the target, in dsec-init, inside the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import subprocess
import tarfile
import time
from typing import TYPE_CHECKING

import pytest
from libdsec.errors import DsecError

from tests.attack.marks import IN_SANDBOX

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.sandbox import Box

pytestmark = IN_SANDBOX
CANARY = "/work/outside/canary"


Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", data: bytes = b"evil") -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.mode = 0o644
    data = data if kind == tarfile.REGTYPE else b""
    info.size = len(data)
    return info, data


def archive(*members: Member) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


HOSTILE = {
    "absolute name": archive(member(CANARY)),
    "dots": archive(member("../outside/canary")),
    "many dots": archive(member("a/../../outside/canary")),
    "a link, then through it": archive(member("out", tarfile.SYMTYPE, link="../outside"), member("out/canary")),
    "an absolute link, then through it": archive(
        member("out", tarfile.SYMTYPE, link="/work/outside"), member("out/canary")
    ),
    "a link, then over it": archive(member("file", tarfile.SYMTYPE, link="../outside/canary"), member("file")),
    "a hard link out, then over it": archive(member("file", tarfile.LNKTYPE, link="../outside/canary"), member("file")),
    "an absolute hard link, then over it": archive(member("file", tarfile.LNKTYPE, link=CANARY), member("file")),
    "through /proc/self/root": archive(
        member("out", tarfile.SYMTYPE, link="/proc/self/root/work/outside"), member("out/canary")
    ),
}
SPECIAL = archive(
    member("fifo", tarfile.FIFOTYPE), member("block", tarfile.BLKTYPE), member("char", tarfile.CHRTYPE), member("plain")
)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("user", ["", "1000"])
async def test_an_upload_stays_below_its_target(box: Box, name: str, user: str) -> None:
    await box.shell(
        "rm -rf /work/in /work/outside; mkdir -p /work/in /work/outside; printf good > /work/outside/canary"
    )
    await box.shell("chmod 0777 /work/in /work/outside; chmod 0666 /work/outside/canary")
    try:
        await box.channel.upload_tree("/work/in", HOSTILE[name], user=user)
    except DsecError as refused:
        assert refused.message
    assert await box.shell(f"cat {CANARY}") == "good"


RACE_MS = 2500


async def test_an_upload_stays_below_its_target_while_names_change(box: Box) -> None:
    """CVE-2018-15664: a directory and a link out of the target change places while the upload runs."""
    await box.shell("cd /work; rm -rf in outside; mkdir -p in/sub outside; ln -s ../outside in/link")
    race = asyncio.ensure_future(box.run("/usr/bin/attack", "flip", "/work/in/sub", "/work/in/link", RACE_MS))
    tree = archive(*(member(f"sub/file{number}") for number in range(50)))
    uploads = 0
    while not race.done():
        # Refused is fine: the target is a link at that moment.
        with contextlib.suppress(DsecError):
            await box.channel.upload_tree("/work/in", tree)
        uploads += 1
    flips = int((await race).stdout.split()[1])
    assert flips > 1000
    assert uploads > 5
    stray = await box.shell("cd /work/outside; echo file*")
    assert stray == "file*", "nothing of the tree landed outside its target"


def test_twin_a_check_before_the_write_loses_that_race(attacker: Path, tmp_path: Path) -> None:
    """What a tool does that looks first and writes then."""
    target, outside = tmp_path / "in", tmp_path / "outside"
    (target / "sub").mkdir(parents=True)
    outside.mkdir()
    (target / "link").symlink_to(outside)
    argv = [str(attacker), "flip", str(target / "sub"), str(target / "link"), str(RACE_MS)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as race:
        while race.poll() is None and not any(outside.iterdir()):
            place = target / "sub" / "file"
            if not (target / "sub").is_symlink():
                place.write_bytes(b"evil")
        race.kill()
    assert any(outside.iterdir())


async def test_special_files_of_an_upload_are_skipped_and_named(box: Box) -> None:
    await box.shell("rm -rf /work/in; mkdir -p /work/in")
    summary = await box.channel.upload_tree("/work/in", SPECIAL)
    assert {row.name for row in summary.skipped} == {b"fifo", b"block", b"char"}
    assert await box.shell("cd /work/in; echo *") == "plain"


async def test_special_files_of_a_download_are_skipped_and_named(box: Box) -> None:
    """F4: a FIFO that the agent left breaks no download."""
    await box.shell("rm -rf /work/out; mkdir -p /work/out; cd /work/out; printf x > plain; ln -s /etc/passwd link")
    await box.attack("sys", 133, "@/work/out/fifo", 0o010644, 0)
    skipped: list[object] = []
    data = b""
    async for chunk in box.channel.download_tree("/work/out", skipped=skipped):  # type: ignore[arg-type]
        data += chunk
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        kinds = {info.name.removeprefix("./"): info.type for info in tar.getmembers()}
    assert kinds["plain"] == tarfile.REGTYPE
    assert kinds["link"] == tarfile.SYMTYPE, "a link is downloaded as a link, never followed"
    assert not {"fifo"} & set(kinds)
    assert [row.name for row in skipped] == [b"fifo"]  # type: ignore[attr-defined]


async def test_reading_a_fifo_or_a_device_does_not_hang(box: Box) -> None:
    await box.attack("sys", 133, "@/work/pipe", 0o010644, 0)
    began = time.monotonic()
    with pytest.raises(DsecError):
        async for _ in box.channel.read_file("/work/pipe"):
            pass
    assert time.monotonic() - began < 20


async def test_a_sparse_giant_is_streamed_not_buffered(box: Box) -> None:
    """1 TiB by its size: the first bytes arrive, and we may stop there."""
    await box.attack("sparse", "/work/giant")
    async for chunk in box.channel.read_file("/work/giant", 0, 1 << 20):
        assert len(chunk) <= 1 << 20
        assert not any(chunk)
        break
    await box.channel.remove("/work/giant")
