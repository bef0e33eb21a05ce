"""Files, trees and watches over the node's HTTP API: a real daemon, on the fake backend and on real containers."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from typing import TYPE_CHECKING

import aiohttp
import pytest
from yarl import URL

from tests.kit.abilities import needs
from tests.kit.leaks import clean_after
from tests.kit.node_daemon import CONTAINER_NEEDS, NodeDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator

# One daemon serves the whole file and mounts its image at the first create: its leftovers are looked for at its end.
pytestmark = [needs("root", "overlay", "cc"), pytest.mark.timeout(120), pytest.mark.leaks_ok]


@pytest.fixture(scope="module", params=["fake", pytest.param("container", marks=needs(*CONTAINER_NEEDS))])
def daemon(request, tmp_path_factory) -> Iterator[NodeDaemon]:
    made = NodeDaemon(tmp_path_factory.mktemp("n"), backend=request.param, flags=("--starting-max", "8"))
    with clean_after():
        made.start()
        yield made
        made.remove()


@pytest.fixture
async def client(daemon):
    async with daemon.client() as made:
        yield made


@pytest.fixture
async def box(client):
    (info,) = await client.create()
    yield info["id"]
    await client.call("DELETE", f"/v1/sandboxes/{info['id']}")


async def test_an_error_about_a_name_that_is_not_utf8_is_an_error_like_any_other(client, box):
    for name in ("%ff", "%ff" * 300):
        async with client.session.get(URL(f"/v1/sandboxes/{box}/files?path=/tmp/{name}", encoded=True)) as reply:
            error = (await reply.json())["error"]
        assert (reply.status, error["kind"]) in ((404, "not_found"), (400, "usage"))
        assert "\\xff" in error["message"]


async def test_a_file_transfer_that_a_kill_ends_is_told_so(client):
    box = (await client.create())[0]["id"]
    began = asyncio.Event()

    async def endless():
        while True:
            yield b"x" * 65536
            began.set()
            await asyncio.sleep(0.01)

    sending = asyncio.create_task(client.call("PUT", f"/v1/sandboxes/{box}/files?path=/tmp/x", data=endless()))
    await began.wait()
    await client.call("DELETE", f"/v1/sandboxes/{box}")
    reply = await sending
    assert (reply.status, reply.error["code"]) == (409, "sandbox_ended")


async def test_files_of_any_size_and_name(client, box):
    url = f"/v1/sandboxes/{box}/files"
    for size in (0, 1, 18_000, 200_000, 3_000_000):
        content = bytes(i * 7 % 251 for i in range(min(size, 4000))) * (size // 4000 + 1)
        content = content[:size]
        wrote = await client.call(
            "PUT", url, data=io.BytesIO(content), path="/tmp/d e/\u00fc.bin", parents="1", mode="640"
        )
        assert wrote.ok() == {"bytes": size}
        read = await client.call("GET", url, path="/tmp/d e/\u00fc.bin")
        assert read.body == content
        assert read.headers["X-Dsec-Size"] == str(size)
    part = await client.call("GET", url, path="/tmp/d e/\u00fc.bin", offset="2999990", length="4")
    assert part.body == content[2999990:2999994]
    await client.call("PUT", url, data=b"+more", path="/tmp/d e/\u00fc.bin", append="1")
    stat = (await client.call("GET", f"{url}/stat", path="/tmp/d e/\u00fc.bin")).ok()
    assert (stat["size"], stat["mode"], stat["kind"]) == (3_000_005, 0o640, "file")
    raw = await client.session.put(aiohttp.client.URL(f"{url}?path=/tmp/%ff%fe", encoded=True), data=b"x")
    assert raw.status == 200
    names = (await client.call("GET", f"{url}/list", path="/tmp")).ok()["entries"]
    assert {"//4="} == {entry["raw"] for entry in names if "raw" in entry}
    for op, status in (
        ({"op": "mkdir", "path": "/tmp/new"}, 200),
        ({"op": "move", "path": "/tmp/new", "to": "/tmp/newer"}, 200),
        ({"op": "move", "path": "/tmp/newer"}, 400),
        ({"op": "chmod", "path": "/tmp/newer", "mode": 0o700}, 200),
        ({"op": "chmod", "path": "/tmp/newer"}, 400),
        ({"op": "remove", "path": "/tmp/d e", "recursive": True}, 200),
        ({"op": "remove", "path": "/tmp/d e"}, 404),
        ({"op": "remove", "path": "/tmp/d e", "missing_ok": True}, 200),
    ):
        reply = await client.call("POST", f"{url}/op", op)
        assert reply.status == status, (op, reply.body)
    missing = await client.call("GET", url, path="/tmp/none")
    assert (missing.status, missing.error["kind"]) == (404, "not_found")
    assert (await client.call("GET", url)).error["field"] == "path"


async def test_an_upload_that_is_cut_leaves_nothing(client, box):
    url = f"/v1/sandboxes/{box}/files"

    async def half():
        yield b"x" * 100_000
        await asyncio.sleep(30)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await client.call("PUT", url, data=half(), path="/tmp/half")
    async with asyncio.timeout(10):
        while "half" in str((await client.call("GET", f"{url}/list", path="/tmp")).json):
            await asyncio.sleep(0.05)


async def test_trees_go_up_and_come_down_with_the_skipped_named(client, box):
    url = f"/v1/sandboxes/{box}/files/tree"
    with io.BytesIO() as out:
        with tarfile.open(fileobj=out, mode="w") as archive:
            for name, content in (("a/b.txt", b"hello"), ("a/zeros", bytes(5000))):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            fifo = tarfile.TarInfo("a/pipe")
            fifo.type = tarfile.FIFOTYPE
            archive.addfile(fifo)
        up = await client.call("PUT", url, data=out.getvalue(), path="/tmp/tree")
    assert up.ok()["files"] >= 2
    assert [name for name, _ in up.json["skipped"]] == ["a/pipe"]
    await client.exec(box, "mkfifo /tmp/tree/a/p2 || python3 -c 'import os; os.mkfifo(\"/tmp/tree/a/p2\")' || true")
    has_fifo = (await client.exec(box, "test -p /tmp/tree/a/p2"))["exit_code"] == 0
    down = await client.call("GET", url, path="/tmp/tree")
    with tarfile.open(fileobj=io.BytesIO(down.body)) as archive:
        names = archive.getnames()
        zeros = next(name for name in names if name.endswith("zeros"))
        assert archive.extractfile(zeros).read() == bytes(5000)
        assert names[-1] == ".dsec-skipped.json"
        skipped = json.load(archive.extractfile(names[-1]))
    assert [reason for _, reason in skipped] == (["fifo"] if has_fifo else [])


async def test_watch_tells_of_changes(client, box):
    async with client.session.ws_connect(
        f"/v1/sandboxes/{box}/files/watch", params={"path": "/tmp", "recursive": "1"}
    ) as ws:
        await asyncio.sleep(0.2)
        await client.call("PUT", f"/v1/sandboxes/{box}/files", data=b"x", path="/tmp/seen")
        async with asyncio.timeout(20):
            async for message in ws:
                if json.loads(message.data)["path"].endswith("seen"):
                    break
