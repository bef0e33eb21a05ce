"""Log lines: whatever is logged, the host finds strings where it asserts strings, on one line that fits its buffer."""

from __future__ import annotations

import json
import re

from dsec_plugins.goplugin.hclog import render
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
