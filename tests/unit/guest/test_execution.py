"""What frames come to: kept output, truncation, outcomes, errors; and what a spec refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libdsec.errors import CapacityError, NotFoundError, PlatformError, UsageError

from nomad_dsec.guest import frames
from nomad_dsec.guest.execution import Kept, exec_fields, parse_output
from nomad_dsec.guest.frames import Tag
from nomad_dsec.guest.link import error_of
from nomad_dsec.guest.spec import ExecSpec, OutputChunk


@given(st.lists(st.binary(min_size=1, max_size=70), max_size=60), st.integers(0, 200))
def test_kept_is_head_and_tail_and_says_when_it_is_not_all(pieces, bound):
    kept, offset = Kept(bound), 0
    for piece in pieces:
        kept.add(OutputChunk(stream=1, offset=offset, data=piece))
        offset += len(piece)
    whole = b"".join(pieces)
    done = kept.outcome("x", frames.encode_fields([(Tag.TOTAL, len(whole)), (Tag.EXIT_CODE, 0)]))
    if len(whole) <= bound:
        assert done.stdout == whole
        assert not done.truncated
    else:
        tail = bound - bound // 2
        assert done.stdout == whole[: bound // 2] + whole[len(whole) - tail :]
        assert done.truncated


def test_kept_drops_in_bulk_but_never_holds_much_more():
    kept = Kept(1000)
    for n in range(100):
        kept.add(OutputChunk(stream=2, offset=n * 65536, data=bytes(65536)))
        assert kept._tail_bytes <= 2 * 500 + 2 * frames.MAX_DATA
    assert len(kept.joined()[1]) == 1000


def test_a_gap_before_us_is_truncation():
    kept = Kept(1000)
    kept.add(OutputChunk(stream=1, offset=50, data=b"tail"))
    assert kept.outcome("x", frames.encode_fields([(Tag.TOTAL, 54), (Tag.EXIT_CODE, 0)])).truncated


def test_outcome_without_exit_code_makes_none_up():
    done = Kept(10).outcome("x", frames.encode_fields([(Tag.TERMSIG, 9), (Tag.TIMED_OUT, 1), (Tag.HOST_SIGNAL, 15)]))
    assert (done.exit_code, done.signal, done.timed_out, done.host_signal) == (None, 9, True, 15)


def test_output_frame():
    chunk = parse_output(frames.OUTPUT_PREFIX.pack(2, 77) + b"abc")
    assert (chunk.stream, chunk.offset, chunk.data) == (2, 77, b"abc")


@pytest.mark.parametrize(
    ("code", "cls"),
    [("not_found", NotFoundError), ("busy", CapacityError), ("worker_died", PlatformError), ("exists", UsageError)],
)
def test_guest_errors_become_ours(code, cls):
    payload = frames.encode_fields(
        [(Tag.CODE, code.encode()), (Tag.MESSAGE, b"why"), (Tag.FIELD, b"path"), (Tag.ERRNO, 2)]
    )
    error = error_of(payload, what="read /x")
    assert type(error) is cls
    assert (error.code, error.message, error.field, error.details) == (code, "read /x: why", "path", {"errno": 2})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"argv": ()}, "argv"),
        ({"argv": (b"a\0",)}, "argv[0]"),
        ({"argv": (b"x" * 2_100_000,)}, "argv"),
        ({"env": ((b"A=B", b""),)}, "env"),
        ({"cwd": b"here"}, "cwd"),
        ({"exec_id": "a b"}, "exec_id"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"max_output_bytes": -1}, "max_output_bytes"),
        ({"pty": (0, 80)}, "pty"),
    ],
)
def test_a_spec_names_its_bad_field(change, field):
    with pytest.raises(UsageError) as caught:
        ExecSpec(**{"argv": (b"true",), **change}).check()
    assert caught.value.field == field


def test_a_short_timeout_is_not_rounded_to_none():
    fields = exec_fields(ExecSpec(argv=(b"x",), timeout_s=0.0001), exec_id="a", credit=1, collect=False)
    assert (Tag.TIMEOUT_MS, 1) in fields
