"""Files of a sandbox. Paths are the sandbox's, resolved by its kernel; contents stream with bounded memory."""

from __future__ import annotations

import asyncio
import os
import stat as stat_bits
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar
from urllib.parse import quote_from_bytes

import msgspec

from libdsec._http import decode, decoder_of, read_bounded
from libdsec._pipe import bytes_from_writer, reader_of
from libdsec._tar import MAX_TREE_BYTES, Unpacker, pack_tree
from libdsec.errors import NotFoundError, PlatformError, ProtocolError, UsageError
from libdsec.wire import MAX_JSON_BYTES, FileList, FileOp, FileStat, FileWritten, Ok, TreeResult, WatchEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator

    from libdsec._http import Transport

T = TypeVar("T")
CHUNK_BYTES = 256 * 1024
MAX_READ_BYTES = 2 * 1024**3
_WHOLE_BODY_BYTES = 512 * 1024


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


Content = "bytes | str | Path | BinaryIO | AsyncIterable[bytes]"


class AsyncFiles:
    """File operations on one sandbox. A path is text (surrogateescape for odd bytes) or bytes."""

    def __init__(self, transport: Transport, sandbox: str) -> None:
        self._transport = transport
        self._base = f"/v1/sandboxes/{sandbox}/files"

    async def read(self, path: str | bytes, *, offset: int = 0, length: int | None = None) -> bytes:
        """The contents, or `length` bytes from `offset`. At most 2 GiB: use `read_stream` for more."""
        url = self._read_url(path, offset, length)

        async def once() -> bytes:
            async with self._transport.open("GET", url) as reply:
                body = await read_bounded(reply, MAX_READ_BYTES)
                _check_length(path, len(body), reply.headers.get("X-Dsec-Size"), offset, length)
                return body

        return await self._transport.repeat(once, repeatable=True)

    async def read_text(self, path: str | bytes, *, encoding: str = "utf-8", errors: str = "replace") -> str:
        """The contents as text."""
        return (await self.read(path)).decode(encoding, errors)

    async def read_stream(
        self, path: str | bytes, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[bytes]:
        """The contents piece by piece; raises PlatformError when it ends before its length."""
        got = 0
        async with self._transport.open("GET", self._read_url(path, offset, length)) as reply:
            async for chunk in reply.content.iter_chunked(CHUNK_BYTES):
                got += len(chunk)
                yield chunk
            _check_length(path, got, reply.headers.get("X-Dsec-Size"), offset, length)

    async def write(
        self,
        path: str | bytes,
        data: bytes | str | Path | BinaryIO | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        parents: bool = False,
        user: str = "",
    ) -> int:
        """Replace the file in one step (temp and rename) and return its length in bytes.

        data: text (as UTF-8), bytes, a local Path, an open binary file, or an async iterable of bytes; streamed.
        mode: permission bits; None leaves them to the node. parents: make missing directories. user: the owner.
        """
        query = f"?path={_quoted(path)}&parents={int(parents)}"
        query += f"&mode={mode:o}" if mode is not None else ""
        query += f"&user={quote_from_bytes(user.encode())}" if user else ""
        return await self._put(query, path, data, repeatable=True)

    async def append(
        self, path: str | bytes, data: bytes | str | Path | BinaryIO | AsyncIterable[bytes], *, parents: bool = False
    ) -> int:
        """Add to the end of a file, making it when missing. Never sent twice: a cut raises PlatformError."""
        return await self._put(f"?path={_quoted(path)}&append=1&parents={int(parents)}", path, data, repeatable=False)

    async def list(self, path: str | bytes = "/") -> list[FileStat]:
        """The entries of a directory in name order."""
        url = f"{self._base}/list?path={_quoted(path)}"
        return [_exact(entry) for entry in (await self._transport.request("GET", url, FileList)).entries]

    async def stat(self, path: str | bytes, *, follow: bool = True) -> FileStat:
        """What is at path; NotFoundError when nothing is."""
        url = f"{self._base}/stat?path={_quoted(path)}&follow={int(follow)}"
        return _exact(await self._transport.request("GET", url, FileStat))

    async def exists(self, path: str | bytes) -> bool:
        """Whether something is at path; a dangling link is nothing."""
        try:
            await self.stat(path)
        except NotFoundError as error:
            if error.code == "file_not_found" or error.field == "path":
                return False
            raise
        return True

    async def mkdir(self, path: str | bytes, *, parents: bool = False, mode: int | None = None) -> None:
        """Make a directory. With parents, missing ones above it too, and it may exist."""
        bits = msgspec.UNSET if mode is None else mode
        await self._operate(FileOp(op="mkdir", **_path_fields(path), parents=parents, mode=bits))

    async def move(self, path: str | bytes, to: str | bytes) -> None:
        """Rename, replacing a file at the new name."""
        raw = _raw(to)
        fields: dict[str, Any] = {"to": raw.decode("utf-8", "replace")}
        if not _is_utf8(raw):
            fields["raw_to"] = raw
        await self._operate(FileOp(op="move", **_path_fields(path), **fields))

    async def remove(self, path: str | bytes, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Remove a file, a link, or with recursive a whole tree."""
        await self._operate(FileOp(op="remove", **_path_fields(path), recursive=recursive, missing_ok=missing_ok))

    async def chmod(self, path: str | bytes, mode: int) -> None:
        """Set the permission bits."""
        await self._operate(FileOp(op="chmod", **_path_fields(path), mode=mode))

    async def upload(self, source: str | os.PathLike[str], path: str | bytes) -> TreeResult:
        """Copy a local file, or the contents of a local directory, to path. Links are copied as links.

        Returns how many entries went over and which were left out (special files), with the reason.
        """
        local = Path(source)
        if not await asyncio.to_thread(local.exists):
            raise UsageError("no_such_file", f"{local} does not exist here", field="source")
        if not await asyncio.to_thread(local.is_dir):
            mode = stat_bits.S_IMODE((await asyncio.to_thread(local.stat)).st_mode) & 0o777
            await self.write(path, local, mode=mode, parents=True)
            return TreeResult(files=1)
        packed = TreeResult()

        def pack(sink: BinaryIO) -> None:
            done = pack_tree(local, sink)
            packed.files, packed.skipped = done.files, done.skipped

        url = f"{self._base}/tree?path={_quoted(path)}"

        async def once() -> TreeResult:
            async with self._transport.open("PUT", url, data=bytes_from_writer(pack)) as reply:
                return decode(await read_bounded(reply, MAX_JSON_BYTES), decoder_of(TreeResult))

        there = await self._transport.repeat(once, repeatable=True)
        return TreeResult(files=packed.files, skipped=[*packed.skipped, *there.skipped])

    async def download(
        self, path: str | bytes, target: str | os.PathLike[str], *, max_bytes: int = MAX_TREE_BYTES
    ) -> TreeResult:
        """Copy a file to the local `target`, or the contents of a directory into it.

        Nothing outside target is written whatever the sandbox sends. Special files, and links that lead outside, are
        left out and named in the result. UsageError tree_too_large beyond max_bytes.
        """
        local = Path(target)
        kind = (await self.stat(path)).kind
        if kind == "file":
            await self._download_file(path, local, max_bytes)
            return TreeResult(files=1)
        if kind != "dir":
            raise UsageError(
                "special_file", f"{path!r} is a {kind}", field="path", hint="download files or directories"
            )
        url = f"{self._base}/tree?path={_quoted(path)}"

        async def once() -> TreeResult:
            async with self._transport.open("GET", url) as reply:
                unpacker = Unpacker(local, max_bytes)
                return await reader_of(reply.content.iter_chunked(CHUNK_BYTES), unpacker.run)

        return await self._transport.repeat(once, repeatable=True)

    async def watch(self, path: str | bytes, *, recursive: bool = False) -> AsyncIterator[WatchEvent]:
        """Changes below path as they happen, until the caller stops; PlatformError when the stream is cut."""
        import aiohttp

        url = f"{self._base}/watch?path={_quoted(path)}&recursive={int(recursive)}"
        async with self._transport.websocket(url) as socket:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.PING:
                    await socket.pong(message.data)
                elif message.type is aiohttp.WSMsgType.TEXT:
                    yield _event(message.data)
        raise PlatformError("watch_cut", "the stream of events was cut; events may be missing", retry_after_s=1.0)

    async def _operate(self, operation: FileOp) -> None:
        repeatable = operation.op == "chmod" or (operation.op == "mkdir" and operation.parents) or operation.missing_ok
        await self._transport.request("POST", f"{self._base}/op", Ok, body=operation, repeatable=repeatable)

    async def _put(self, query: str, path: str | bytes, data: Any, *, repeatable: bool) -> int:
        if isinstance(data, str):
            data = data.encode()
        replayable = isinstance(data, (bytes, bytearray, memoryview, Path))

        async def once() -> int:
            sent = _Counted()
            body, headers = await _body_of(data, sent)
            async with self._transport.open("PUT", self._base + query, data=body, headers=headers) as reply:
                stored = decode(await read_bounded(reply, MAX_JSON_BYTES), decoder_of(FileWritten)).bytes
            if stored != sent.bytes:
                raise PlatformError("short_write", f"{path!r}: {sent.bytes} bytes were sent and {stored} were stored")
            return stored

        return await self._transport.repeat(once, repeatable=repeatable and replayable)

    async def _download_file(self, path: str | bytes, local: Path, max_bytes: int) -> None:
        await asyncio.to_thread(local.parent.mkdir, parents=True, exist_ok=True)
        partial = local.with_name(f".{local.name}.dsec-partial-{os.getpid()}")
        size = 0
        try:
            with partial.open("xb") as out:
                async for chunk in self.read_stream(path):
                    size += len(chunk)
                    if size > max_bytes:
                        raise UsageError("file_too_large", f"{path!r} is over {max_bytes} bytes", field="max_bytes")
                    await asyncio.to_thread(out.write, chunk)
            partial.replace(local)
        finally:
            partial.unlink(missing_ok=True)

    def _read_url(self, path: str | bytes, offset: int, length: int | None) -> str:
        if offset < 0 or (length is not None and length < 0):
            raise UsageError(
                "bad_range", "offset and length are not negative", field="offset" if offset < 0 else "length"
            )
        url = f"{self._base}?path={_quoted(path)}&offset={offset}"
        return url if length is None else f"{url}&length={length}"


class _Counted:
    """How many bytes of a body went out."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


async def _body_of(data: Any, sent: _Counted) -> tuple[Any, dict[str, str]]:
    """A request body for aiohttp, and headers. Small ones go whole, large ones in pieces."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        raw = bytes(data)
        if len(raw) <= _WHOLE_BODY_BYTES:
            sent.bytes = len(raw)
            return raw, {}
        return _pieces_of_bytes(raw, sent), {"Content-Length": str(len(raw))}
    if isinstance(data, Path):
        return _pieces_of_path(data, sent), {}
    if hasattr(data, "read"):
        return _pieces_of_file(data, sent), {}
    if hasattr(data, "__aiter__"):
        return _pieces_of_stream(data, sent), {}
    raise UsageError(
        "bad_data", f"can't write a {type(data).__name__}", field="data", hint="give bytes, text, a Path or a file"
    )


async def _pieces_of_bytes(raw: bytes, sent: _Counted) -> AsyncIterator[bytes]:
    for first in range(0, len(raw), CHUNK_BYTES):
        piece = raw[first : first + CHUNK_BYTES]
        sent.bytes += len(piece)
        yield piece


async def _pieces_of_path(path: Path, sent: _Counted) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(path.open, "rb") as file:
        async for piece in _pieces_of_file(file, sent):
            yield piece


async def _pieces_of_file(file: _Readable, sent: _Counted) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
        if not isinstance(piece, bytes):
            raise UsageError("text_file", "the open file gives text", field="data", hint='open it in mode "rb"')
        sent.bytes += len(piece)
        yield piece


async def _pieces_of_stream(stream: AsyncIterable[bytes], sent: _Counted) -> AsyncIterator[bytes]:
    async for piece in stream:
        sent.bytes += len(piece)
        yield piece


def _check_length(path: str | bytes, got: int, size: str | None, offset: int, length: int | None) -> None:
    """X-Dsec-Size is the file's whole size when it was opened; a shorter body is a cut, not a result."""
    if size is None or not size.isdecimal():
        return
    due = max(0, int(size) - offset)
    due = due if length is None else min(due, length)
    if got < due:
        raise PlatformError("short_read", f"{path!r}: {got} of {due} bytes came", retry_after_s=0.5)


def _raw(path: str | bytes) -> bytes:
    raw = path if isinstance(path, bytes) else os.fsencode(path)
    if not raw or b"\0" in raw:
        raise UsageError(
            "bad_path", f"{path!r} can't be a path", field="path", hint="paths are not empty and hold no NUL"
        )
    return raw


def _quoted(path: str | bytes) -> str:
    return quote_from_bytes(_raw(path), safe="/")


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _path_fields(path: str | bytes) -> dict[str, Any]:
    raw = _raw(path)
    return {"path": raw.decode()} if _is_utf8(raw) else {"path": raw.decode("utf-8", "replace"), "raw_path": raw}


def _exact(entry: FileStat) -> FileStat:
    """Names of any bytes, as os.fsdecode shows them."""
    if entry.raw:
        entry.name = entry.raw.decode("utf-8", "surrogateescape")
    if entry.raw_link:
        entry.link = entry.raw_link.decode("utf-8", "surrogateescape")
    return entry


def _event(raw: str) -> WatchEvent:
    try:
        event: WatchEvent = msgspec.json.decode(raw, type=WatchEvent)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ProtocolError("bad_event", f"the server sent an event that can't be read: {error}") from error
    if event.raw:
        event.path = event.raw.decode("utf-8", "surrogateescape")
    return event
