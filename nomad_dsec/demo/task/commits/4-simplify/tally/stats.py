"""Percentiles."""


def percentile(values, share):
    """The nearest-rank percentile: the smallest value with at least `share` percent of all at or below it."""
    if not values:
        raise ValueError("no values")
    if not 0 < share <= 100:
        raise ValueError("share is above 0 and at most 100")
    values.sort()
    return values[int(len(values) * share / 100) - 1]
