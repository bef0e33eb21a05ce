"""The parsers of dsec-init under sanitizers: alone, and as a whole behind its socket."""

from __future__ import annotations

import asyncio
import random
import subprocess

import pytest

from nomad_dsec.guest import build, frames
from nomad_dsec.guest.frames import Frame, Tag
from nomad_dsec.guest.spec import ExecSpec
from tests.kit.abilities import needs
from tests.kit.guest import running_guest

pytestmark = [needs("cc"), pytest.mark.timeout(180)]
PARTS = ("fuzz_frames.c", "frame.c", "tar.c", "log.c")


def compile_fuzzer(directory, *parts):
    flags = (*build.SANITIZED, "-DFUZZ_MAIN")
    return build.compile_program(directory / "fuzzer", [build.SOURCES / name for name in parts], flags)


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    return compile_fuzzer(tmp_path_factory.mktemp("fuzz"), *PARTS)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_parsers_survive_mutated_input(fuzzer, seed):
    done = subprocess.run([str(fuzzer), "15000", str(seed)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "15000\n"), done.stderr[-3000:]


def test_the_reader_of_calls_survives_mutated_requests(tmp_path):
    fuzzer = compile_fuzzer(tmp_path, "fuzz_call.c", "call_parse.c")
    for seed in (1, 2, 3):
        done = subprocess.run([fuzzer, "40000", str(seed)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        # Both ways are taken: a fuzzer that never gets past the header tries nothing.
        assert 10_000 < int(done.stdout.split()[0]) < 39_000


def random_frame(rng: random.Random) -> bytes:
    """Mostly a request of some sense with a few odd fields; sometimes not even that."""
    kind = rng.choice([*(f for f in Frame if f != Frame.SHUTDOWN), 0, 0x7F, 0xFF])
    safe = [
        Tag.PATH,
        Tag.TARGET,
        Tag.EXEC_ID,
        Tag.SIZE,
        Tag.MODE,
        Tag.OFFSET,
        Tag.LENGTH,
        Tag.SINCE,
        Tag.CREDIT,
        Tag.PTY,
    ]
    fields: frames.Fields = [(Tag.EXEC_ID, b"e%d" % rng.randrange(5)), (Tag.PATH, b"/nowhere/%d" % rng.randrange(3))]
    if rng.random() < 0.7:
        fields += [(Tag.ARGV, b"/bin/true"), (Tag.MAX_OUTPUT, rng.randrange(100))]
    for tag in rng.sample(safe, rng.randrange(3)):
        fields.append((tag, rng.choice([0, 1, 2**63, b"", b"x" * rng.randrange(50)])))
    payload = frames.encode_fields(fields)
    if rng.random() < 0.2:
        payload = rng.randbytes(rng.randrange(100))
    if kind == Frame.CREDIT and rng.random() < 0.9:
        payload = rng.randbytes(8)
    frame = bytearray(frames.HEADER.pack(len(payload), int(kind), 0, 0, rng.randrange(6)) + payload)
    if rng.random() < 0.05:
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return bytes(frame)


@needs("root", "cgroup")
async def test_whole_init_survives_strange_hosts(tmp_path):
    rng = random.Random(20)
    hello = frames.encode_frame(Frame.HELLO, 0, frames.encode_fields([(Tag.VERSION, frames.VERSION)]))
    # a root of its own: what strange hosts write and remove by file verbs must not be this machine's
    async with running_guest("sanitized", "--root", str(tmp_path)) as guest:
        for round_number in range(60):
            reader, writer = await asyncio.open_unix_connection(guest.socket)
            writer.write(hello if round_number % 10 else b"")
            for _ in range(rng.randrange(1, 60)):
                writer.write(random_frame(rng))
            if rng.random() < 0.5:
                writer.write(random_frame(rng)[: rng.randrange(12)])
            try:
                await asyncio.wait_for(writer.drain(), 5)
                if rng.random() < 0.6:
                    await asyncio.wait_for(reader.read(4096), 0.2)
            except (TimeoutError, ConnectionError):
                pass
            writer.close()
        done = await guest.channel.run(ExecSpec(argv=(b"/bin/echo", b"alive")), timeout_s=20)
        assert done.stdout == b"alive\n"


@needs("root", "cgroup")
async def test_lost_framing_is_told_and_costs_the_connection_only():
    async with running_guest("release") as guest:
        for wire, code in (
            (b"\xff" * 12, b"bad_frame"),
            (frames.encode_frame(Frame.PING, 1), b"bad_version"),
            (frames.encode_frame(Frame.HELLO, 0, frames.encode_fields([(Tag.VERSION, 7)])), b"bad_version"),
        ):
            reader, writer = await asyncio.open_unix_connection(guest.socket)
            writer.write(wire)
            answer = await asyncio.wait_for(reader.read(), 5)  # to the end: it was closed
            (frame,) = frames.FrameReader().feed(answer)
            assert (frame.type, frame.stream) == (Frame.ERROR, 0)
            assert frames.Record(frame.payload).raw(Tag.CODE) == code
            writer.close()
        await guest.channel.ping()


@needs("root", "cgroup")
async def test_a_host_that_sends_beyond_its_credit_is_cut_off():
    async with running_guest("release") as guest:
        reader, writer = await asyncio.open_unix_connection(guest.socket)
        writer.write(frames.encode_frame(Frame.HELLO, 0, frames.encode_fields([(Tag.VERSION, frames.VERSION)])))
        fields: frames.Fields = [(Tag.EXEC_ID, b"a"), (Tag.ARGV, b"sleep"), (Tag.ARGV, b"30"), (Tag.STDIN, 1)]
        writer.write(frames.encode_frame(Frame.EXEC, 1, frames.encode_fields(fields)))
        for _ in range(6):
            writer.write(frames.encode_frame(Frame.DATA, 1, bytes(frames.MAX_DATA)))
        answer = await asyncio.wait_for(reader.read(), 10)
        last = frames.FrameReader().feed(answer)[-1]
        assert (last.type, last.stream) == (Frame.ERROR, 0)
        writer.close()
        await guest.channel.signal("a", 9)


@needs("root", "cgroup")
async def test_more_connections_than_it_takes_are_refused_and_forgotten():
    async with running_guest("release") as guest:
        many = [await asyncio.open_unix_connection(guest.socket) for _ in range(50)]
        refused = 0
        for reader, _ in many[31:]:
            refused += b"busy" in await asyncio.wait_for(reader.read(200), 5)
        assert refused >= 18
        for _, writer in many:
            writer.close()
        async with asyncio.timeout(10):
            while True:
                try:
                    again = await guest.connect()
                    break
                except Exception:
                    await asyncio.sleep(0.02)
        await again.ping()
        await again.close()
