"""The background event loop under the synchronous twins: one daemon thread, started when used, remade after a fork."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator

T = TypeVar("T")
_STOP_S = 5.0
_lock = threading.Lock()
_running: _Background | None = None


class _Background:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="libdsec-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def stop(self) -> None:
        """Close the connections of the loop and end the thread."""
        if self.pid != os.getpid() or not self._thread.is_alive():
            return
        with suppress(Exception):  # the process is ending: nothing is left to tell it to
            asyncio.run_coroutine_threadsafe(self.loop.shutdown_asyncgens(), self.loop).result(_STOP_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self.loop.close()


def _loop() -> asyncio.AbstractEventLoop:
    """The loop of this process. A forked child starts its own: threads and connections do not survive a fork."""
    global _running
    with _lock:
        if _running is None or _running.pid != os.getpid():
            _running = _Background()
            atexit.register(_running.stop)
        return _running.loop


def stop() -> None:
    """Close the default client's connections and end the background thread; a later call starts another."""
    global _running
    with _lock:
        background, _running = _running, None
    if background is not None:
        atexit.unregister(background.stop)
        background.stop()


def _forked() -> None:
    global _lock, _running
    _lock = threading.Lock()  # another thread may have held it at the fork
    _running = None


os.register_at_fork(after_in_child=_forked)


def call(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop and wait for it; Ctrl-C cancels it first."""
    future = asyncio.run_coroutine_threadsafe(work, _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _next(source: AsyncIterator[T], end: object) -> T | object:
    return await anext(source, end)


async def _close(source: Any) -> None:
    close = getattr(source, "aclose", None)
    if close is not None:
        await close()


def iterate(source: AsyncIterator[T]) -> Iterator[T]:
    """An async iterator as a plain one; closing it closes the source."""
    end = object()
    try:
        while (item := call(_next(source, end))) is not end:
            yield item  # type: ignore[misc]
    finally:
        call(_close(source))
