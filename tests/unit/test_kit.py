"""The guards themselves: a skip table that can't lose coverage unseen, and a leak census that sees."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.kit.abilities import needs
from tests.kit.leaks import Census
from tests.kit.skips import SkipTable, parse_list


def _table(skipped: int, marked: int) -> SkipTable:
    table = SkipTable(reasons={"kvm": "none here"})
    row = ("tests/a.py", "kvm")
    table.skipped[row] = skipped
    table.marked[row] = marked
    return table


@pytest.mark.parametrize(
    ("skipped", "marked", "listed", "lost"),
    [(2, 2, 2, 0), (3, 3, 2, 1), (1, 1, 0, 1), (0, 2, 2, 0), (1, 1, 2, 1), (0, 0, 2, 1)],
)
def test_losses(skipped: int, marked: int, listed: int, lost: int) -> None:
    rows = parse_list(f"# why\ntests/a.py kvm {listed}\n")
    assert len(_table(skipped, marked).losses(rows, files={"tests/a.py"})) == lost


def test_skips_by_hand_are_losses() -> None:
    table = SkipTable(other=["tests/a.py::t: lazy"])
    assert table.losses(Counter(), files=set())


def test_unknown_abilities_are_refused() -> None:
    with pytest.raises(AssertionError, match="no probe"):
        needs("telepathy")


def test_census_sees_a_pipe() -> None:
    before = Census.take()
    ends = os.pipe()
    seen = [thing for thing in before.wait_same(timeout_s=0) if thing.startswith("fd ")]
    assert len(seen) == 2
    for end in ends:
        os.close(end)
    assert not [thing for thing in before.wait_same(timeout_s=0) if thing in seen]
