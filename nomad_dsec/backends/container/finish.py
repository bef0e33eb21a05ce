"""Work that is finished although whoever asked for it has been cancelled: undoing, and waits that guard reuse."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

_T = TypeVar("_T")


async def finish(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which must be bounded in time; a cancellation meanwhile is raised once it is done."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:  # noqa: BLE001 - read again below, where it is raised or gives way to a cancellation
            break
    if cancelled is not None:
        with contextlib.suppress(Exception):
            task.result()
        raise cancelled
    return task.result()
