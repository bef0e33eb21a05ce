"""Percentiles."""

import pytest
from tally.stats import percentile


@pytest.mark.parametrize(
    ("share", "value"),
    [(1, 15), (30, 20), (40, 20), (50, 35), (100, 50)],
)
def test_nearest_rank(share, value):
    assert percentile([35, 20, 15, 50, 40], share) == value


def test_one_value_is_every_percentile():
    assert {percentile([7], share) for share in (1, 50, 99, 100)} == {7}


def test_the_input_is_left_alone():
    values = [3, 1, 2]
    percentile(values, 50)
    assert values == [3, 1, 2]


@pytest.mark.parametrize(("values", "share"), [([], 50), ([1], 0), ([1], 101)])
def test_nonsense_is_refused(values, share):
    with pytest.raises(ValueError, match="values|share"):
        percentile(values, share)
