"""Spans."""

import pytest
from tally.spans import merge


@pytest.mark.parametrize(
    ("spans", "merged"),
    [
        ([], []),
        ([(1, 2)], [(1, 2)]),
        ([(3, 4), (1, 2)], [(1, 2), (3, 4)]),
        ([(1, 3), (2, 4)], [(1, 4)]),
        ([(1, 2), (2, 3)], [(1, 3)]),
        ([(1, 9), (2, 3)], [(1, 9)]),
        ([(1, 9), (2, 3), (8, 10)], [(1, 10)]),
    ],
)
def test_merge(spans, merged):
    assert merge(spans) == merged
