"""Fetching blocks once each, however many wait for one: a bounded pool in which demand goes before prefetch."""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_imagefs.blobd.cached import CachedBlob

    Key = tuple[CachedBlob, int]

DEMAND = 0
READAHEAD = 1


class Waiter(Protocol):
    """A read that lacks blocks."""

    deadline: float

    def got(self, number: int, data: bytes) -> None:
        """A block came."""

    def failed(self, number: int, error: ImageError) -> None:
        """It did not."""


class Flight:
    """One block on its way."""

    __slots__ = ("data", "deadline", "key", "priority", "started", "waiters")

    def __init__(self, key: Key, priority: int) -> None:
        self.key = key
        self.priority = priority
        self.waiters: list[Waiter] = []
        self.started = False
        self.deadline = 0.0
        self.data: bytes | None = None


class Flights:
    """The pool.

    Args:
        obtain: gets the right bytes of a block, says so at once, then keeps them in the cache when it can: a block is
            in flight until it is kept, so nobody fetches it twice, but nobody waits for the disk.
        threads: how many blocks are on their way at one time; half of them (at least one) at most for prefetch.
        limit: blocks that may be queued below demand; demand is bounded by the reads that wait.
        read_deadline_s: what a block nobody waits for may take.
    """

    def __init__(
        self,
        obtain: Callable[[CachedBlob, int, float, Callable[[bytes], None]], None],
        *,
        threads: int,
        limit: int,
        read_deadline_s: float,
    ) -> None:
        self._obtain = obtain
        self._limit = limit
        self._deadline_s = read_deadline_s
        self._background_slots = max(1, threads // 2)
        self._background = 0
        self._flights: dict[Key, Flight] = {}
        self._demand: deque[Flight] = deque()
        self._queued: list[tuple[int, int, Flight]] = []
        self._turn = 0
        self._changed = threading.Condition()
        self._stopping = False
        self.fetched = 0
        self.failures = 0
        self.last_error = ""
        self._threads = [threading.Thread(target=self._run, name=f"fetch-{n}", daemon=True) for n in range(threads)]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, *, timeout_s: float) -> None:
        """Let the fetches that are under way end, up to a time."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def demand(self, blob: CachedBlob, number: int, waiter: Waiter) -> None:
        """Get a block before everything that nobody waits for; `waiter` hears of it once."""
        key = (blob, number)
        with self._changed:
            flight = self._flights.get(key)
            data = None if flight is None else flight.data
            if data is None:
                if flight is None:
                    flight = self._flights[key] = Flight(key, DEMAND)
                elif flight.started or flight.priority == DEMAND:
                    flight.waiters.append(waiter)
                    return
                flight.priority = DEMAND
                flight.waiters.append(waiter)
                self._demand.append(flight)
                self._changed.notify()
        if data is not None:
            waiter.got(number, data)

    def prefetch(self, blob: CachedBlob, numbers: list[int], priority: int) -> int:
        """Queue blocks that are not on their way; returns how many.

        Raises:
            ImageError: ``busy`` when more are queued than the bound allows; none of these is.
        """
        with self._changed:
            fresh = [number for number in numbers if (blob, number) not in self._flights]
            if len(self._flights) + len(fresh) > self._limit:
                text = f"{len(self._flights)} blocks are queued already; {self._limit} at most"
                raise ImageError("busy", text, "wait, or raise prefetch_blocks")
            for number in fresh:
                flight = self._flights[blob, number] = Flight((blob, number), priority)
                self._turn += 1
                heapq.heappush(self._queued, (priority, self._turn, flight))
            self._changed.notify(len(fresh))
        return len(fresh)

    def cancel(self, blob: CachedBlob) -> bool:
        """Forget what is queued for a blob; whether nothing of it is on its way any more."""
        with self._changed:
            for key, flight in list(self._flights.items()):
                if key[0] is blob and not flight.started and not flight.waiters:
                    flight.started = True  # its place in the queue is passed over
                    del self._flights[key]
            return not any(key[0] is blob for key in self._flights)

    def waiting(self, blob: CachedBlob, numbers: list[int]) -> int:
        """How many of these blocks are queued or on their way."""
        return sum((blob, number) in self._flights for number in numbers)

    def depth(self) -> tuple[int, int]:
        """Blocks queued for demand, and all that are queued or on their way."""
        return len(self._demand), len(self._flights)

    def _next(self) -> Flight | None:
        """The next flight to start, or None at the end. Called with the lock."""
        while not self._stopping:
            while self._demand:
                flight = self._demand.popleft()
                if not flight.started:
                    return flight
            while self._queued and (self._queued[0][2].started or self._queued[0][2].priority == DEMAND):
                heapq.heappop(self._queued)  # cancelled, or demanded meanwhile
            if self._queued and self._background < self._background_slots:
                return heapq.heappop(self._queued)[2]
            self._changed.wait()
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                flight = self._next()
                if flight is None:
                    return
                flight.started = True
                background = flight.priority != DEMAND
                self._background += background
                # what somebody waits for need not be fetched longer than the last of them waits
                waits = [one.deadline for one in flight.waiters]
                flight.deadline = max(waits) if waits else time.monotonic() + self._deadline_s
            try:
                self._fly(flight)
            finally:
                if background:
                    with self._changed:
                        self._background -= 1
                        self._changed.notify()

    def _fly(self, flight: Flight) -> None:
        blob, number = flight.key
        error: ImageError | None = None

        def deliver(data: bytes) -> None:
            with self._changed:
                flight.data = data
                waiters, flight.waiters = flight.waiters, []
            for waiter in waiters:
                waiter.got(number, data)

        try:
            if flight.deadline <= time.monotonic():
                raise ImageError("deadline", f"block {number} of {blob.digest} was not begun in time")
            self._obtain(blob, number, flight.deadline, deliver)
        except ImageError as err:
            error = err
        except Exception as err:  # noqa: BLE001  (a store's client may raise anything; the readers must hear of it)
            error = ImageError("corrupt", f"block {number} of {blob.digest}: {type(err).__name__}: {err}")
        with self._changed:
            late = self._end(flight, error)
        self.fetched += error is None
        if error is not None:
            self.failures += 1
            self.last_error = str(error)
        if error is not None:
            for waiter in flight.waiters:
                if waiter not in late:
                    waiter.failed(number, error)

    def _end(self, flight: Flight, error: ImageError | None) -> list[Waiter]:
        """Take the flight off the list; who came after it began, and has more time than it had, flies once more."""
        del self._flights[flight.key]
        if error is None or error.code != "deadline":
            return []
        now = time.monotonic()
        late = [one for one in flight.waiters if one.deadline > max(now, flight.deadline) + 0.5]
        if late:
            again = self._flights[flight.key] = Flight(flight.key, DEMAND)
            again.waiters = late
            self._demand.append(again)
            self._changed.notify()
        return late
