"""Relays: bytes pass as they are, at the slower side's pace, and a cut is never turned into an end."""

import asyncio
import hashlib
import json
import os

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from libdsec.errors import StateError

from tests.kit.fakenode import FakeNode, cut
from tests.kit.gateways import ADMIN, calling, running_gateway

MIB = 1024 * 1024
EXEC = "POST /v1/sandboxes/{id}/execs"
READ = "GET /v1/sandboxes/{id}/files"
WRITE = "PUT /v1/sandboxes/{id}/files"
STREAM = "GET /v1/sandboxes/{id}/execs/stream"


@pytest.fixture
async def node():
    async with FakeNode("n1") as node:
        yield node


@pytest.fixture
async def admin(tmp_path, node):
    async with running_gateway(tmp_path / "gw", node) as gateway, calling(gateway) as caller:
        yield caller


@pytest.fixture
async def box(admin):
    (made,) = await admin.create()
    return f"/v1/sandboxes/{made['id']}"


async def until(condition) -> None:
    async with asyncio.timeout(8):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 3 * MIB])
async def test_files_of_any_size_come_and_go_unchanged(admin, box, size):
    content = os.urandom(size)

    async def pieces():
        for start in range(0, size, 100_000):
            yield content[start : start + 100_000]

    for body in (content if size < MIB else pieces(), pieces()):
        status, value = await admin("PUT", f"{box}/files?path=/a%20b%ff", data=body)
        assert (status, value["bytes"]) == (200, size)
    async with admin.session.get(f"{box}/files", params={"path": "/a b"}) as reply:
        assert reply.status == 500  # the fake's own failure: another name
    async with admin.session.request("GET", aiohttp.client.URL(f"{box}/files?path=/a%20b%ff", encoded=True)) as reply:
        assert hashlib.sha256(await reply.read()).digest() == hashlib.sha256(content).digest()
        assert reply.headers["X-Dsec-Size"] == str(size)


async def test_raw_bytes_in_a_request_line_go_no_further(admin, box, node):
    address = admin.session._base_url
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(f"GET {box}/files?path=/".encode() + b"\xff HTTP/1.1\r\nHost: x\r\n")
    writer.write(f"Authorization: Bearer {ADMIN}\r\nConnection: close\r\n\r\n".encode())
    reply = await asyncio.wait_for(reader.read(), 8)
    writer.close()
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0].endswith(b" 400 Bad Request")
    assert b"\r\nContent-Type: application/json" in head
    told = json.loads(body)["error"]
    assert (told["kind"], told["code"]) == ("usage", "bad_http")
    assert ADMIN not in body.decode()
    assert node.calls["GET /v1/sandboxes/{id}/files"] == 0


async def test_an_error_of_the_node_passes_unchanged(admin, box, node):
    async def refuse(request: web.Request) -> web.StreamResponse:
        raise StateError("wrong_state", "it is paused", hint="resume it", details={"state": "paused"})

    node.script[EXEC] = node.script[STREAM] = refuse
    error = await admin.error("POST", f"{box}/execs", {"cmd": ["id"]})
    assert (error.kind, error.code, error.hint, error.details) == (
        "state",
        "wrong_state",
        "resume it",
        {"state": "paused"},
    )
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await admin.session.ws_connect(f"{box}/execs/stream")
    assert refused.value.status == 409
    assert (await admin.error("GET", f"{box}/execs/stream")).code == "wrong_state"


async def test_a_node_that_dies_before_its_reply_is_an_unreachable_node_not_a_result(admin, box, node):
    async def die(request: web.Request) -> web.StreamResponse:
        cut(request)
        return web.Response()

    node.script[EXEC] = die
    error = await admin.error("POST", f"{box}/execs", {"cmd": ["id"]})
    assert (error.kind, error.code, error.details["sent"]) == ("platform", "node_unreachable", True)
    assert error.retry_after_s


@pytest.mark.parametrize("sized", [True, False], ids=["with length", "chunked"])
async def test_a_reply_cut_in_the_middle_is_cut_for_the_client_too(admin, box, node, sized):
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(2 * MIB)} if sized else {})
        await response.prepare(request)
        await response.write(b"x" * MIB)
        cut(request)
        return response

    node.script[READ] = half
    with pytest.raises(aiohttp.ClientError):
        async with admin.session.get(f"{box}/files?path=/x") as reply:
            await reply.read()


async def test_a_small_reply_cut_in_the_middle_is_an_error_with_its_reason(admin, box, node):
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"exit_code":0')
        cut(request)
        return response

    node.script[EXEC] = half
    assert (await admin.error("POST", f"{box}/execs", {"cmd": ["id"]})).code == "node_unreachable"


async def test_an_upload_cut_by_the_client_never_ends_at_the_node(admin, box, node):
    seen = []

    async def watch(request: web.Request) -> web.StreamResponse:
        try:
            while chunk := await request.content.readany():
                seen.append(len(chunk))
        except BaseException:
            seen.append("cut")
            raise
        seen.append("end")
        return web.Response()

    node.script[WRITE] = watch

    async def stops():
        yield b"x" * 100_000
        await asyncio.sleep(30)

    upload = asyncio.create_task(admin("PUT", f"{box}/files?path=/x", data=stops()))
    await until(lambda: seen)
    upload.cancel()
    await until(lambda: seen[-1] in ("cut", "end"))
    assert seen[-1] == "cut"


async def test_what_may_be_repeated_survives_a_kept_connection_that_was_closed_and_a_write_is_never_sent_twice(
    admin, box, node
):
    seen = []

    async def cut_first(request: web.Request) -> web.StreamResponse:
        await request.read()
        seen.append(request.method)
        if seen.count(request.method) == 1:
            cut(request)
        return web.Response(body=b"whole")

    node.script[READ] = node.script[WRITE] = cut_first
    await admin.ok("POST", f"{box}/execs", {"cmd": ["id"]})  # leaves a connection
    async with admin.session.get(f"{box}/files?path=/x") as reply:
        assert (reply.status, await reply.read()) == (200, b"whole")
    assert seen == ["GET", "GET"]
    status, error = await admin("PUT", f"{box}/files?path=/x&append=1", data=b"more")
    assert (status, error["error"]["code"]) == (500, "node_unreachable")
    assert seen.count("PUT") == 1


async def test_a_client_that_goes_away_frees_the_node_from_its_exec(admin, box, node):
    events = []

    async def slow(request: web.Request) -> web.StreamResponse:
        events.append("began")
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            events.append("freed")
            raise
        return web.Response()

    node.script[EXEC] = slow
    asked = asyncio.create_task(admin("POST", f"{box}/execs", {"cmd": ["sleep"]}))
    await until(lambda: events)
    asked.cancel()
    await until(lambda: "freed" in events)


async def test_a_slow_reader_holds_the_node_back(admin, box, node):
    sent = []

    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(128):
            await response.write(b"x" * MIB)
            sent.append(MIB)
        return response

    node.script[READ] = flood
    async with admin.session.get(f"{box}/files?path=/x") as reply:
        await reply.content.readany()
        before = -1
        while before != len(sent):
            before = len(sent)
            await asyncio.sleep(0.3)
        assert len(sent) < 64  # socket buffers of two hops, not the whole
        assert sum([len(chunk) async for chunk in reply.content.iter_any()]) > 100 * MIB


async def test_websockets_carry_both_kinds_of_messages_and_the_close_code(admin, box):
    async with admin.session.ws_connect(f"{box}/execs/stream") as ws:
        await ws.send_bytes(b"\x00\xff" * 1000)
        assert (await ws.receive()).data == b"\x00\xff" * 1000
        await ws.send_str('{"type":"resize"}')
        assert (await ws.receive()).data == '{"type":"resize"}'
        await ws.send_str("exit")
        last = await ws.receive()
        assert (last.type, last.data) == (WSMsgType.CLOSE, 4000)


async def test_a_websocket_cut_by_the_node_is_cut_not_closed(admin, box, node):
    async def die(request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        await ws.receive()
        cut(request)
        return ws

    node.script[STREAM] = die
    async with admin.session.ws_connect(f"{box}/execs/stream") as ws:
        await ws.send_str("go")
        last = await ws.receive()
        assert last.type in (WSMsgType.CLOSED, WSMsgType.ERROR)
        assert ws.close_code in (None, 1006)


@pytest.mark.parametrize("how", ["close", "cut"])
async def test_a_websocket_that_the_client_leaves_is_left_at_the_node(admin, box, node, how):
    ends = []

    async def watch(request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        try:
            message = await ws.receive()
            ends.append((message.type, message.data))
        except asyncio.CancelledError:
            ends.append("gone")
            raise
        return ws

    node.script[STREAM] = watch
    ws = await admin.session.ws_connect(f"{box}/execs/stream")
    if how == "close":
        await ws.close(code=4001)
    else:
        ws._response.close()
    await until(lambda: ends)
    assert ends[0] == (WSMsgType.CLOSE, 4001) if how == "close" else ends[0] != (WSMsgType.CLOSE, 1000)


async def test_a_slow_websocket_reader_holds_the_node_back(admin, box, node):
    sent = []

    async def flood(request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        for _ in range(128):
            await ws.send_bytes(b"x" * MIB)
            sent.append(MIB)
        await ws.close()
        return ws

    node.script[STREAM] = flood
    async with admin.session.ws_connect(f"{box}/execs/stream") as ws:
        before = -1
        while before != len(sent):
            before = len(sent)
            await asyncio.sleep(0.3)
        assert len(sent) < 64
        got = 0
        async for message in ws:
            got += len(message.data)
        assert got == 128 * MIB


async def test_500_calls_at_once_leave_connections_flat(admin, box):
    """Case L11, the gateway's part."""
    replies = await asyncio.gather(*(admin("POST", f"{box}/execs", {"cmd": ["id"]}) for _ in range(500)))
    assert {status for status, _ in replies} == {200}
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await asyncio.gather(*(admin("POST", f"{box}/execs", {"cmd": ["id"]}) for _ in range(200)))
    assert len(os.listdir("/proc/self/fd")) <= before
