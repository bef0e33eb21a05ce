"""AsyncSandboxGroup: the sandboxes of one create_many, and their common end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self, overload

from libdsec.errors import DsecError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from libdsec.sandbox import AsyncSandbox


class AsyncSandboxGroup(Sequence["AsyncSandbox"]):
    """The sandboxes of one create_many; a sequence, and an async context manager that kills all of them.

    failures: the errors of members that could not be made; empty for all_or_none.
    """

    def __init__(self, sandboxes: Sequence[AsyncSandbox], failures: Sequence[DsecError]) -> None:
        self._sandboxes = tuple(sandboxes)
        self.failures = tuple(failures)

    @overload
    def __getitem__(self, index: int) -> AsyncSandbox: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[AsyncSandbox]: ...
    def __getitem__(self, index: int | slice) -> AsyncSandbox | Sequence[AsyncSandbox]:
        return self._sandboxes[index]

    def __len__(self) -> int:
        return len(self._sandboxes)

    def __iter__(self) -> Iterator[AsyncSandbox]:
        return iter(self._sandboxes)

    async def kill(self) -> None:
        """End all of them."""
        await end_all(self._sandboxes, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await end_all(self._sandboxes, error)


async def end_all(sandboxes: Sequence[AsyncSandbox], first: BaseException | None) -> None:
    """Kill all; a failure of that is raised only when it hides no earlier error."""
    outcomes = await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes), return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    failed = [error for error in failed if not (isinstance(error, DsecError) and error.kind == "not_found")]
    if not failed:
        return
    if first is None:
        raise failed[0]
    first.add_note(f"libdsec: {len(failed)} sandbox(es) could not be killed: {failed[0]}")
