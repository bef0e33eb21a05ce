"""`dsec fncall`: what files and directories mean, exit codes, JSON that is exact."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from libdsec.errors import UsageError
from libdsec.fncall_results import FnResult

from nomad_dsec.backends.fncall.languages import TABLE
from nomad_dsec.cli import main as cli
from nomad_dsec.cli.fncall import as_data, checker_of, describe, exit_code_of, language_of, read_tests


def test_every_language_is_told_by_the_suffix_of_its_source():
    shared = {row.name for row in TABLE if row.name not in ("sh",)}
    assert {language_of(Path(row.source)) for row in TABLE} == shared
    assert language_of(Path("a/b.CC")) == "cpp"
    with pytest.raises(UsageError) as caught:
        language_of(Path("x.cob"))
    assert caught.value.field == "--language"


def test_tests_are_pairs_by_name(tmp_path):
    for name, text in {"b.in": "1", "b.out": "2", "a.in": "3", "c.in": "4", "c.ans": "5", "readme": "x"}.items():
        (tmp_path / name).write_text(text)
    told = [(test.name, test.stdin, test.expected) for test in read_tests(tmp_path)]
    assert told == [("a", b"3", None), ("b", b"1", b"2"), ("c", b"4", b"5")]
    for path in (tmp_path / "none", tmp_path / "readme"):
        with pytest.raises(UsageError) as caught:
            read_tests(path)
        assert caught.value.field == "--tests"


def test_a_checker_is_a_kind_or_a_program(tmp_path):
    assert checker_of("float").kind == "float"
    (tmp_path / "check.py").write_text("raise SystemExit(0)")
    program = checker_of(str(tmp_path / "check.py"))
    assert (program.kind, program.language, program.code) == ("program", "python", "raise SystemExit(0)")
    with pytest.raises(UsageError, match="nearly"):
        checker_of(str(tmp_path / "nearly.py"))


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (FnResult(verdict="accepted", exit_code=0), 0),
        (FnResult(verdict="runtime_error", exit_code=7), 7),
        (FnResult(verdict="runtime_error", signal=11), 139),
        (FnResult(verdict="cpu_time_limit", signal=9), 123),
        (FnResult(verdict="compile_error"), 123),
        (FnResult(verdict="internal_error"), 125),
    ],
)
def test_exit_codes(result, code):
    assert exit_code_of(result) == code


def test_json_keeps_bytes_that_are_not_text():
    data = as_data(FnResult(verdict="accepted", stdout_bytes=b"a\xff", stderr_bytes=b"plain"))
    assert base64.b64decode(data["stdout_base64"]) == b"a\xff"
    assert "stderr_base64" not in data


def test_a_cut_output_is_told():
    assert "stdout was cut" in describe(FnResult(verdict="output_limit", stdout_truncated=True))


def test_a_missing_source_is_named(capsys, tmp_path):
    argv = ["fncall", "run", str(tmp_path / "no.py"), "--endpoint", "http://127.0.0.1:1"]
    assert cli.main(argv) == 125
    assert "no.py" in capsys.readouterr().err
