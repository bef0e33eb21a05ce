"""uid ranges and address pairs: one owner at a time, the longest unused first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libdsec.errors import CapacityError, UsageError

from nomad_dsec.linux.idmap import RANGE_SIZE, UidRange, UidRanges
from nomad_dsec.linux.netns_pool import Addresses


@given(st.lists(st.booleans(), max_size=60))
def test_no_two_owners(steps: list[bool]) -> None:
    ranges = UidRanges(base=RANGE_SIZE, count=8)
    held: list[UidRange] = []
    for take in steps:
        if take and ranges.free:
            new = ranges.take()
            assert new not in held
            held.append(new)
        elif held:
            ranges.release(held.pop(0))
    assert ranges.free + len(held) == 8


def test_longest_unused_first() -> None:
    ranges = UidRanges(base=RANGE_SIZE, count=3)
    first = ranges.take()
    ranges.release(first)
    assert [ranges.take() for _ in range(3)][-1] == first


def test_recovered_ranges_are_not_given_out() -> None:
    ranges = UidRanges(base=RANGE_SIZE, count=2)
    ranges.claim(RANGE_SIZE)
    assert ranges.take().base == 2 * RANGE_SIZE
    with pytest.raises(CapacityError) as full:
        ranges.take()
    assert full.value.code == "uid_ranges"
    with pytest.raises(UsageError):
        ranges.claim(RANGE_SIZE)


def test_release_is_idempotent_and_forgets_foreign_ranges() -> None:
    ranges = UidRanges(base=RANGE_SIZE, count=1)
    ranges.release(UidRange(base=RANGE_SIZE))
    foreign = ranges.claim(99 * RANGE_SIZE)  # from a configuration before this one
    ranges.release(foreign)
    assert ranges.free == 1


@pytest.mark.parametrize(("base", "count"), [(0, 1), (65_535, 1), (RANGE_SIZE, 0), (RANGE_SIZE, 1 << 17)])
def test_bad_base(base: int, count: int) -> None:
    with pytest.raises(UsageError) as bad:
        UidRanges(base=base, count=count)
    assert bad.value.field == "uid_base"


def test_address_pairs_rotate_past_released_ones() -> None:
    addresses = Addresses("198.18.0.0/29", first=1)
    seen = []
    for _ in range(4):
        _, gateway, address = addresses.take()
        seen.append((gateway, address))
        addresses.release(address)
    assert seen == [
        ("198.18.0.2", "198.18.0.3"),
        ("198.18.0.4", "198.18.0.5"),
        ("198.18.0.6", "198.18.0.7"),
        ("198.18.0.0", "198.18.0.1"),
    ]


def test_addresses_in_use_are_skipped_and_run_out() -> None:
    addresses = Addresses("198.18.0.0/30", first=0)
    addresses.claim("198.18.0.1")
    addresses.claim("10.9.9.9")  # recovered from another subnet
    assert addresses.take()[2] == "198.18.0.3"
    with pytest.raises(CapacityError) as none:
        addresses.take()
    assert none.value.code == "net_addresses"
