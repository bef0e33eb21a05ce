"""Shares of calls: bounded, and a newcomer is never shut out by who came first."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from libdsec.errors import CapacityError

from nomad_dsec.gateway.shares import Shares


def _fill(shares: Shares, stack: ExitStack, namespace: str, count: int) -> int:
    for taken in range(count):
        try:
            stack.enter_context(shares.hold(namespace, 10))
        except CapacityError as error:
            assert error.code == "busy"
            assert error.retry_after_s
            return taken
    return count


def test_one_namespace_alone_may_have_all():
    shares = Shares(8)
    with ExitStack() as stack:
        assert _fill(shares, stack, "a", 20) == 8
        assert shares.calls == 8
    assert shares.calls == 0
    with shares.hold("a", 1):
        assert shares.calls == 1


def test_a_newcomer_gets_its_share_while_another_holds_everything():
    shares = Shares(8)
    with ExitStack() as first, ExitStack() as second:
        assert _fill(shares, first, "a", 20) == 8
        assert _fill(shares, second, "b", 20) == 4
        assert _fill(shares, first, "a", 1) == 0
        first.close()
        assert _fill(shares, first, "a", 20) == 4, "now it has its half"
    assert shares.calls == 0


def test_bytes_are_bounded_but_one_large_request_always_fits():
    shares = Shares(100, bytes_max=1000)
    with shares.hold("a", 5000), pytest.raises(CapacityError, match="too large together"), shares.hold("b", 1):
        pass
    with shares.hold("a", 600), shares.hold("b", 400), pytest.raises(CapacityError), shares.hold("c", 1):
        pass


def test_an_error_inside_gives_the_place_back():
    shares = Shares(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), shares.hold("a", 1):
            _ = 1 / 0
    assert shares.calls == 0
