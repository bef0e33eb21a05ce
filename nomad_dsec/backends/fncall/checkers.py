"""Comparing output with what was expected: exact, tokens, floats. Pure, and linear in the sizes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libdsec.wire_fncall import Checker

_MAX_NUMBER = 400  # no double needs more characters; a longer token is compared as text


def check(checker: Checker, output: bytes, expected: bytes) -> tuple[bool, str]:
    """Whether the output is right, and where it first is not. `program` checkers are run elsewhere."""
    if checker.kind == "exact":
        return _exact(output, expected)
    if checker.kind == "tokens":
        return _tokens(output, expected)
    if checker.kind == "float":
        return _floats(output, expected, checker.abs_tol, checker.rel_tol)
    raise ValueError(checker.kind)


def _exact(output: bytes, expected: bytes) -> tuple[bool, str]:
    if output == expected:
        return True, ""
    place = next((i for i, (a, b) in enumerate(zip(output, expected)) if a != b), min(len(output), len(expected)))
    return False, f"differs at byte {place}"


def _tokens(output: bytes, expected: bytes) -> tuple[bool, str]:
    ours, theirs = output.split(), expected.split()
    if ours == theirs:
        return True, ""
    return False, _where(ours, theirs)


def _floats(output: bytes, expected: bytes, abs_tol: float, rel_tol: float) -> tuple[bool, str]:
    ours, theirs = output.split(), expected.split()
    if len(ours) != len(theirs):
        return False, f"{len(ours)} tokens, {len(theirs)} expected"
    for place, (mine, wanted) in enumerate(zip(ours, theirs)):
        if not _same(mine, wanted, abs_tol, rel_tol):
            return False, f"differs at token {place + 1}"
    return True, ""


def _same(mine: bytes, wanted: bytes, abs_tol: float, rel_tol: float) -> bool:
    if mine == wanted:
        return True
    a, b = _number(mine), _number(wanted)
    # NaN is close to nothing, and an infinity only to itself: math.isclose says so
    return a is not None and b is not None and math.isclose(a, b, rel_tol=rel_tol, abs_tol=abs_tol)


def _number(token: bytes) -> float | None:
    if len(token) > _MAX_NUMBER or b"_" in token:
        return None
    try:
        return float(token)
    except ValueError:
        return None


def _where(ours: list[bytes], theirs: list[bytes]) -> str:
    for place, (mine, wanted) in enumerate(zip(ours, theirs)):
        if mine != wanted:
            return f"differs at token {place + 1}"
    return f"{len(ours)} tokens, {len(theirs)} expected"
