"""Maps of host directories: what is on disk stays outside the host's own ids, and no two ids meet."""

from __future__ import annotations

from itertools import pairwise

import pytest

from nomad_dsec.backends.container.mount_owners import NOBODY, id_map

BASE = 1_000_000


def to_disk(owners: str, inside: int) -> int | None:
    """The id on disk of what `inside` writes."""
    for line in id_map(owners, BASE).splitlines():
        disk, kernel, count = map(int, line.split())
        if kernel <= BASE + inside < kernel + count:
            return disk + BASE + inside - kernel
    return None


@pytest.mark.parametrize(("inside", "disk"), [(0, NOBODY), (1, BASE + 1), (1000, BASE + 1000), (65_535, BASE + 65_535)])
def test_what_a_task_writes_is_nobodys_or_its_ranges(inside, disk):
    assert to_disk("task", inside) == disk


@pytest.mark.parametrize("inside", [0, 1, 1000, 65_534])
def test_what_is_only_read_keeps_its_ids(inside):
    assert to_disk("host", inside) == inside


@pytest.mark.parametrize("owners", ["task", "host"])
def test_the_kernel_takes_the_lines(owners):
    """user_namespaces(7): ranges of one file may not meet, on either side."""
    rows = [tuple(map(int, line.split())) for line in id_map(owners, BASE).splitlines()]
    for side in (0, 1):
        spans = sorted((row[side], row[side] + row[2]) for row in rows)
        assert all(first[1] <= second[0] for first, second in pairwise(spans))
