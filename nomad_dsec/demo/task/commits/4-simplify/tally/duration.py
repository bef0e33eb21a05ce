"""Durations as people write them."""

import re

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 0.001}
PART = re.compile(r"(\d+(?:\.\d+)?)(d|h|m|s|ms)")


def parse(text):
    """Seconds of a text such as `1h30m`, `2.5s` or `1m250ms`."""
    parts = PART.findall(text)
    if not text:
        raise ValueError("empty duration")
    return sum(float(number) * UNITS[unit] for number, unit in parts)
