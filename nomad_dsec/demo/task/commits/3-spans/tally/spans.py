"""Spans of time as (begin, end) pairs."""


def merge(spans):
    """The same time as the given spans cover, as ordered spans that neither overlap nor touch."""
    merged = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
