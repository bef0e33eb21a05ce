"""A memory file that outlives workers: the heartbeat, which files the kernel has open, and backing ids.

A worker may be killed between any two of these writes. Each record is one 8-byte store that makes it count, written
last; and a record is named by its request, so that a request that is resent writes the same one.
"""

from __future__ import annotations

import mmap
import os
import time
from struct import Struct

_WORD = Struct("=Q")
_PAIR = Struct("=QQ")  # key (0: free), value
_BEAT, _DEATHS = 0, 8
_OPENS_AT, OPENS = 4096, 16384
_BACKINGS_AT, BACKINGS = _OPENS_AT + OPENS * _PAIR.size, 4096
_SIZE = _BACKINGS_AT + BACKINGS * _PAIR.size


class _Slots:
    """A map of numbers in a part of the file, with its copy in memory."""

    def __init__(self, memory: mmap.mmap, at: int, count: int) -> None:
        self._memory = memory
        self._at = at
        self.values: dict[int, int] = {}
        self._slot_of: dict[int, int] = {}
        self._free: list[int] = []
        table = memory[at : at + count * _PAIR.size]
        for slot, (key, value) in enumerate(_PAIR.iter_unpack(table)):
            if key:
                self.values[key] = value
                self._slot_of[key] = slot
            else:
                self._free.append(slot)
        self._free.reverse()

    def put(self, key: int, value: int) -> bool:
        """False when there is no room."""
        slot = self._slot_of.get(key)
        if slot is None:
            if not self._free:
                return False
            slot = self._free.pop()
        place = self._at + slot * _PAIR.size
        _WORD.pack_into(self._memory, place + 8, value)
        _WORD.pack_into(self._memory, place, key)
        self._slot_of[key] = slot
        self.values[key] = value
        return True

    def remove(self, key: int) -> int | None:
        """The value it had."""
        slot = self._slot_of.pop(key, None)
        if slot is None:
            return None
        _WORD.pack_into(self._memory, self._at + slot * _PAIR.size, 0)
        self._free.append(slot)
        return self.values.pop(key)


class SharedState:
    """Mapped by the supervisor and by each worker; only the worker writes the slots, one thread at a time."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _SIZE)
        self.opens = _Slots(self._memory, _OPENS_AT, OPENS)  # file handle -> nodeid << 1 | passthrough
        self.backings = _Slots(self._memory, _BACKINGS_AT, BACKINGS)  # nodeid -> backing id

    @classmethod
    def create(cls) -> SharedState:
        """A new one, all zeros."""
        fd = os.memfd_create("dsec-blobd", os.MFD_CLOEXEC)
        os.ftruncate(fd, _SIZE)
        return cls(fd)

    def reread(self) -> None:
        """See what the last worker wrote."""
        self.opens = _Slots(self._memory, _OPENS_AT, OPENS)
        self.backings = _Slots(self._memory, _BACKINGS_AT, BACKINGS)

    def clear(self) -> None:
        """Forget the files of a connection that is gone."""
        self._memory[_OPENS_AT:_SIZE] = bytes(_SIZE - _OPENS_AT)
        self.reread()

    def beat(self) -> None:
        """The worker lives."""
        _WORD.pack_into(self._memory, _BEAT, time.monotonic_ns())

    def silent_s(self) -> float:
        """How long ago the last beat was."""
        (at,) = _WORD.unpack_from(self._memory, _BEAT)
        return (time.monotonic_ns() - int(at)) / 1e9

    @property
    def deaths(self) -> int:
        """Workers that ended without being asked to."""
        return int(_WORD.unpack_from(self._memory, _DEATHS)[0])

    def count_death(self) -> None:
        """One more."""
        _WORD.pack_into(self._memory, _DEATHS, self.deaths + 1)
