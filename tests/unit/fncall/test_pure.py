"""Languages, verdicts and checkers: the parts of judging that need no kernel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libdsec.errors import UsageError
from libdsec.wire_fncall import VERDICTS, Checker, FnLimits

from nomad_dsec.backends.fncall.checkers import check
from nomad_dsec.backends.fncall.languages import TABLE, find_language, render
from nomad_dsec.backends.fncall.verdicts import Facts, judge

LIMITS = FnLimits(cpu_s=1, wall_s=2, memory_mib=64)


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({}, "accepted"),
        ({"exit_code": 255}, "runtime_error"),
        ({"exit_code": None, "signal": 11}, "runtime_error"),
        ({"exit_code": None, "signal": 9}, "runtime_error"),
        ({"exit_code": None, "signal": 9, "oom": True}, "memory_limit"),
        ({"exit_code": 0, "oom": True}, "memory_limit"),
        ({"exit_code": None, "signal": 9, "wall_expired": True, "thrashed": True}, "memory_limit"),
        ({"exit_code": None, "signal": 24}, "cpu_time_limit"),
        ({"exit_code": None, "signal": 9, "cpu_expired": True}, "cpu_time_limit"),
        ({"cpu_s": 1.2}, "cpu_time_limit"),
        ({"exit_code": None, "signal": 9, "wall_expired": True}, "wall_time_limit"),
        ({"output_over": True}, "output_limit"),
        ({"exit_code": None}, "internal_error"),
        ({"lost": "the lane died"}, "internal_error"),
    ],
)
def test_verdicts(facts: dict, verdict: str) -> None:
    given_facts = {"exit_code": 0, "signal": None, "cpu_s": 0.1, "wall_s": 0.2} | facts
    got, message = judge(Facts(**given_facts), LIMITS)
    assert got == verdict
    assert got in VERDICTS
    assert bool(message) == (verdict != "accepted")


@pytest.mark.parametrize(
    ("kind", "output", "expected", "right"),
    [
        ("exact", b"1\n", b"1\n", True),
        ("exact", b"1", b"1\n", False),
        ("tokens", b"1  2\r\n", b"1 2", True),
        ("tokens", b"12", b"1 2", False),
        ("tokens", b"1 2 3", b"1 2", False),
        ("tokens", b"", b"", True),
        ("tokens", b"\xff", b"\xff", True),
        ("float", b"0.3333333333", b"0.3333333334", True),
        ("float", b"0.33", b"0.34", False),
        ("float", b"1e0 yes", b"1.0 yes", True),
        ("float", b"nan", b"1", False),
        ("float", b"inf", b"1e308", False),
        ("float", b"1_0", b"10", False),
        ("float", b"1", b"1 2", False),
        ("float", b"9" * 5000, b"1", False),
    ],
)
def test_checkers(kind: str, output: bytes, expected: bytes, right: bool) -> None:
    got, where = check(Checker(kind=kind), output, expected)
    assert got is right
    assert bool(where) is not right


@given(st.binary(max_size=200))
def test_output_equals_itself_by_every_checker(data: bytes) -> None:
    for kind in ("exact", "tokens", "float"):
        assert check(Checker(kind=kind), data, data) == (True, "")


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_float_accepts_all_that_tokens_does(a: bytes, b: bytes) -> None:
    if check(Checker(kind="tokens"), a, b)[0]:
        assert check(Checker(kind="float"), a, b)[0]


def test_languages() -> None:
    assert find_language("C++").name == "cpp"
    assert find_language("Python3").name == "python"
    with pytest.raises(UsageError) as caught:
        find_language("cobol")
    assert caught.value.field == "language"
    names = [name for row in TABLE for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))
    for row in TABLE:
        assert not any("{" in word for word in (*render(row.run, row), *render(row.compile, row)))
        assert bool(row.compile) == bool(row.artefacts)
    assert render(("a{source}", "{x}", "{binary}"), find_language("c")) == ("amain.c", "{x}", "main.bin")
