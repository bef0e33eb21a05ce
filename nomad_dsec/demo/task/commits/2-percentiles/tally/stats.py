"""Percentiles."""

import math


def percentile(values, share):
    """The nearest-rank percentile: the smallest value with at least `share` percent of all at or below it."""
    if not values:
        raise ValueError("no values")
    if not 0 < share <= 100:
        raise ValueError("share is above 0 and at most 100")
    ordered = sorted(values)
    rank = math.ceil(len(ordered) * share / 100)
    return ordered[rank - 1]
