"""Calls from arguments: text and bytes, exact argv, limits, checkers; an error names the argument."""

from __future__ import annotations

import pytest
from libdsec._fncall_requests import SLACK_S, call_request, longest_s, submit_request
from libdsec.errors import DsecError, UsageError
from libdsec.fncall_results import FnOutcome, FnResult
from libdsec.wire_fncall import Checker, FnLimits, FnTest


def _call(code="print(1)", language="python", image="i", **options):
    return call_request(code, image=image, language=language, options=options)


def test_text_becomes_bytes_and_lists_of_any_kind_are_taken():
    made = _call(stdin="ü", expected="x", files={"a": "b", "c": b"\xff"}, args=("1", "2"), fetch_files=("o",), env={})
    assert (made.stdin, made.expected, made.files) == ("ü".encode(), b"x", {"a": b"b", "c": b"\xff"})
    assert (made.args, made.fetch_files) == (["1", "2"], ["o"])
    assert made.call_id.startswith("fc-")
    assert _call(call_id="mine").call_id == "mine"
    assert _call().call_id != _call().call_id


def test_a_list_is_exact_argv_and_needs_no_language():
    made = _call(["echo", "a b"], language="")
    assert (made.argv, made.code) == (["echo", "a b"], "")


def test_limits_as_a_mapping_or_a_struct():
    assert _call(limits={"cpu_s": 2, "pids": 3}).limits == FnLimits(cpu_s=2, pids=3)
    assert _call(limits=FnLimits(memory_mib=64)).limits.memory_mib == 64
    assert _call(compile_limits={"wall_s": 9}).compile_limits.wall_s == 9


def test_a_checker_by_name_or_whole():
    assert _call(checker="float").checker.kind == "float"
    assert _call(checker=Checker(kind="program", code="c", language="python")).checker.code == "c"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"image": ""}, "image"),
        ({"language": ""}, "language"),
        ({"code": []}, "code"),
        ({"limits": {"cpu_s": 0}}, "limits.cpu_s"),
        ({"limits": {"cpus": 1}}, "cpus"),
        ({"checker": "nearly"}, "checker.kind"),
        ({"call_id": "a b"}, "call_id"),
        ({"queue_timeout_s": 0}, "queue_timeout_s"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_an_error_names_the_argument(arguments, field):
    with pytest.raises(UsageError) as caught:
        _call(**arguments)
    assert caught.value.field == field


def test_tests_are_mappings_or_structs():
    request = submit_request(_call(), [{"stdin": "1"}, FnTest(stdin=b"2", name="n")], stop_at_first=True)
    assert [(test.stdin, test.expected, test.name) for test in request.tests] == [(b"1", None, ""), (b"2", None, "n")]
    with pytest.raises(UsageError) as caught:
        submit_request(_call(), [{"input": "1"}], stop_at_first=False)
    assert caught.value.field == "input"


def test_a_reply_is_awaited_for_as_long_as_the_call_may_take():
    call = _call(limits={"wall_s": 10}, compile_limits={"wall_s": 5}, queue_timeout_s=7)
    assert longest_s(call) == 7 + 2 * 5 + 10 + SLACK_S
    assert longest_s(call, tests=3) == 7 + 2 * 5 + 30 + SLACK_S


def test_an_outcome_gives_its_result_or_raises():
    result = FnResult(verdict="accepted", stdout_bytes=b"\xff")
    assert FnOutcome(index=0, result=result).get().stdout == "\ufffd"
    with pytest.raises(DsecError, match="gone"):
        FnOutcome(index=1, error=DsecError("x", "gone")).get()
