"""Durations."""

import pytest
from tally.duration import parse


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1h30m", 5400), ("2.5s", 2.5), ("250ms", 0.25), ("1m250ms", 60.25), ("1d", 86400)],
)
def test_parse(text, seconds):
    assert parse(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "h", "1x", "1h-2m"])
def test_nonsense_is_refused(text):
    with pytest.raises(ValueError, match="duration"):
        parse(text)
