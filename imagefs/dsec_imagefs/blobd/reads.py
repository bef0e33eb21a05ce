"""READ: at once from the local file when its blocks are there, else when they have come or the deadline has."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

from dsec_imagefs.blobd.block_map import TRUSTED
from dsec_imagefs.blobd.flight import READAHEAD
from dsec_imagefs.blobd.fuse_wire import ANSWER_BYTES, MAX_READ_BYTES, OUT_HEADER, answer_error
from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from dsec_imagefs.blobd.cached import CachedBlob
    from dsec_imagefs.blobd.flight import Flights
    from dsec_imagefs.blobd.metrics import Counters
    from dsec_imagefs.blobd.settings import Settings
    from dsec_imagefs.blobd.table import Attached, Node

_RUN = 3  # misses in a row that make a sequential reader
_ZEROS = bytes(MAX_READ_BYTES)
_LOST = (errno.ENOENT, errno.ENODEV, errno.EPERM, errno.EINVAL)  # the reader, or the whole mount, is gone


def send_answer(fd: int, parts: list[bytes | memoryview]) -> None:
    """Answer a request. Nobody may wait any more, or the connection may be aborted: neither is an error."""
    try:
        os.writev(fd, parts)
    except OSError as err:
        if err.errno not in _LOST:
            raise


class Reads:
    """Answers reads. `serve` is called by the request threads, the rest by fetches and the clock."""

    def __init__(self, fd: int, flights: Flights, counters: Counters, settings: Settings) -> None:
        self._fd = fd
        self._flights = flights
        self._counters = counters
        self._settings = settings
        self._pending: OrderedDict[int, PendingRead] = OrderedDict()
        self._room = threading.Condition()
        self._stopping = False

    def serve(self, node: Node, unique: int, offset: int, size: int, buffer: bytearray, view: memoryview) -> None:
        """Answer a read, now or later.

        Args:
            node: the file.
            unique: of the request.
            offset: in bytes.
            size: as asked for; what lies beyond the blob but in a padded file is zeros.
            buffer: of the calling thread, with room for an answer of the largest size.
            view: of the buffer.
        """
        attached = node.attached
        if attached.recorder is not None:
            self._record(attached, offset, size)
        length = min(size, node.size - offset, MAX_READ_BYTES)
        if length <= 0:
            send_answer(self._fd, [OUT_HEADER.pack(ANSWER_BYTES, 0, unique)])
            return
        blob = attached.blob
        if blob is None:
            self._fail(unique)
            return
        data_length = min(length, blob.index.blob_size - offset)
        if data_length <= 0:
            send_answer(self._fd, [OUT_HEADER.pack(ANSWER_BYTES + length, 0, unique), _ZEROS[:length]])
            return
        shift = blob.shift
        first, last = offset >> shift, (offset + data_length - 1) >> shift
        generation = blob.generation
        if blob.states[first] == TRUSTED and (first == last or blob.has(first, last)):
            end = ANSWER_BYTES + data_length
            got = os.preadv(blob.fd, [view[ANSWER_BYTES:end]], offset)
            if got == data_length and blob.generation == generation:
                blob.referenced[first] = blob.referenced[last] = 1
                if data_length < length:
                    view[end : ANSWER_BYTES + length] = _ZEROS[: length - data_length]
                    end = ANSWER_BYTES + length
                OUT_HEADER.pack_into(buffer, 0, end, 0, unique)
                self._counters.reads += 1
                self._counters.read_bytes += data_length
                send_answer(self._fd, [view[:end]])
                if first <= attached.sequence.trigger <= last:
                    self._fetch_ahead(attached, blob)
                return
            self._counters.raced_reads += 1
        self._wait(attached, blob, PendingRead(self, blob, unique, offset, data_length, length - data_length))

    def _record(self, attached: Attached, offset: int, size: int) -> None:
        recorder = attached.recorder
        if recorder is not None:
            recorder.note(offset, size)

    def _wait(self, attached: Attached, blob: CachedBlob, read: PendingRead) -> None:
        read.deadline = time.monotonic() + self._settings.read_deadline_s
        with self._room:
            # The kernel keeps what we do not take: its queue costs us nothing.
            while len(self._pending) >= self._settings.pending_reads and not self._stopping:
                self._room.wait(1.0)
            self._pending[read.unique] = read
        self._counters.waited_reads += 1
        missing = read.numbers()
        for number in missing:
            self._flights.demand(blob, number, read)
        self._missed(attached, blob, missing[0], missing[-1])

    def _missed(self, attached: Attached, blob: CachedBlob, first: int, last: int) -> None:
        """After some misses in a row, fetch ahead."""
        seen = attached.sequence
        if first == seen.last:
            return  # another read of the same block
        seen.run = seen.run + 1 if seen.last + 1 == first else 0
        seen.last = last
        if seen.trigger >= 0 and not seen.trigger <= first <= seen.ahead:
            seen.trigger, seen.window = -1, 1  # somebody else reads, or the sequence ended
        if first == seen.trigger or (seen.run >= _RUN and seen.trigger < 0):
            seen.ahead = max(seen.ahead, last + 1) if seen.trigger >= 0 else last + 1
            self._fetch_ahead(attached, blob)

    def _fetch_ahead(self, attached: Attached, blob: CachedBlob) -> None:
        """Queue the next window; reading its first block queues the one after. Windows double up to the setting."""
        seen, settings = attached.sequence, self._settings
        end = min(seen.ahead + min(seen.window, settings.readahead_blocks), blob.index.count)
        wanted = [number for number in range(seen.ahead, end) if blob.states[number] != TRUSTED]
        seen.trigger = seen.ahead if end > seen.ahead else -1
        seen.ahead, seen.window = end, min(seen.window * 2, settings.readahead_blocks)
        if wanted:
            with suppress(ImageError):  # as much is queued as may be: then there is none ahead
                self._flights.prefetch(blob, wanted, READAHEAD)

    def take(self, unique: int) -> bool:
        """Become the one who answers a waiting read."""
        with self._room:
            if self._pending.pop(unique, None) is None:
                return False
            self._room.notify()
        return True

    def finish(self, unique: int, parts: list[bytes | memoryview]) -> None:
        """Answer a waiting read with data."""
        if self.take(unique):
            length = sum(len(part) for part in parts)
            send_answer(self._fd, [OUT_HEADER.pack(ANSWER_BYTES + length, 0, unique), *parts])

    def give_up(self, unique: int, number: int = errno.EIO) -> bool:
        """Answer a waiting read with an error."""
        if not self.take(unique):
            return False
        self._fail(unique, number)
        return True

    def _fail(self, unique: int, number: int = errno.EIO) -> None:
        self._counters.failed_reads += number == errno.EIO
        send_answer(self._fd, [answer_error(unique, number)])

    def interrupt(self, unique: int) -> None:
        """The reader was interrupted (FUSE_INTERRUPT); a read that does not wait, or not yet, just goes on."""
        if self.give_up(unique, errno.EINTR):
            self._counters.interrupted_reads += 1

    def expire(self, now: float) -> None:
        """Answer EIO to reads whose deadline has come; they are in order of it."""
        while True:
            with self._room:
                oldest = next(iter(self._pending.values()), None)
            if oldest is None or oldest.deadline > now:
                return
            if self.give_up(oldest.unique):
                self._counters.expired_reads += 1

    def stop(self) -> None:
        """Let nobody wait for room any more. What is pending stays with the kernel, for the next worker."""
        with self._room:
            self._stopping = True
            self._room.notify_all()

    def pending(self) -> int:
        """Reads that wait."""
        return len(self._pending)


class PendingRead:
    """A read that lacks blocks. All its blocks are asked for; those that are there come at once."""

    __slots__ = ("_left", "_length", "_lock", "_offset", "_padding", "_parts", "_reads", "blob", "deadline", "unique")

    def __init__(self, reads: Reads, blob: CachedBlob, unique: int, offset: int, length: int, padding: int) -> None:
        self.blob = blob
        self.unique = unique
        self.deadline = 0.0
        self._reads = reads
        self._offset = offset
        self._length = length
        self._padding = padding
        self._lock = threading.Lock()
        numbers = self.numbers()
        self._parts: dict[int, memoryview] = {}
        self._left = len(numbers)

    def numbers(self) -> range:
        """The blocks it needs."""
        shift = self.blob.shift
        return range(self._offset >> shift, ((self._offset + self._length - 1) >> shift) + 1)

    def got(self, number: int, data: bytes) -> None:
        """A block came; the last one answers."""
        start = number << self.blob.shift
        low, high = max(self._offset, start), min(self._offset + self._length, start + len(data))
        with self._lock:
            self._parts[number] = memoryview(data)[low - start : high - start]
            self._left -= 1
            if self._left:
                return
        parts: list[bytes | memoryview] = [self._parts[one] for one in self.numbers()]
        if self._padding:
            parts.append(_ZEROS[: self._padding])
        self._reads.finish(self.unique, parts)

    def failed(self, number: int, error: ImageError) -> None:
        """One block will not come."""
        del number, error
        self._reads.give_up(self.unique)
