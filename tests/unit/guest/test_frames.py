"""The codec: both directions, any cut, garbage; and the numbers of c/wire.h."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libdsec.errors import ProtocolError

from nomad_dsec.guest import frames
from nomad_dsec.guest.frames import Frame, FrameReader, Record, Tag

WIRE_H = Path(frames.__file__).parent / "c" / "wire.h"
INT_TAGS = [tag for tag in Tag if frames._KIND[tag] == "I"]
BYTE_TAGS = [tag for tag in Tag if frames._KIND[tag] == "B"]

fields = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(INT_TAGS), st.integers(0, 2**64 - 1)),
        st.tuples(st.sampled_from(BYTE_TAGS), st.binary(max_size=300)),
    ),
    max_size=20,
)


def test_numbers_are_those_of_the_c_side():
    text = WIRE_H.read_text()
    frame_numbers = {name: int(number, 16) for name, number in re.findall(r"X\((\w+), (0x[0-9a-f]+)\)", text)}
    tags = {name: (int(number), kind) for name, number, kind in re.findall(r"X\((\w+), (\d+), ([IBN])\)", text)}
    assert frame_numbers == {frame.name: frame.value for frame in Frame}
    assert tags == {tag.name: (tag.value, frames._KIND[tag]) for tag in Tag}
    for name, value in (("MAX_DATA", frames.MAX_DATA), ("MAX_SMALL", frames.MAX_SMALL), ("WINDOW", frames.WINDOW)):
        (kib,) = re.findall(rf"#define {name} \((\d+)u \* 1024\)", text)
        assert int(kib) * 1024 == value


@given(fields)
def test_fields_come_back(given_fields):
    assert list(frames.iter_fields(frames.encode_fields(given_fields))) == given_fields


@given(st.lists(st.tuples(st.sampled_from(list(Frame)), st.integers(0, 2**32 - 1), st.binary(max_size=200))), st.data())
def test_frames_survive_any_cut(sent, data):
    sent = [(kind, stream, payload) for kind, stream, payload in sent]
    wire = b"".join(frames.encode_frame(*each) for each in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=10)))
    reader, seen = FrameReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        seen += reader.feed(wire[start:end])
    assert [(f.type, f.stream, f.payload) for f in seen] == sent
    assert reader.pending == 0


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_garbage_is_a_protocol_error_or_nothing(garbage):
    reader = FrameReader()
    try:
        for frame in reader.feed(garbage):
            Record(frame.payload)
            frames.entries(frame.payload)
    except ProtocolError as error:
        assert error.code in ("bad_frame", "bad_field")
    assert reader.pending <= len(garbage)


@given(fields, st.integers(0, 400), st.integers(0, 255))
def test_a_flipped_byte_never_escapes_the_codec(given_fields, place, value):
    payload = bytearray(frames.encode_fields(given_fields))
    if payload:
        payload[place % len(payload)] ^= value
    try:
        Record(bytes(payload))
    except ProtocolError as error:
        assert error.code == "bad_field"


def test_unknown_fields_are_errors_unless_they_may_be_ignored():
    may = frames._FIELD.pack(0x8000 | 99, 3) + b"abc"
    assert list(frames.iter_fields(may + frames.encode_fields([(Tag.PID, 1)]))) == [(Tag.PID, 1)]
    with pytest.raises(ProtocolError):
        list(frames.iter_fields(frames._FIELD.pack(99, 0)))
    with pytest.raises(ProtocolError) as caught:
        list(frames.iter_fields(frames._FIELD.pack(Tag.PID, 4) + b"1234"))
    assert caught.value.field == "pid"


def test_too_large_frames_are_refused_on_both_sides():
    with pytest.raises(ProtocolError):
        frames.encode_frame(Frame.DATA, 1, bytes(frames.MAX_DATA + 1))
    with pytest.raises(ProtocolError):
        FrameReader().feed(frames.HEADER.pack(frames.MAX_PAYLOAD + 1, Frame.EXEC, 0, 0, 1))
    with pytest.raises(ProtocolError):
        FrameReader().feed(frames.HEADER.pack(0, Frame.EXEC, 1, 0, 1))


def test_negative_numbers_pass_as_two_s_complement():
    assert Record(frames.encode_fields([(Tag.MTIME_NS, -5)])).signed(Tag.MTIME_NS) == -5
