"""Calls under way by the id that their sender gave them: the same id joins, and a cancel finds it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from libdsec.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


@dataclass(slots=True, eq=False, kw_only=True)
class _Flight:
    task: asyncio.Task[Any]
    waiters: int = 0
    is_cancelled: bool = False


class Flights:
    """`spawn` starts a task that the daemon ends at its own end."""

    def __init__(self, spawn: Callable[[str, Coroutine[Any, Any, Any]], asyncio.Task[Any]]) -> None:
        self._spawn = spawn
        self._flights: dict[tuple[str, str], _Flight] = {}

    async def join(self, namespace: str, call_id: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the call of that id, started if it isn't under way. It ends when its last waiter leaves."""
        key = (namespace, call_id)
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(task=self._spawn(f"fncall {call_id}", work()))
            self._flights[key] = flight
            flight.task.add_done_callback(lambda _: self._flights.pop(key, None))
        flight.waiters += 1
        try:
            result: T = await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if flight.is_cancelled and flight.task.done():
                raise StateError("cancelled", f"call {call_id} was cancelled") from None
            raise
        else:
            return result
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                flight.task.cancel()

    def cancel(self, namespace: str, call_id: str) -> bool:
        """End it, whether it waits or runs. False: nothing of that id is under way."""
        flight = self._flights.get((namespace, call_id))
        if flight is None:
            return False
        flight.is_cancelled = True
        flight.task.cancel()
        return True
