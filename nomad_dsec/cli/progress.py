"""Progress bars on stderr, by rich; silent when stderr is no terminal except for one line a stage."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


def talk() -> Console:
    """A console for words and bars."""
    return Console(stderr=True)


def bars(console: Console | None = None) -> Progress:
    """Bars in the house's look."""
    console = console or talk()
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=28 if console.width >= 110 else 12),
        # The note takes what is left of the line: a long one must not squeeze the titles and bars of all rows.
        TextColumn("{task.fields[note]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        TimeElapsedColumn(),
        console=console,
        transient=False,
        expand=True,
    )


class ImportBars:
    """A bar for each stage of an import: call it as (stage, done, total)."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = bars(console)
        self._quiet = not sys.stderr.isatty()
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if not self._quiet:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._quiet:
            self._progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Move the stage's bar; total 0 means that it is not known."""
        if stage not in self._stages:
            self._stages[stage] = self._progress.add_task(stage, total=total or None, note="")
            if self._quiet:
                print(f"{stage} ...", file=sys.stderr, flush=True)
        note = f"{done:,} / {total:,}" if total else f"{done:,}"
        self._progress.update(self._stages[stage], completed=done, total=total or None, note=note)
