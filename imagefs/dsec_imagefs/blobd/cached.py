"""One blob on disk: a sparse file with its map, or a complete file without one. All that may touch its blocks.

Readers are not locked out of anything: they compare `generation` before and after a read, and eviction raises it
between clearing the states and punching the holes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from typing import TYPE_CHECKING

from dsec_imagefs.blobd.block_map import ABSENT, SUSPECT, TRUSTED, MapKey, parse_map, render_map
from dsec_imagefs.durable import sync_directory, write_durably
from dsec_imagefs.errors import ImageError, SyscallError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from dsec_imagefs.blobd.source import FetchBlock
    from dsec_imagefs.layer.index import Index

_libc = ctypes.CDLL(None, use_errno=True)
FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)


def punch(fd: int, offset: int, length: int) -> None:
    """Give blocks of a file back: fallocate(2) with PUNCH_HOLE."""
    flags = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    if _libc.fallocate(fd, flags, ctypes.c_longlong(offset), ctypes.c_longlong(length)):
        raise SyscallError("fallocate", ctypes.get_errno(), "a cached blob")


def _no_source(number: int, deadline: float) -> bytes:
    del deadline
    raise ImageError("not_found", f"block {number} has no source")


class CachedBlob:
    """The file of one blob. States of blocks are read without a lock; they change under it."""

    def __init__(self, path: Path, digest: str, index: Index, boot_id: str) -> None:
        """Open or make the files.

        Raises:
            ImageError: ``corrupt`` when a file without a map has another size.
        """
        self.path = path
        self.map_path = path.with_name(f"{path.name}.map")
        self.index = index
        self.digest = digest
        self.shift = index.block_bytes.bit_length() - 1
        self.referenced = bytearray(index.count)  # set by reads, cleared by the eviction's hand
        self.generation = 0
        self.complete = False
        self.source: FetchBlock = _no_source
        self._boot_id = boot_id
        self._key = MapKey(blob=bytes.fromhex(digest), block_bytes=index.block_bytes, count=index.count)
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()  # one of sync, eviction and completion at a time: they write the map
        self._unsynced: set[int] = set()
        self._evicting: set[int] = set()
        self._synced: set[int] = set()
        self.fd = self._open()
        self.states = self._load()

    def _open(self) -> int:
        if not self.path.exists() or self.map_path.exists():
            if not self.map_path.exists():
                # First the map: a sparse file without one would look complete.
                write_durably(self.map_path, render_map(self._key, self._boot_id, ()))
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.ftruncate(fd, self.index.blob_size)
            return fd
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        size = os.fstat(fd).st_size
        if size != self.index.blob_size:
            os.close(fd)
            text = f"{self.path} has {size} bytes and no map; the blob has {self.index.blob_size}"
            raise ImageError("corrupt", text, "remove the file")
        self.complete = True
        return fd

    def _load(self) -> bytearray:
        if self.complete:
            return bytearray([TRUSTED]) * self.index.count
        try:
            states = parse_map(self.map_path.read_bytes(), self._key, self._boot_id)
        except OSError as err:
            raise SyscallError("read", err.errno or 0, str(self.map_path)) from err
        # Not the suspect ones: the next map has this boot's name, and would vouch for what nobody has hashed.
        self._synced = {number for number, state in enumerate(states) if state == TRUSTED}
        for number in self._numbers_with_data():
            if states[number] == ABSENT:
                states[number] = SUSPECT
        return states

    def _numbers_with_data(self) -> set[int]:
        """Blocks that have data by lseek(2): candidates for a look, no more."""
        found: set[int] = set()
        position = 0
        while position < self.index.blob_size:
            try:
                start = os.lseek(self.fd, position, os.SEEK_DATA)
            except OSError as err:
                if err.errno == errno.ENXIO:
                    break
                raise
            position = os.lseek(self.fd, start, os.SEEK_HOLE)
            found.update(range(start >> self.shift, ((position - 1) >> self.shift) + 1))
        return found

    def close(self) -> None:
        """Close the file, when nobody reads or fetches any more; nothing is synced."""
        with self._sync_lock:
            os.close(self.fd)
            self.fd = -1

    def has(self, first: int, last: int) -> bool:
        """Whether all blocks of a closed range can be read now."""
        states = self.states
        if first == last:
            return states[first] == TRUSTED
        return states.count(TRUSTED, first, last + 1) == last + 1 - first

    def present_bytes(self) -> int:
        """What its blocks take on disk, by count (blocks of zeros too)."""
        present = self.index.count - self.states.count(ABSENT)
        if not present:
            return 0
        last = self.index.count - 1
        short = self.index.block_bytes - self.index.raw_length(last) if self.states[last] != ABSENT else 0
        return (present << self.shift) - short

    def store(self, number: int, data: bytes) -> int | None:
        """Keep a verified block; returns by how many bytes there is more now.

        None when the disk is full or the block is just being evicted: not kept. One thread a block at a time: the
        flight's.
        """
        with self._lock:
            if number in self._evicting:
                return None
            was = self.states[number]
        try:
            if not self.index.is_zero(number):
                self.write(number, data)
        except OSError as err:
            if err.errno not in _FULL:
                raise
            self._forget(number)
            return None
        more = self._note(number, was)
        if more is None:
            self._forget(number)  # it may have been written after the hole was made
        return more

    def write(self, number: int, data: bytes) -> None:
        """Write the bytes of a block, no more."""
        view, offset = memoryview(data), number << self.shift
        while view:
            done = os.pwrite(self.fd, view, offset)
            view, offset = view[done:], offset + done

    def _forget(self, number: int) -> None:
        try:
            punch(self.fd, number << self.shift, self.index.raw_length(number))
        except SyscallError:  # it stays ABSENT, whatever part of it was written
            return

    def _note(self, number: int, was: int) -> int | None:
        """Trust a block that was just written, unless it was there before (`was`) and evicted meanwhile."""
        with self._lock:
            fresh = self.states[number] == ABSENT
            if fresh and was != ABSENT:
                return None
            self.states[number] = TRUSTED
            self._unsynced.add(number)
        return self.index.raw_length(number) if fresh else 0

    def note_shared(self, number: int) -> int | None:
        """Take a block that was just reflinked into place, when its bytes are right; returns as `store`."""
        with self._lock:
            if number in self._evicting:
                return None
            was = self.states[number]
        return self._note(number, was) if self.index.verify(number, self.read(number)) else None

    def read(self, number: int) -> bytes:
        """A block's bytes as they lie on disk, of whatever state; short when the file was cut."""
        return os.pread(self.fd, self.index.raw_length(number), number << self.shift)

    def check(self, number: int) -> tuple[bytes | None, int]:
        """Hash a suspect block: its bytes when they are right; else None, and how many bytes were dropped for it."""
        generation = self.generation
        data = self.read(number)
        right = self.index.verify(number, data)
        with self._lock:
            if self.generation != generation:
                return (data if right else None), 0
            if right:
                if self.states[number] == SUSPECT:
                    self.states[number] = TRUSTED
                    self._unsynced.add(number)
                return data, 0
            dropped = self.index.raw_length(number) if self.states[number] != ABSENT else 0
            self.states[number] = ABSENT
            self._unsynced.discard(number)
        return None, dropped

    def drop(self, numbers: Collection[int]) -> int:
        """Punch out blocks; returns the bytes freed. The map says so before the data goes.

        Raises:
            ImageError: ``in_use`` for a complete file: the kernel may be reading it by itself.
        """
        with self._sync_lock:
            if self.complete:  # looked at under the lock: it may have become so while this waited
                raise ImageError("in_use", f"{self.digest} is complete", "evict it by name")
            with self._lock:
                victims = [number for number in sorted(set(numbers)) if self.states[number] != ABSENT]
                self._turn_absent(victims)
                self._evicting.update(victims)
            freed = 0
            try:
                if self._synced.intersection(victims):
                    self._write_map(self._synced.difference(victims))
                for number in victims:
                    length = self.index.raw_length(number)
                    punch(self.fd, number << self.shift, length)
                    freed += length
            finally:
                with self._lock:
                    self._evicting.clear()
        return freed

    def _turn_absent(self, victims: Collection[int]) -> None:
        for number in victims:
            self.states[number] = ABSENT
        self.generation += 1  # readers that began before this look again
        self._unsynced.difference_update(victims)

    def _write_map(self, present: set[int]) -> None:
        raw = render_map(self._key, self._boot_id, present)
        try:
            fd = os.open(self.map_path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.pwrite(fd, raw, 0) != len(raw):
                    raise SyscallError("pwrite", errno.EIO, str(self.map_path))
                os.ftruncate(fd, len(raw))
            finally:
                os.close(fd)
        except OSError as err:
            raise SyscallError("write", err.errno or 0, str(self.map_path)) from err
        self._synced = present

    def sync(self) -> int:
        """Make new blocks durable and note them; returns how many.

        A failed fdatasync may have lost any page since the last one, and says so once: those blocks become suspect.
        """
        if not self._unsynced or self.complete:
            return 0
        with self._sync_lock:
            if self.fd < 0:
                return 0
            with self._lock:
                fresh = set(self._unsynced)
                self._unsynced.clear()
            try:
                os.fdatasync(self.fd)
            except OSError as err:
                with self._lock:
                    for number in fresh:
                        if self.states[number] == TRUSTED:
                            self.states[number] = SUSPECT
                    self.generation += 1
                raise SyscallError("fdatasync", err.errno or 0, str(self.path)) from err
            with self._lock:
                fresh = {number for number in fresh if self.states[number] == TRUSTED}
            if not fresh <= self._synced:
                self._write_map(self._synced | fresh)
        return len(fresh)

    def is_whole(self) -> bool:
        """Whether every block is there and verified."""
        return self.states.count(TRUSTED) == self.index.count

    def promote(self) -> bool:
        """Become a complete file: all data durable, then no map. Returns whether it is complete now."""
        self.sync()
        with self._sync_lock, self._lock:
            if self.complete:
                return True
            if not self.is_whole() or self._unsynced:
                return False
            os.fsync(self.fd)
            self.map_path.unlink(missing_ok=True)
            sync_directory(self.path.parent)
            self.complete = True
        return True

    def reset(self) -> int:
        """Begin anew with an empty file, in place of a complete one; returns the bytes freed. Nobody has it open.

        The old file goes first, which needs no room; a crash in between leaves no file, so nothing that looks right.
        """
        with self._sync_lock, self._lock:
            freed = self.present_bytes()
            self._turn_absent(range(self.index.count))
            self.path.unlink(missing_ok=True)
            os.ftruncate(self.fd, 0)
            os.ftruncate(self.fd, self.index.blob_size)
            self.complete = False
            self._synced = set()
            write_durably(self.map_path, render_map(self._key, self._boot_id, ()))
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, self.index.blob_size)
                os.dup2(fd, self.fd, inheritable=False)  # the number stays: readers hold it
            finally:
                os.close(fd)
        return freed
