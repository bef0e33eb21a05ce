"""File routes: bodies streamed in bounded pieces in both directions, paths as bytes, never resolved on this side.

A download that fails half-way cuts the connection: a short body is never shown as a whole one.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from contextlib import aclosing
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import msgspec
from aiohttp import WSMsgType, web
from libdsec.errors import DsecError, UsageError
from libdsec.wire import FileList, FileOp, FileStat, FileWritten, Ok, TreeResult, WatchEvent

from nomad_dsec.httpd import json_reply, query_int, read_json
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from typing import Any

    from nomad_dsec.guest.spec import FileEvent, FileInfo, Skipped
    from nomad_dsec.node.core import Entry
    from nomad_dsec.node.execs import Execs

log = get_log(__name__)
CHUNK_BYTES = 256 * 1024
BLOCK = 512
TAR_END_BYTES = 2 * BLOCK  # dsec-init ends an archive with exactly two empty blocks
SKIPPED_NAME = ".dsec-skipped.json"
TAR_TYPE = "application/x-tar"
BYTES_TYPE = "application/octet-stream"
HEARTBEAT_S = 20.0


class Files:
    """The file routes of one node, given the sandbox of each request."""

    def __init__(self, execs: Execs) -> None:
        self._execs = execs

    async def read(self, request: web.Request, entry: Entry) -> web.StreamResponse:
        """GET files: raw bytes; X-Dsec-Size is the size of the whole file."""
        query = Query(request)
        offset = query_int(request, "offset", 0) or 0
        length = query_int(request, "length", None)
        if offset < 0 or (length is not None and length < 0):
            raise UsageError(
                "bad_query", "offset and length can't be negative", field="offset" if offset < 0 else "length"
            )
        channel = await self._execs.open(entry)
        user = query.text("user")
        size = (await channel.stat(query.path(), user=user)).size
        chunks = channel.read_file(query.path(), offset, length, user=user)
        return await self._stream(request, chunks, {"X-Dsec-Size": str(size), "Content-Type": BYTES_TYPE})

    async def write(self, request: web.Request, entry: Entry) -> web.Response:
        """PUT files: atomic unless appended; the announced length is verified."""
        query = Query(request)
        channel = await self._execs.open(entry)
        written = await channel.write_file(
            query.path(),
            request.content.iter_chunked(CHUNK_BYTES),
            mode=query.mode(),
            append=query.flag("append"),
            parents=query.flag("parents"),
            size=request.content_length,
            user=query.text("user"),
        )
        return json_reply(FileWritten(bytes=written))

    async def ls(self, request: web.Request, entry: Entry) -> web.Response:
        """GET files/list."""
        query = Query(request)
        found = await (await self._execs.open(entry)).list_dir(query.path(), user=query.text("user"))
        return json_reply(FileList(entries=[file_stat(info) for info in sorted(found, key=lambda info: info.name)]))

    async def stat(self, request: web.Request, entry: Entry) -> web.Response:
        """GET files/stat."""
        query = Query(request)
        channel = await self._execs.open(entry)
        follow = query.flag("follow", default=True)
        return json_reply(file_stat(await channel.stat(query.path(), follow=follow, user=query.text("user"))))

    async def op(self, request: web.Request, entry: Entry) -> web.Response:
        """POST files/op."""
        wanted = await read_json(request, FileOp, max_bytes=64 * 1024)
        channel = await self._execs.open(entry)
        path = wanted.raw_path or wanted.path.encode("utf-8", "surrogateescape")
        mode = None if isinstance(wanted.mode, msgspec.UnsetType) else wanted.mode
        if wanted.op == "mkdir":
            await channel.mkdir(path, mode=0o755 if mode is None else mode, parents=wanted.parents)
        elif wanted.op == "remove":
            await channel.remove(path, recursive=wanted.recursive, missing_ok=wanted.missing_ok)
        elif wanted.op == "move":
            target = wanted.raw_to or wanted.to.encode("utf-8", "surrogateescape")
            if not target:
                raise UsageError("missing_field", "move needs a target", field="to", hint="give the new path")
            await channel.move(path, target)
        else:
            if mode is None:
                raise UsageError("missing_field", "chmod needs a mode", field="mode", hint="give it as a number")
            await channel.chmod(path, mode)
        return json_reply(Ok())

    async def download_tree(self, request: web.Request, entry: Entry) -> web.StreamResponse:
        """GET files/tree: a tar stream whose last member names what was left out."""
        query = Query(request)
        skipped: list[Skipped] = []
        channel = await self._execs.open(entry)
        chunks = channel.download_tree(query.path(), skipped=skipped, user=query.text("user"))
        return await self._stream(request, with_skipped(chunks, skipped), {"Content-Type": TAR_TYPE})

    async def upload_tree(self, request: web.Request, entry: Entry) -> web.Response:
        """PUT files/tree: a tar stream, unpacked below the path."""
        query = Query(request)
        channel = await self._execs.open(entry)
        done = await channel.upload_tree(
            query.path(),
            request.content.iter_chunked(CHUNK_BYTES),
            keep_owner=query.flag("keep_owner"),
            user=query.text("user"),
        )
        skipped = [(_text(each.name), each.reason) for each in done.skipped]
        return json_reply(TreeResult(skipped=skipped, files=done.files))

    async def watch(self, request: web.Request, entry: Entry) -> web.WebSocketResponse:
        """GET files/watch: a WebSocket with a WatchEvent for each change, until the client leaves."""
        query = Query(request)
        path, recursive, user = query.path(), query.flag("recursive"), query.text("user")
        channel = await self._execs.open(entry)
        await channel.stat(path, user=user)  # what is not there is told by the HTTP status
        ws = web.WebSocketResponse(heartbeat=HEARTBEAT_S, compress=False)
        await ws.prepare(request)
        events = channel.watch(path, recursive=recursive, user=user)
        await relay_events(ws, events, self._execs, entry)
        return ws

    async def _stream(
        self, request: web.Request, chunks: AsyncIterator[bytes], headers: dict[str, str]
    ) -> web.StreamResponse:
        """Errors before the first byte keep their status; later ones cut the connection."""
        response = web.StreamResponse(headers=headers)
        async with aclosing(_generator(chunks)) as source:
            first = await anext(source, b"")
            await response.prepare(request)
            try:
                if first:
                    await response.write(first)
                async for chunk in source:
                    await response.write(chunk)
            except DsecError as error:
                log.warning("a download was cut", path=request.path, error=str(error))
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError(str(error)) from error
        await response.write_eof()
        return response


async def _generator(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for chunk in chunks:
        yield chunk


async def relay_events(ws: web.WebSocketResponse, events: AsyncIterator[FileEvent], execs: Execs, entry: Entry) -> None:
    """Send events until the client leaves or the sandbox ends."""

    async def send() -> None:
        async for event in events:
            text, raw = text_and_raw(event.path)
            message = WatchEvent(kind=event.kind, path=text, raw=raw, cookie=event.cookie)
            await ws.send_str(msgspec.json.encode(message).decode())

    async def until_left() -> None:
        async for message in ws:
            if message.type is WSMsgType.CLOSE:
                return

    sending, leaving = asyncio.ensure_future(send()), asyncio.ensure_future(until_left())
    try:
        await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        sending.cancel()
        leaving.cancel()
        results = await asyncio.gather(sending, leaving, return_exceptions=True)
    failed = results[0]
    if isinstance(failed, DsecError) and not ws.closed:
        shown = await execs.explained(entry, failed)
        body: dict[str, Any] = {"type": "error", "error": msgspec.to_builtins(shown.to_body())}
        await ws.send_str(msgspec.json.encode(body).decode())
    await ws.close()


class Query:
    """The query string with any byte in its values: percent-encoded, kept by surrogateescape."""

    def __init__(self, request: web.Request) -> None:
        pairs = parse_qsl(request.rel_url.raw_query_string, keep_blank_values=True, errors="surrogateescape")
        self._values = dict(pairs)

    def path(self) -> bytes:
        """The exact bytes of `path`; UsageError when there is none."""
        path = self._values.get("path", "").encode("utf-8", "surrogateescape")
        if not path or b"\0" in path:
            raise UsageError("missing_field", "no path was given", field="path", hint="add ?path=<path in the sandbox>")
        return path

    def text(self, name: str) -> str:
        """A value, or ""."""
        return self._values.get(name, "")

    def flag(self, name: str, *, default: bool = False) -> bool:
        """0 or 1."""
        value = self._values.get(name, "")
        if value not in ("", "0", "1", "true", "false"):
            raise UsageError("bad_query", f"{value[:40]!r} is neither 0 nor 1", field=name)
        return default if value == "" else value in ("1", "true")

    def mode(self) -> int | None:
        """File mode in octal, as chmod(1) takes it, or None."""
        value = self._values.get("mode", "")
        if not value:
            return None
        try:
            mode = int(value.removeprefix("0o"), 8)
        except ValueError as error:
            raise UsageError(
                "bad_query", f"{value[:40]!r} is no mode", field="mode", hint="octal, such as 644"
            ) from error
        if not 0 <= mode <= 0o7777:
            raise UsageError("bad_query", f"{value} is no mode", field="mode", hint="octal, at most 7777")
        return mode


def file_stat(info: FileInfo) -> FileStat:
    """The wire's form."""
    name, raw = text_and_raw(info.name)
    link, raw_link = text_and_raw(info.link)
    return FileStat(
        name=name,
        raw=raw,
        link=link,
        raw_link=raw_link,
        kind=info.kind,  # type: ignore[arg-type]  # the guest's kinds are those of the wire
        size=info.size,
        mode=info.mode,
        uid=info.uid,
        gid=info.gid,
        mtime=info.mtime_ns / 1e9,
    )


def text_and_raw(name: bytes) -> tuple[str, bytes]:
    """A name as text, and its bytes too where the text can't say them."""
    try:
        return name.decode("utf-8"), b""
    except UnicodeDecodeError:
        return name.decode("utf-8", "replace"), name


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


async def with_skipped(chunks: AsyncIterator[bytes], skipped: list[Skipped]) -> AsyncGenerator[bytes, None]:
    """The archive with one more member before its end. Zeros are held back (as a number) until more follows them."""
    zeros = 0
    async for chunk in chunks:
        body = chunk.rstrip(b"\0")
        if body:
            for piece in _zeros(zeros):
                yield piece
            yield body
            zeros = 0
        zeros += len(chunk) - len(body)
    for piece in _zeros(max(0, zeros - TAR_END_BYTES)):
        yield piece
    yield _last_member(skipped)


def _zeros(count: int) -> list[bytes]:
    whole, rest = divmod(count, CHUNK_BYTES)
    return [bytes(CHUNK_BYTES)] * whole + ([bytes(rest)] if rest else [])


def _last_member(skipped: list[Skipped]) -> bytes:
    content = msgspec.json.encode([(_text(each.name), each.reason) for each in skipped])
    with io.BytesIO() as out:
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            member = tarfile.TarInfo(SKIPPED_NAME)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        return out.getvalue()
