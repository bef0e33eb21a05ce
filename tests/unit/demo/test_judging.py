"""The judging stage's pure parts: every verdict is there, requests are valid, the report tells what went astray."""

from __future__ import annotations

import msgspec
import pytest
from libdsec.wire_fncall import VERDICTS, FnRequest

from nomad_dsec.backends.fncall.languages import find_language
from nomad_dsec.demo import report_judging
from nomad_dsec.demo.judging import Judged, Judging, by_kind
from nomad_dsec.demo.submissions import SUBMISSIONS, request_of


def test_every_verdict_is_asked_for_in_several_languages():
    assert {one.verdict for one in SUBMISSIONS} == set(VERDICTS)
    assert len({one.language for one in SUBMISSIONS}) >= 4


@pytest.mark.parametrize("submission", SUBMISSIONS, ids=lambda one: f"{one.language}: {one.title}")
def test_requests_are_within_the_wire(submission):
    request = request_of(submission, image="i", number=3)
    assert msgspec.json.decode(msgspec.json.encode(request), type=FnRequest) == request
    assert find_language(submission.language).name == submission.language
    assert request.code != request_of(submission, image="i", number=4).code
    if submission.language == "python":
        compile(request.code, submission.title, "exec")


def _judging():
    right = [Judged(submission=one, verdict=one.verdict, cpu_s=0.1) for one in SUBMISSIONS]
    wrong = Judged(submission=SUBMISSIONS[0], verdict="wrong_answer", message="<b>differs</b>")
    fault = Judged(submission=SUBMISSIONS[1], error="node_unreachable: gone")
    return Judging(judged=[*right, wrong, fault], took_s=2.0, missing=["rust: no rustc"])


def test_what_went_astray_is_counted_and_told():
    judging = _judging()
    assert [one.verdict for one in judging.astray] == ["wrong_answer", ""]
    assert judging.verdicts()["no verdict"] == 1
    told = report_judging.notes(judging)
    assert "&lt;b&gt;differs" in told
    assert "node_unreachable" in told
    assert "no rustc" in told


def test_tables_have_a_row_for_each_language_and_kind():
    judging = _judging()
    table = report_judging.verdict_table(judging)
    assert table.count("<tr>") == 2 + len({one.language for one in SUBMISSIONS})
    kinds = report_judging.kinds_table(judging)
    assert kinds.count("<tr>") == 1 + len(SUBMISSIONS)
    assert "1 of 2" in kinds
    assert [kind for kind, _ in by_kind(judging.judged)] == list(SUBMISSIONS)
