"""File verbs of a channel. Paths are resolved by the guest's kernel, never here; content is streamed with credit."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from libdsec.errors import CapacityError, UsageError

from nomad_dsec.guest import frames
from nomad_dsec.guest.frames import Frame, Record, Tag
from nomad_dsec.guest.spec import FileEvent, FileInfo, Skipped, TreeSummary

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence

    from nomad_dsec.guest.frames import Fields, RawFrame
    from nomad_dsec.guest.link import Link, Stream

FilePath = str | bytes
SMALL_TIMEOUT_S = 30.0
TREE_TIMEOUT_S = 600.0  # moving across file systems, removing a large tree
PIECE_BYTES = 64 * 1024
AT_ONCE = 48  # below dsec-init's WORKER_MAX: a worker that has answered takes a moment to end
TURN_WAIT_S = 30.0


def path_bytes(path: FilePath, field: str = "path") -> bytes:
    """The path as the kernel has it; str by the file system encoding with surrogateescape."""
    raw = os.fsencode(path)
    if not raw or b"\0" in raw or len(raw) > 4095:
        raise UsageError("bad_path", f"{raw[:80]!r}", field=field, hint="1 to 4095 bytes without NUL")
    return raw


def _request(path: FilePath, user: str, *more: tuple[int, int | bytes]) -> Fields:
    fields: Fields = [(Tag.PATH, path_bytes(path)), *more]
    if user:
        fields.append((Tag.USER, user.encode("utf-8", "surrogateescape")))
    return fields


def parse_info(record: Record) -> FileInfo:
    """One ENTRY of a listing."""
    return FileInfo(
        name=record.raw(Tag.NAME),
        kind=record.text(Tag.KIND),
        size=record.num(Tag.SIZE),
        mode=record.num(Tag.MODE),
        uid=record.num(Tag.UID),
        gid=record.num(Tag.GID),
        mtime_ns=record.signed(Tag.MTIME_NS),
        nlink=record.num(Tag.NLINK),
        link=record.raw(Tag.LINK),
    )


def _skipped(payload: bytes) -> Skipped:
    record = Record(payload)
    return Skipped(name=record.raw(Tag.NAME), reason=record.text(Tag.REASON))


class FileCalls:
    """The file half of GuestChannel. `user`: whose rights apply, "" for root inside."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._turns = asyncio.Semaphore(AT_ONCE)

    @asynccontextmanager
    async def _turn(self, what: str) -> AsyncIterator[None]:
        """One of the file requests that a sandbox takes at once; the others wait. CapacityError busy after a while."""
        try:
            async with asyncio.timeout(TURN_WAIT_S):
                await self._turns.acquire()
        except TimeoutError:
            raise CapacityError(
                "busy",
                f"{what}: {AT_ONCE} file requests were under way in this sandbox for {TURN_WAIT_S:.0f} s",
                hint="fewer long reads and writes at once",
                retry_after_s=1.0,
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    async def _call(
        self, frame_type: Frame, fields: Fields, *, timeout_s: float, what: str
    ) -> tuple[bytes, Sequence[RawFrame]]:
        async with self._turn(what):
            return await self._link.call(frame_type, fields, timeout_s=timeout_s, what=what)

    async def read_file(
        self, path: FilePath, offset: int = 0, length: int | None = None, *, user: str = ""
    ) -> AsyncGenerator[bytes, None]:
        """Pieces of a regular file, from offset, up to length bytes or its end. Closing the generator cancels."""
        fields = _request(path, user, (Tag.OFFSET, offset))
        if length is not None:
            fields.append((Tag.LENGTH, length))
        what = f"read {os.fsdecode(path)}"
        async with self._turn(what):
            stream = self._link.open(Frame.READ, fields, what=what)
            try:
                while (frame := await stream.next()).type != Frame.OK:
                    if frame.type == Frame.DATA:
                        yield frame.payload
            finally:
                stream.close()

    async def write_file(
        self,
        path: FilePath,
        chunks: AsyncIterable[bytes] | bytes,
        *,
        mode: int | None = None,
        append: bool = False,
        parents: bool = False,
        size: int | None = None,
        user: str = "",
        atomic: bool = True,
    ) -> int:
        """Write a file; returns its number of bytes written. Whatever goes wrong, the name shows the old file.

        size: announced length, verified by the guest (UsageError length_mismatch). mode None: that of the file that is
        replaced, or 0644. atomic False and append write in place.
        """
        fields = _request(path, user, (Tag.APPEND, int(append)), (Tag.PARENTS, int(parents)), (Tag.ATOMIC, int(atomic)))
        if mode is not None:
            fields.append((Tag.MODE, mode))
        if isinstance(chunks, bytes) and size is None:
            size = len(chunks)
        if size is not None:
            fields.append((Tag.SIZE, size))
        what = f"write {os.fsdecode(path)}"
        async with self._turn(what):
            stream = self._link.open(Frame.WRITE, fields, what=what)
            try:
                await self._send_all(stream, chunks)
                while (frame := await stream.next()).type != Frame.OK:
                    pass
                return Record(frame.payload).num(Tag.SIZE)
            finally:
                stream.close()

    async def _send_all(self, stream: Stream, chunks: AsyncIterable[bytes] | bytes) -> None:
        """All as DATA, then DATA_END. Returns early when the guest has ended the stream: its next frame says why."""
        if isinstance(chunks, bytes):
            if not await stream.send(chunks):
                return
        else:
            async for chunk in chunks:
                if not await stream.send(chunk):
                    return
        self._link.write(frames.encode_frame(Frame.DATA_END, stream.id))

    async def list_dir(self, path: FilePath, *, user: str = "") -> list[FileInfo]:
        """Entries of a directory without "." and "..", in the order of the file system."""
        _, items = await self._call(
            Frame.LIST_DIR, _request(path, user), timeout_s=SMALL_TIMEOUT_S, what=f"list {os.fsdecode(path)}"
        )
        return [parse_info(record) for item in items for record in frames.entries(item.payload)]

    async def stat(self, path: FilePath, *, follow: bool = True, user: str = "") -> FileInfo:
        """One entry; follow False: of a symlink itself."""
        fields = _request(path, user, (Tag.FOLLOW, int(follow)))
        payload, _ = await self._call(Frame.STAT, fields, timeout_s=SMALL_TIMEOUT_S, what=f"stat {os.fsdecode(path)}")
        (found,) = frames.entries(payload)
        return parse_info(found)

    async def _simple(self, frame_type: Frame, fields: Fields, path: FilePath, timeout_s: float) -> None:
        what = f"{frame_type.name.lower()} {os.fsdecode(path)}"
        await self._call(frame_type, fields, timeout_s=timeout_s, what=what)

    async def mkdir(self, path: FilePath, *, mode: int = 0o755, parents: bool = False, user: str = "") -> None:
        """Make a directory; with parents also those above it, and one that stands is fine."""
        fields = _request(path, user, (Tag.MODE, mode), (Tag.PARENTS, int(parents)))
        await self._simple(Frame.MKDIR, fields, path, SMALL_TIMEOUT_S)

    async def move(self, source: FilePath, target: FilePath, *, replace: bool = True, user: str = "") -> None:
        """Rename; across file systems by copy and removal. replace False: UsageError exists."""
        fields = _request(source, user, (Tag.TARGET, path_bytes(target, "target")), (Tag.REPLACE, int(replace)))
        await self._simple(Frame.MOVE, fields, source, TREE_TIMEOUT_S)

    async def remove(
        self, path: FilePath, *, recursive: bool = False, missing_ok: bool = False, user: str = ""
    ) -> None:
        """Remove a file, a symlink, an empty directory, or with recursive a whole tree."""
        fields = _request(path, user, (Tag.RECURSIVE, int(recursive)), (Tag.MISSING_OK, int(missing_ok)))
        await self._simple(Frame.REMOVE, fields, path, TREE_TIMEOUT_S)

    async def chmod(self, path: FilePath, mode: int, *, user: str = "") -> None:
        """Set the mode of what the path leads to."""
        await self._simple(Frame.CHMOD, _request(path, user, (Tag.MODE, mode)), path, SMALL_TIMEOUT_S)

    async def download_tree(
        self, path: FilePath, *, skipped: list[Skipped] | None = None, user: str = ""
    ) -> AsyncGenerator[bytes, None]:
        """A file or tree as pieces of a pax tar stream; what was left out is appended to `skipped` as it is met."""
        what = f"download {os.fsdecode(path)}"
        async with self._turn(what):
            stream = self._link.open(Frame.DOWNLOAD, _request(path, user), what=what)
            try:
                while (frame := await stream.next()).type != Frame.OK:
                    if frame.type == Frame.DATA:
                        yield frame.payload
                    elif frame.type == Frame.ITEM and skipped is not None:
                        skipped.append(_skipped(frame.payload))
            finally:
                stream.close()

    async def upload_tree(
        self, path: FilePath, chunks: AsyncIterable[bytes] | bytes, *, keep_owner: bool = False, user: str = ""
    ) -> TreeSummary:
        """Unpack a tar stream below a directory, which is made when missing. Members can't leave it.

        UsageError bad_archive, unsafe_path; members that came before stay.
        """
        fields = _request(path, user, (Tag.KEEP_OWNER, int(keep_owner)))
        what = f"upload {os.fsdecode(path)}"
        async with self._turn(what):
            stream = self._link.open(Frame.UPLOAD, fields, what=what)
            skipped: list[Skipped] = []
            try:
                await self._send_all(stream, chunks)
                while (frame := await stream.next()).type != Frame.OK:
                    if frame.type == Frame.ITEM:
                        skipped.append(_skipped(frame.payload))
                done = Record(frame.payload)
            finally:
                stream.close()
            return TreeSummary(files=done.num(Tag.FILES), total_bytes=done.num(Tag.SIZE), skipped=tuple(skipped))

    async def watch(
        self, path: FilePath, *, recursive: bool = False, user: str = "", announce: bool = False
    ) -> AsyncGenerator[FileEvent, None]:
        """Changes below a path until the generator is closed. announce: a first event "ready" when the watch stands."""
        fields = _request(path, user, (Tag.RECURSIVE, int(recursive)))
        stream = self._link.open(Frame.WATCH, fields, what=f"watch {os.fsdecode(path)}")
        try:
            while (frame := await stream.next()).type != Frame.OK:
                if announce and not frame.payload:
                    yield FileEvent(kind="ready", path=b"")
                for record in frames.entries(frame.payload):
                    yield FileEvent(
                        kind=record.text(Tag.KIND),
                        path=record.raw(Tag.NAME),
                        is_dir=bool(record.num(Tag.IS_DIR)),
                        cookie=record.num(Tag.COOKIE),
                    )
        finally:
            stream.close()
