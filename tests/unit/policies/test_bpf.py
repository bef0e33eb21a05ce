"""The assembler: labels, long jumps, and refusing what the kernel would refuse."""

import struct

import pytest
from dsec_policies import bpf
from dsec_policies.errors import FilterError
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.cbpf import run


def answer(program: bytes, nr: int) -> int:
    return run(program, nr, arch=0).verdict


def two_way(padding: int, *, true_far: bool) -> bytes:
    """`nr == 7` gives 1, else 2, with the chosen side `padding` instructions away."""
    program = bpf.Assembler()
    program.load(0)
    if true_far:
        program.branch(bpf.JEQ_K, 7, if_true="far")
    else:
        program.branch(bpf.JEQ_K, 7, if_false="far")
    program.give(2 if true_far else 1)
    for _ in range(padding):
        program.give(99)
    program.label("far")
    program.give(1 if true_far else 2)
    return program.assemble()


@pytest.mark.parametrize("true_far", [True, False])
@pytest.mark.parametrize("padding", [0, 253, 254, 255, 256, 257, 3000])
def test_jumps_reach_any_distance(padding: int, true_far: bool) -> None:
    program = two_way(padding, true_far=true_far)
    assert answer(program, 7) == 1
    assert answer(program, 8) == 2


@given(st.lists(st.integers(0, 400), min_size=1, max_size=12), st.data())
def test_chains_of_far_jumps(gaps: list[int], data: st.DataObject) -> None:
    """Rewriting one jump moves the others; each still lands on its own label."""
    program = bpf.Assembler()
    program.load(0)
    for number in range(len(gaps)):
        program.branch(bpf.JEQ_K, number, if_true=f"case{number}")
    program.give(1000)
    for number, gap in enumerate(gaps):
        for _ in range(gap if sum(gaps) < 3500 else 1):
            program.give(9999)
        program.label(f"case{number}")
        program.give(number)
    packed = program.assemble()
    wanted = data.draw(st.integers(0, len(gaps)))
    assert answer(packed, wanted) == (wanted if wanted < len(gaps) else 1000)


def test_both_sides_far() -> None:
    program = bpf.Assembler()
    program.load(0)
    program.branch(bpf.JGE_K, 5, if_true="high", if_false="low")
    for _ in range(300):
        program.give(99)
    program.label("low")
    program.give(1)
    program.label("high")
    program.give(2)
    packed = program.assemble()
    assert [answer(packed, nr) for nr in (4, 5, 6)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("labels", "target", "message"),
    [(["end"], "elsewhere", "not defined"), (["end", "end"], "end", "twice")],
)
def test_bad_labels_are_named(labels: list[str], target: str, message: str) -> None:
    program = bpf.Assembler()
    program.jump(target)
    for label in labels:
        program.label(label)
        program.give(0)
    with pytest.raises(FilterError, match=message):
        program.assemble()


def test_backward_jumps_are_refused() -> None:
    program = bpf.Assembler()
    program.label("start")
    program.load(0)
    program.jump("start")
    with pytest.raises(FilterError, match="behind"):
        program.assemble()


@pytest.mark.parametrize("length", [0, 4097])
def test_the_kernel_s_bounds_on_length(length: int) -> None:
    program = bpf.Assembler()
    for _ in range(length):
        program.give(0)
    with pytest.raises(FilterError, match="4096"):
        program.assemble()


def test_packing_is_struct_sock_filter() -> None:
    program = bpf.Assembler()
    program.give(0x7FFF0000)
    assert program.assemble() == struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000)
