"""The table of what was skipped and why; compared with tests/skips.txt, so that no coverage is lost unseen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

LISTED = Path(__file__).parents[1] / "skips.txt"


@dataclass
class SkipTable:
    """Rows are (file, ability) -> how many tests; `other` are skips by any other way, which are never allowed."""

    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    marked: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)

    def render(self) -> list[str]:
        """Lines for people."""
        width = max((len(file) for file, _ in self.skipped), default=0)
        rows = [
            f"{file:<{width}}  {count:>3}  {name}: {self.reasons[name]}"
            for (file, name), count in sorted(self.skipped.items())
        ]
        return rows + [f"not by an ability: {line}" for line in self.other]

    def losses(self, listed: Counter[tuple[str, str]], *, files: set[str]) -> list[str]:
        """What differs from the list in a way that loses coverage; only files of this run are judged."""
        found = [f"skipped without an ability: {line}" for line in self.other]
        for row, count in sorted(self.skipped.items()):
            if count > listed[row]:
                found.append(
                    f"{row[0]} skips {count} for {row[1]} ({self.reasons[row[1]]}); the list allows {listed[row]}"
                )
        for row, count in sorted(listed.items()):
            if row[0] in files and self.marked[row] < count:
                found.append(
                    f"the list has {count} tests of {row[0]} that need {row[1]}; only {self.marked[row]} exist"
                )
        return found


def parse_list(text: str) -> Counter[tuple[str, str]]:
    """Lines `file ability count`; # starts a comment."""
    rows: Counter[tuple[str, str]] = Counter()
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words:
            file, name, count = words
            rows[file, name] = int(count)
    return rows
