"""dsec-init on something else than its own listener: an inherited stream, and a port that hosts come and go on."""

from __future__ import annotations

import asyncio
import os
import pty
import socket
import subprocess
import tty

import pytest

from nomad_dsec.guest import frames
from nomad_dsec.guest.channel import GuestChannel
from nomad_dsec.guest.frames import Frame, Tag
from nomad_dsec.guest.spec import ExecSpec
from tests.kit.abilities import needs
from tests.kit.guest import binary

pytestmark = [needs("cc"), pytest.mark.timeout(60)]
HELLO = frames.encode_frame(Frame.HELLO, 0, frames.encode_fields([(Tag.VERSION, frames.VERSION)]))


def serve_on(fd: int) -> subprocess.Popen[bytes]:
    argv = [str(binary("release")), "serve", "--fd", str(fd)]
    return subprocess.Popen(argv, pass_fds=[fd], stdin=subprocess.DEVNULL, start_new_session=True)


async def ended(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, 10)


async def test_a_connected_stream_serves_until_it_closes():
    ours, theirs = socket.socketpair()
    with theirs:
        process = serve_on(theirs.fileno())
    try:
        channel = await GuestChannel.connect(ours)
        done = await channel.run(ExecSpec(argv=(b"/bin/echo", b"hi")), timeout_s=10)
        assert done.stdout == b"hi\n"
        await channel.close()
        assert await ended(process) == 0
    finally:
        process.kill()
        process.wait(10)
        ours.close()


async def test_an_inherited_listener_takes_many(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        process = serve_on(listener.fileno())
    try:
        channels = [await GuestChannel.connect(tmp_path / "s") for _ in range(3)]
        for channel in channels:
            await channel.ping()
        await channels[0].close()
        await channels[1].ping()
        await channels[1].shutdown()
        assert await ended(process) == 0
        await channels[1].close()
        await channels[2].close()
    finally:
        process.kill()
        process.wait(10)


def read_frames(fd: int, reader: frames.FrameReader, count: int) -> list[frames.RawFrame]:
    found: list[frames.RawFrame] = []
    while len(found) < count:
        found += reader.feed(os.read(fd, 65536))
    return found


async def test_a_new_host_on_a_port_starts_anew_whatever_the_old_one_left():
    ours, theirs = pty.openpty()  # a character device, as a virtio-serial port is one
    tty.setraw(theirs)
    process = serve_on(theirs)
    try:
        reader = frames.FrameReader()
        os.write(ours, HELLO + frames.encode_frame(Frame.PING, 5))
        first, pong = await asyncio.wait_for(asyncio.to_thread(read_frames, ours, reader, 2), 10)
        assert (first.type, pong.type, pong.stream) == (Frame.HELLO_OK, Frame.OK, 5)
        # The next host greets in the middle of nothing, then one comes after half a header of another.
        os.write(ours, HELLO)
        (again,) = await asyncio.wait_for(asyncio.to_thread(read_frames, ours, reader, 1), 10)
        assert frames.Record(again.payload).raw(Tag.BOOT_ID) == frames.Record(first.payload).raw(Tag.BOOT_ID)
        os.write(ours, b"\xff\xff\xff\xff\x01" + HELLO + frames.encode_frame(Frame.PING, 9))
        greeted, pong = await asyncio.wait_for(asyncio.to_thread(read_frames, ours, reader, 2), 10)
        assert (greeted.type, pong.stream) == (Frame.HELLO_OK, 9)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)
        os.close(theirs)


def test_bad_options_are_named():
    for args, word in (
        (["serve"], "nothing to serve on"),
        (["serve", "--what", "x"], "unknown option"),
        (["serve", "--fd", "77"], "no such descriptor"),
        (["serve", "--listen", "/" + "x" * 200], "cannot listen"),
        ([], "first argument"),
    ):
        done = subprocess.run([str(binary("release")), *args], capture_output=True, text=True, timeout=10, check=False)
        assert done.returncode == 2
        assert word in done.stderr
