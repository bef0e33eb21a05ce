"""The small HTTP client of SDK and gateway against servers that a test writes by hand, over loopback."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from libdsec._http1 import Broken, TooLarge, connect
from libdsec._http1_parse import Malformed
from libdsec._http1_pool import Pool
from libdsec.errors import UsageError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def _request_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), b":0")
    return head + await reader.readexactly(int(length.partition(b":")[2]))


class Last(bytes):
    """An answer behind which the server closes."""


class Server:
    """Answers each request on a connection with what `answer(number)` gives: bytes, or None to cut."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.connections = 0
        self.open: set[asyncio.Task[None]] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        self.open.add(task)
        try:
            while True:
                self.requests.append(await _request_of(reader))
                reply = self.answer(len(self.requests))
                if asyncio.iscoroutine(reply):
                    reply = await reply
                if reply is None:
                    writer.transport.abort()
                    return
                writer.write(reply)
                await writer.drain()
                if isinstance(reply, Last):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            self.open.discard(task)
            writer.close()

    async def end(self) -> None:
        """Let every handler return."""
        left = list(self.open)
        for task in left:
            task.cancel()
        await asyncio.gather(*left)


@asynccontextmanager
async def serving(answer, *, limit: int = 0, idle_s: float = 30.0):
    server = Server(answer)
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    pool = Pool(
        lambda: connect("127.0.0.1", port, timeout_s=5.0),
        host="box:1",
        headers={"Authorization": "Bearer t"},
        limit=limit,
        idle_s=idle_s,
    )
    try:
        async with asyncio.timeout(20):
            yield server, pool
    finally:
        pool.close()
        listening.close()
        await server.end()
        await listening.wait_closed()


async def ask(pool: Pool, method: str = "POST", path: str = "/x", body: bytes | None = b"{}", **more) -> bytes:
    reply = await pool.request(method, path, body, {"Content-Type": "a/b"}, **more)
    try:
        return await reply.read(1 << 20)
    finally:
        pool.release(reply)


async def test_requests_are_written_as_they_should_and_share_a_connection():
    async with serving(lambda _: OK) as (server, pool):
        assert await ask(pool) == b"ok"
        assert await ask(pool, "GET", "/y?z=%20", None) == b"ok"
    head = b"Host: box:1\r\nAuthorization: Bearer t\r\nContent-Type: a/b\r\n"
    assert server.requests == [
        b"POST /x HTTP/1.1\r\n" + head + b"Content-Length: 2\r\n\r\n{}",
        b"GET /y?z=%20 HTTP/1.1\r\n" + head + b"\r\n",
    ]
    assert server.connections == 1


@pytest.mark.parametrize("path", ["x", "/a b", "/a\r\nX: y", "/\xe4", "/\x00", ""])
async def test_nothing_gets_into_a_request_line(path):
    async with serving(lambda _: OK) as (server, pool):
        with pytest.raises(UsageError):
            await ask(pool, path=path)
        with pytest.raises(UsageError):
            await pool.request("POST", "/", b"", {"X": "a\r\nY: b"})
        assert await ask(pool) == b"ok"
    assert len(server.requests) == 1


async def test_a_cut_before_the_reply_is_broken_and_the_next_request_goes_out_anew():
    async with serving(lambda number: None if number == 2 else OK) as (server, pool):
        assert await ask(pool) == b"ok"
        with pytest.raises(Broken) as caught:
            await ask(pool)
        assert (caught.value.sent, caught.value.reused) == (True, True)
        assert await ask(pool) == b"ok"
    assert server.connections == 2


@pytest.mark.parametrize("reply", [OK[:20], OK[:-1], OK.replace(b"Content-Length: 2", b"Transfer-Encoding: chunked")])
async def test_a_reply_that_is_cut_short_is_broken(reply):
    async with serving(lambda _: Last(reply)) as (_, pool):
        with pytest.raises(Broken) as caught:
            await ask(pool)
        assert (caught.value.sent, caught.value.reused) == (True, False)


async def test_a_body_without_a_length_ends_with_its_connection():
    async with serving(lambda _: Last(b"HTTP/1.1 200 OK\r\n\r\nall of it")) as (server, pool):
        assert await ask(pool) == b"all of it"
        assert await ask(pool) == b"all of it"
        assert server.connections == 2


async def test_what_is_no_http_is_malformed_and_bytes_nobody_asked_for_end_a_connection():
    async with serving(lambda number: b"SSH-2.0\r\n\r\n" if number == 1 else OK) as (server, pool):
        with pytest.raises(Malformed):
            await ask(pool)
        assert await ask(pool) == b"ok"
    async with serving(lambda number: OK + b"HTTP/1.1 200 OK" if number == 1 else OK) as (server, pool):
        assert await ask(pool) == b"ok"
        assert await ask(pool) == b"ok"
        assert server.connections == 2


async def test_silence_has_an_end_and_is_counted_from_the_last_byte():
    async def never(_: int) -> bytes:
        await asyncio.sleep(60)
        return OK

    async with serving(lambda number: never(number)) as (_, pool):
        with pytest.raises(Broken, match="no word") as caught:
            await ask(pool, silence_s=0.05)
        assert caught.value.sent


async def test_a_reply_longer_than_wanted_is_refused():
    async with serving(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n123456789") as (server, pool):
        reply = await pool.request("GET", "/", None, {})
        with pytest.raises(TooLarge):
            await reply.read(8)
        pool.release(reply)
        assert await ask(pool) == b"123456789"
        assert server.connections == 2


async def test_who_finds_no_connection_waits_in_order_and_a_cancelled_one_takes_no_place():
    gate = asyncio.Event()

    async def held(_: int) -> bytes:
        await gate.wait()
        return OK

    ended: list[int] = []

    async def one(number: int) -> None:
        await ask(pool, path=f"/{number}")
        ended.append(number)

    async with serving(held, limit=2) as (server, pool):
        tasks = []
        for number in range(8):
            tasks.append(asyncio.create_task(one(number)))
            await asyncio.sleep(0)
        while len(server.requests) < 2:
            await asyncio.sleep(0.01)
        tasks.pop(3).cancel()
        gate.set()
        await asyncio.gather(*tasks)
        assert server.connections == 2
    sent = [int(request.split()[1][1:]) for request in server.requests]
    assert sorted(sent) == [0, 1, 2, 4, 5, 6, 7]
    assert sent == sorted(sent)
    assert sorted(ended) == sorted(sent)


async def test_a_cancelled_exchange_ends_its_connection():
    async def never(_: int) -> bytes:
        await asyncio.sleep(60)
        return OK

    async with serving(lambda number: never(number) if number == 1 else OK, limit=1) as (server, pool):
        asking = asyncio.create_task(ask(pool))
        while not server.requests:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await ask(pool) == b"ok"
        assert server.connections == 2


async def test_a_slow_reader_holds_the_sender_back():
    size, sent = 64 << 20, 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await _request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            sent += 1 << 20
        await _request_of(reader)
        writer.write(OK)
        writer.close()

    listening = await asyncio.start_server(flood, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    pool = Pool(lambda: connect("127.0.0.1", port, timeout_s=5.0), host="h", headers={}, limit=0, idle_s=9)
    reply = await pool.request("GET", "/", None, {})
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.1)
    assert sent < size // 2
    got = 0
    async for piece in reply.chunks():
        got += len(piece)
    assert got == size
    pool.release(reply)
    assert await ask(pool) == b"ok", "a connection that was held up is good for more"
    pool.close()
    listening.close()
    await listening.wait_closed()


async def test_idle_connections_are_closed_in_time_and_a_closed_pool_makes_none():
    async with serving(lambda _: OK, idle_s=0.05) as (server, pool):
        assert await ask(pool) == b"ok"
        while server.open:
            await asyncio.sleep(0.02)
        assert await ask(pool) == b"ok"
        assert server.connections == 2
        pool.close()
        with pytest.raises(Broken) as caught:
            await ask(pool)
        assert not caught.value.sent


async def test_nobody_there_is_broken_and_never_sent(tmp_path):
    pool = Pool(
        lambda: connect("", 0, unix_path=str(tmp_path / "none"), timeout_s=5.0),
        host="h", headers={}, limit=1, idle_s=9,
    )  # fmt: skip
    for _ in range(3):  # a failed attempt takes no place
        with pytest.raises(Broken) as caught:
            await ask(pool)
        assert not caught.value.sent
    pool.close()
