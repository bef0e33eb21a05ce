"""The demo's pure parts: agents that differ, advantages, and a page that is whole and escapes what it shows."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from nomad_dsec.demo import charts
from nomad_dsec.demo.agents import AGENTS, MIX, cast
from nomad_dsec.demo.judging import Judged, Judging
from nomad_dsec.demo.measure import Latencies, percentile
from nomad_dsec.demo.outcome import Crash, Outcome
from nomad_dsec.demo.probes import Isolation
from nomad_dsec.demo.report import render
from nomad_dsec.demo.rollout import Rollout, Step, set_advantages
from nomad_dsec.demo.submissions import SUBMISSIONS
from nomad_dsec.demo.tasks import HOME, TASKS, edited


def _rollouts():
    rows = [(0, 1.0), (0, 0.0), (0, 0.5), (1, 1.0), (1, 1.0), (1, None)]
    return [
        Rollout(
            group=group,
            index=index,
            task=TASKS[group],
            agent="reader",
            reward=reward,
            fault="" if reward is not None else "node_unreachable: <gone>",
            steps=[Step(kind="exec", begin=index * 0.1, end=index * 0.1 + 0.3, outcome="ok")],
        )
        for index, (group, reward) in enumerate(rows)
    ]


def test_advantages_are_per_group_and_leave_faults_out():
    rollouts = _rollouts()
    set_advantages(rollouts)
    assert sum(rollout.advantage for rollout in rollouts[:3]) == pytest.approx(0)
    assert rollouts[0].advantage == pytest.approx(1.2247, abs=1e-3)
    assert [rollout.advantage for rollout in rollouts[3:]] == [0.0, 0.0, None]


def test_a_group_is_the_whole_mix_in_its_own_order():
    assert sorted(cast(1, 8)) == sorted(MIX)
    assert cast(1, 8) == cast(1, 8)
    assert cast(1, 8) != cast(2, 8)
    assert set(cast(0, 11)) <= set(AGENTS)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_edits_still_fit_the_faulty_commit(task):
    faulty = (HOME / "commits" / "4-simplify" / task.source).read_text()
    right, half = edited(faulty, task.right), edited(faulty, task.half)
    assert all(old in faulty for old, _ in (*task.right, *task.half))
    assert len({faulty, right, half}) == 3
    compile(right, task.source, "exec")


class _Checker(HTMLParser):
    """Tags that are closed in the order they were opened."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.seen = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in {"meta", "line"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_fetches_nothing_and_escapes():
    rollouts = _rollouts()
    set_advantages(rollouts)
    outcome = Outcome(
        image="debian",
        facts={"cpu": "<b>fast</b>"},
        latencies=Latencies(
            create_ms=[10, 12, 30], exec_ms=[1.0] * 9, kill_ms=[5], steps_ms={"journal": 2, "start": 7}
        ),
        rollouts=rollouts,
        crash=Crash(killed_at=0.2, back_at=0.5, in_flight=3, old_pid=1, new_pid=2),
        isolation=Isolation(
            outcomes={"mount": {"default": "EPERM", "debug": "allowed"}}, ends=[("exit 7", "exit code 7")]
        ),
    )
    page = render(outcome)
    checker = _Checker()
    checker.feed(page)
    assert checker.open == []
    assert "<b>fast" not in page
    assert not [attrs for _, attrs in checker.seen if "src" in attrs or "href" in attrs]
    assert page.count("<svg") == 5
    assert dict(outcome.summary())["rollouts masked by faults"] == "1"
    assert "SIGKILL" in page


def test_the_summary_tells_each_group_apart_and_what_internal_errors_were_planted():
    rollouts = _rollouts()
    judged = [Judged(submission=one, verdict=one.verdict) for one in SUBMISSIONS]
    judged.append(Judged(submission=SUBMISSIONS[0], verdict="internal_error"))
    summary = dict(Outcome(image="i", facts={}, rollouts=rollouts, judging=Judging(judged=judged)).summary())
    assert summary["rewards"] == "mean 0.70 (by group 0.50, 1.00), 3 solved of 5"
    assert "internal_error 2 (1 planted: a checker that is broken)" in summary["verdicts"]
    assert summary["verdicts astray"] == "1"


def test_charts_of_nothing_are_words():
    assert "nothing" in charts.histogram([], unit="ms")
    assert "no steps" in charts.steps_bar({})
    assert charts.timeline([], killed_at=None, back_at=None).endswith("</svg>")
    assert charts.histogram([3.0], unit="ms").endswith("</svg>")


def test_percentiles():
    assert percentile([], 50) == 0
    assert [percentile([3, 1, 2], share) for share in (1, 50, 100)] == [1, 2, 3]


def test_the_chart_and_the_table_have_the_same_percentiles():
    values = [float(n) for n in range(1, 41)]
    outcome = Outcome(image="i", facts={}, latencies=Latencies(create_ms=values, steps_ms={"launch": 12.0}))
    assert dict(outcome.summary())["create, p50 / p99"] == "20.0 / 40.0 ms"
    chart = charts.histogram(values, unit="ms")
    assert "p50 20.00 ms" in chart
    assert "p99 40.00 ms" in chart
    assert sum(outcome.latencies.where_ms.values()) == pytest.approx(20.0)
