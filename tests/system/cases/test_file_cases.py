"""Cases of files at the field's sizes, through SDK, CLI and raw HTTP: F1, F2, F3, F5."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os

import aiohttp
import pytest
from libdsec.errors import DsecError
from libdsec.sandbox import AsyncSandbox

from tests.kit.abilities import needs
from tests.kit.footprint import watched
from tests.kit.sizes import sized
from tests.system.cases.conftest import IMAGE, init_pid, ours

# One stack serves the whole file and fills its pools as it likes: what it must not leave is checked at its end.
pytestmark = [
    needs("root", "erofs", "cgroup", "filters", "debootstrap", "debian-packages"),
    pytest.mark.timeout(600),
    pytest.mark.leaks_ok,
]
MIB = 1 << 20
BLOCK = os.urandom(MIB)
BOUND_MIB = 48  # of growth in any process of ours by one transfer, whatever its size
MANY_BOUND_MIB = 128  # by 32 at once: sockets' buffers, far from the 256 MiB (full: 6.4 GB) that go each way


def room_for(mib: int) -> dict[str, int]:
    """A layer may lie in memory, and a quarter of that is kept for programs."""
    return {"disk_mib": mib + 64, "memory_mib": mib * 3 // 2 + 256}


async def blocks(count: int):
    for _ in range(count):
        yield BLOCK


def digest_of(count: int) -> str:
    hashed = hashlib.sha256()
    for _ in range(count):
        hashed.update(BLOCK)
    return hashed.hexdigest()


async def sha256(sandbox: AsyncSandbox, path: str) -> str:
    return (await sandbox.exec(["sha256sum", path])).check().stdout.split()[0]


async def test_f1_a_large_file_is_there_whole_after_ok(stack, client):
    count = sized(1024, 64)
    wanted = digest_of(count)
    async with (
        await AsyncSandbox.create(IMAGE, client=client, cpus=2, **room_for(count)) as sandbox,
        init_pid(sandbox) as init,
        watched(ours(stack) | {"init": init}) as seen,
    ):
        assert await sandbox.files.write("/tmp/large", blocks(count)) == count * MIB
        assert await sha256(sandbox, "/tmp/large") == wanted
        back = hashlib.sha256()
        async for piece in sandbox.files.read_stream("/tmp/large"):
            back.update(piece)
        assert back.hexdigest() == wanted
    assert max(seen.growth.values()) < BOUND_MIB, str(seen)


@pytest.mark.parametrize("size", [200_000, 2_000_003])
async def test_f2_content_of_any_size_through_every_door(stack, client, sandbox, size):
    data = os.urandom(size)
    wanted = hashlib.sha256(data).hexdigest()
    await sandbox.files.write("/tmp/sdk", data)
    put = await asyncio.to_thread(stack.dsec, "sandbox", "cp", "-", f"{sandbox.id}:/tmp/cli", stdin=data)
    assert put.returncode == 0, put.stderr
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    url = f"{stack.endpoint}/v1/sandboxes/{sandbox.id}/files"
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.put(url, params={"path": "/tmp/http"}, data=io.BytesIO(data)) as reply:
            assert (reply.status, await reply.json()) == (200, {"bytes": size})
        async with http.get(url, params={"path": "/tmp/sdk"}) as reply:
            assert await reply.read() == data
    for name in ("sdk", "cli", "http"):
        assert await sha256(sandbox, f"/tmp/{name}") == wanted
        assert await sandbox.files.read(f"/tmp/{name}") == data
    got = await asyncio.to_thread(stack.dsec, "sandbox", "cp", f"{sandbox.id}:/tmp/http", "-")
    assert got.stdout == data
    by_stdin = (
        (await sandbox.exec(["sha256sum"], stdin=data)).stdout,
        (await asyncio.to_thread(stack.dsec, "sandbox", "exec", "-i", sandbox.id, "sha256sum", stdin=data)).stdout,
    )
    assert [text.split()[0] for text in by_stdin] == [wanted, wanted.encode()]


@pytest.mark.parametrize("size", [100_000, 200_000])
async def test_f2_an_argument_too_long_for_the_kernel_is_refused_by_name(sandbox, size):
    """MAX_ARG_STRLEN is 128 KiB: execve(2) refuses more, so it is an error that says so, never an exit code."""
    text = "x" * size
    if size < 128 * 1024:
        assert (await sandbox.exec(["printf", "%s", text])).stdout == text
        return
    with pytest.raises(DsecError) as caught:
        await sandbox.exec(["printf", "%s", text])
    assert caught.value.kind == "usage"
    assert caught.value.field == "cmd[2]"


async def test_f3_many_uploads_at_once_in_bounded_memory(stack, client):
    many, count = 32, sized(200, 8)
    wanted = digest_of(count)
    async with (
        await AsyncSandbox.create(IMAGE, client=client, cpus=2, **room_for(many * count)) as sandbox,
        init_pid(sandbox) as init,
        watched(ours(stack) | {"init": init}) as seen,
    ):

        async def there_and_back(number: int) -> None:
            path = f"/tmp/f{number}"
            assert await sandbox.files.write(path, blocks(count)) == count * MIB
            got = 0
            async for piece in sandbox.files.read_stream(path):
                got += len(piece)
            assert got == count * MIB

        await asyncio.gather(*(there_and_back(number) for number in range(many)))
        sums = (await sandbox.exec("sha256sum /tmp/f* | cut -d' ' -f1 | sort | uniq -c")).stdout.split()
        assert sums == [str(many), wanted]
    assert max(seen.growth.values()) < MANY_BOUND_MIB, str(seen)


FLIP = """
import ctypes, os
libc = ctypes.CDLL(None)
os.makedirs("/tmp/race/d"); open("/tmp/race/d/f", "w").write("inside")
os.symlink(TARGET, "/tmp/race/s")
print("ready", flush=True)
while True: libc.renameat2(-100, b"/tmp/race/d", -100, b"/tmp/race/s", 2)
"""


@pytest.mark.parametrize("way", ["/proc/1/root", ""])
async def test_f5_racing_paths_reach_nothing_of_the_host(client, tmp_path, way):
    """Reads, writes and removals through a name that is now a directory, now a link out of the sandbox."""
    (tmp_path / "f").write_text("SECRET")
    tries = sized(50_000, 500)  # 100,000 by both ways
    async with await AsyncSandbox.create(IMAGE, client=client, cpus=2) as sandbox:
        flip = FLIP.replace("TARGET", repr(way + "/.." * 12 + str(tmp_path)))
        async with await sandbox.spawn(["python3", "-c", flip]) as flipper:
            assert (await flipper.read()).data == b"ready\n"
            left, seen = iter(range(tries)), {"inside": 0, "refused": 0}

            async def race() -> None:
                for number in left:
                    try:
                        if number % 3:
                            assert await sandbox.files.read("/tmp/race/d/f") in (b"inside", b"new")
                        elif number % 2:
                            await sandbox.files.write("/tmp/race/d/f", b"new")
                        else:
                            await sandbox.files.write("/tmp/race/d/g", b"new")
                            await sandbox.files.remove("/tmp/race/d/g")
                        seen["inside"] += 1
                    except DsecError as refused:
                        assert refused.kind in ("usage", "not_found", "denied"), refused
                        seen["refused"] += 1

            await asyncio.gather(*(race() for _ in range(16)))
            assert min(seen.values()) > tries // 100, seen
            await flipper.kill()
    assert (tmp_path / "f").read_text() == "SECRET"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
