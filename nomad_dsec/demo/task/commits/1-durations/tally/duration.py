"""Durations as people write them."""

import re

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 0.001}
PART = re.compile(r"(\d+(?:\.\d+)?)(ms|d|h|m|s)")


def parse(text):
    """Seconds of a text such as `1h30m`, `2.5s` or `1m250ms`."""
    position, seconds = 0, 0.0
    while position < len(text):
        part = PART.match(text, position)
        if part is None:
            raise ValueError(f"not a duration: {text!r}")
        seconds += float(part[1]) * UNITS[part[2]]
        position = part.end()
    if not text:
        raise ValueError("empty duration")
    return seconds
