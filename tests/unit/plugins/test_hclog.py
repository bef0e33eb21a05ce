"""Log lines: whatever is logged, the host finds strings where it asserts strings, on one line that fits its buffer."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re

import pytest
from dsec_plugins.goplugin.hclog import HclogHandler, render
from hypothesis import given
from hypothesis import strategies as st

ANY = st.one_of(st.text(), st.integers(), st.none(), st.binary(), st.lists(st.text()))


@given(level=ANY, message=ANY, module=ANY, when=st.floats(0, 4e9), fields=st.dictionaries(st.text(), ANY))
def test_every_line_is_safe_for_the_host(level, message, module, when, fields) -> None:
    line = render(level, message, module, when, fields | {"@message": 1, "@timestamp": None})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    record = json.loads(line)
    assert all(isinstance(value, str) for value in record.values())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", record["@timestamp"])


def test_long_lines_stay_json() -> None:
    line = render("info", "\U0001f600" * 100_000, "m", 0.0, {"k": "v" * 100_000})
    assert len(line) < 65_536
    assert json.loads(line)["@message"].endswith("[cut]")


@pytest.mark.parametrize(
    ("error", "level", "lines"), [(asyncio.CancelledError(), "debug", 1), (OSError(5), "error", 2)]
)
def test_a_stream_that_ends_with_its_server_is_no_error(error, level, lines) -> None:
    reader, writer = os.pipe()
    record = logging.LogRecord("grpc", logging.ERROR, "p", 1, "not handled", (), (type(error), error, None))
    HclogHandler(writer).emit(record)
    os.close(writer)
    with open(reader, "rb") as file:
        told = json.loads(file.read())
    assert told["@level"] == level
    assert len(told["@message"].splitlines()) == lines
