"""The vocabulary of plans agrees with the C side, and its binary says what the operations say."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nomad_dsec.backends.container import plan_ops
from nomad_dsec.backends.container.plan_ops import NO_FD, OPERATIONS, Op, pack_op, pack_plan, unpack_report

C_DIR = Path(plan_ops.__file__).parents[2] / "guest" / "c"


def test_codes_and_signatures_are_those_of_the_c_table():
    header = (C_DIR / "launch.h").read_text()
    codes = {name.lower(): int(code) for name, code in re.findall(r"\bOP_([A-Z_]+) = (\d+),", header)}
    table = dict(re.findall(r'\{OP_([A-Z_]+), "([nsb]*)"', (C_DIR / "launch_ops.c").read_text()))
    signatures = {name.lower(): signature for name, signature in table.items()}
    ours = {name: code for name, (code, _) in OPERATIONS.items()}
    assert ours == codes
    assert {
        name: "".join("n" if kind == "f" else kind for _, kind in fields) for name, (_, fields) in OPERATIONS.items()
    } == signatures
    # op_kind_of indexes the table by code
    assert [codes[name] for name in signatures] == list(range(1, len(codes) + 1))


def test_header_constants_are_those_of_c():
    header = (C_DIR / "launch.h").read_text()
    for name in ("PLAN_MAGIC", "PLAN_VERSION"):
        (text,) = re.findall(rf"#define {name} (0x[0-9a-f]+|\d+)u", header)
        assert int(text, 0) == getattr(plan_ops, name)
    (limit,) = re.findall(r"#define PLAN_MAX_OPS (\d+)u", header)
    assert int(limit) == plan_ops.MAX_OPS
    (detail,) = re.findall(r"char detail\[(\d+)\]", header)
    assert int(detail) == plan_ops.REPORT_HEAD.size - 8


def test_descriptors_become_numbers_and_none_becomes_no_fd():
    raw = pack_op(Op("serve", ("listen", "", 5, 9, "oom")), {"oom": 0, "listen": 1})
    code, fields, size = plan_ops.OP.unpack_from(raw)
    assert (code, fields, size) == (30, 5, 80)
    numbers = [struct.unpack_from("<Q", raw, 16 + 16 * index)[0] for index in range(5)]
    assert numbers == [1, NO_FD, 5, 9, 0]


@given(st.binary(max_size=40).filter(lambda raw: b"\0" not in raw))
def test_text_is_kept_byte_for_byte_and_padded(raw):
    packed = pack_op(Op("mask", (raw.decode("utf-8", "surrogateescape"),)), {})
    length = struct.unpack_from("<I", packed, 12)[0]
    assert packed[16 : 16 + length] == raw + b"\0"
    assert len(packed) % 8 == 0


@given(st.integers(0, 2**64 - 1))
def test_numbers_fill_64_bits(number):
    assert struct.unpack_from("<Q", pack_op(Op("unshare", (number,)), {}), 16)[0] == number


def test_an_unknown_descriptor_is_a_bug_that_shows():
    with pytest.raises(KeyError):
        pack_op(Op("idmap", ("nothing",)), {})


def test_a_missing_field_is_a_bug_that_shows():
    with pytest.raises(ValueError):
        pack_op(Op("idmap", ()), {})


def test_report_is_read_back():
    raw = struct.pack("<Ii56s", 2, 13, b"/proc/kcore") + struct.pack("<3I", 10, 20, 0)
    report = unpack_report(raw, 3)
    assert (report.done, report.error, report.detail, report.ends_us) == (2, 13, "/proc/kcore", (10, 20, 0))


def test_report_lies_behind_the_operations_and_is_zero():
    packed = pack_plan(1, (pack_op(Op("root"), {}),))
    magic, version, count, size, offset = plan_ops.HEADER.unpack_from(packed)
    assert (magic, version, count) == (plan_ops.PLAN_MAGIC, plan_ops.PLAN_VERSION, 1)
    assert offset == plan_ops.HEADER.size + size
    assert packed[offset:] == bytes(plan_ops.REPORT_BYTES)


def test_secrets_are_shown_by_size_only():
    shown = Op("file", ("/run/secrets/key", b"hunter2", 0o444, 0), secret=True).to_json()
    assert shown["content"] == {"bytes": 7}
    assert "sha256" in Op("file", ("/etc/hosts", b"x", 0o644, 1)).to_json()["content"]


def test_steps_name_their_subject():
    assert Op("mask", ("/proc/kcore",)).step == "mask /proc/kcore"
    assert Op("enter_userns").step == "enter_userns"
