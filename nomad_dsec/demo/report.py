"""The HTML report: one file, no script, nothing fetched."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nomad_dsec.demo import charts, report_judging
from nomad_dsec.demo.probes import PROFILES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nomad_dsec.demo.outcome import Outcome

_STYLE = """
:root { --ink:#1c2330; --soft:#5b6678; --line:#e3e7ee; --paper:#fff; --ground:#f5f7fa; --accent:#2f6fde;
  --good:#1f9d66; --part:#d99a1b; --bad:#c8463f; --setup:#b9c4d6; --file:#8fb3ef; --grade:#7a58c9; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6eaf2; --soft:#98a4b8; --line:#2c3443; --paper:#171c26;
  --ground:#10141c; --accent:#6a9cf5; --good:#3cc48a; --part:#e8b44c; --bad:#ea6f66; --setup:#4a566b; --file:#3f68ad;
  --grade:#9a7ee0; } }
* { box-sizing:border-box } body { margin:0; background:var(--ground); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif } main { max-width:1040px; margin:0 auto;
  padding:36px 20px }
h1 { font-size:26px; margin:0 0 4px; letter-spacing:-.02em } h2 { font-size:17px; margin:0 0 10px }
p { margin:0 0 12px; color:var(--soft) } section { background:var(--paper); border:1px solid var(--line);
  border-radius:10px; padding:20px 22px; margin:16px 0; overflow-x:auto } .tiles { display:grid; gap:12px;
  grid-template-columns:repeat(auto-fit,minmax(170px,1fr)); margin:20px 0 } .tile { background:var(--paper);
  border:1px solid var(--line); border-radius:10px; padding:14px 16px } .tile b { display:block; font-size:22px;
  font-weight:650; letter-spacing:-.02em } .tile span { color:var(--soft); font-size:13px }
.pair { display:grid; gap:24px; grid-template-columns:repeat(auto-fit,minmax(380px,1fr)) }
table { border-collapse:collapse; width:100% } td,th { text-align:left; padding:5px 14px 5px 0; vertical-align:top;
  border-bottom:1px solid var(--line) } th { font-weight:600; font-size:13px; color:var(--soft) }
td.ok { color:var(--good) } td.no { color:var(--bad) } code { font:13px ui-monospace,monospace }
svg { width:100%; height:auto; display:block } svg text { font:12px system-ui,sans-serif; fill:var(--ink) }
svg .tick { fill:var(--soft); font-size:10.5px } .bar { fill:var(--accent); opacity:.75 } .mark { stroke:var(--bad);
  stroke-dasharray:3 3 } .axis,.grid { stroke:var(--line) } .good { fill:var(--good) } .part { fill:var(--part) }
.bad { fill:var(--bad) } .mean { stroke:var(--ink); stroke-width:1.5; opacity:.5 } .fault { fill:var(--bad) }
.setup { fill:var(--setup) } .exec { fill:var(--accent) } .file { fill:var(--file) } .grade { fill:var(--grade) }
.timeout { fill:var(--part) } .oom { fill:var(--bad) } .outage { fill:var(--bad); opacity:.3 }
.hue0 { fill:#2f6fde } .hue1 { fill:#1f9d66 } .hue2 { fill:#d99a1b } .hue3 { fill:#7a58c9 } .hue4 { fill:#c8463f }
.hue5 { fill:#2aa5b8 } .hue6 { fill:#8a6d3b } .hue7 { fill:#8d99ae }
.key span { margin-right:16px; color:var(--soft); font-size:13px } .key i { display:inline-block; width:10px;
  height:10px;   border-radius:2px; margin-right:6px } footer { color:var(--soft); font-size:13px; margin-top:22px }
"""
_KEY = (
    ("setup", "set up"),
    ("exec", "command"),
    ("file", "file"),
    ("grade", "grading"),
    ("timeout", "ended by its timeout"),
    ("oom", "out of memory"),
)


def render(outcome: Outcome) -> str:
    """The whole page."""
    facts = ", ".join(f"{key} {value}" for key, value in outcome.facts.items())
    body = [
        "<h1>nomad-dsec demo</h1>",
        f"<p>Groups of scripted agents repair a small repository, each in a sandbox of its own. {escape(facts)}.</p>",
        _tiles(outcome),
        _section("Rollouts in time", _timeline_words(outcome), _key(), _timeline(outcome)),
        _section("Rewards by group", _REWARD_WORDS, charts.rewards(outcome.rollouts), _agents(outcome)),
        _section("Latency, SDK to SDK", "One after the other, through gateway and node daemon.", _latency(outcome)),
        _isolation(outcome),
        _judging(outcome),
        _section("Summary", "", _table(("what", "found"), outcome.summary())),
        "<footer>Written by <code>dsec demo</code>; numbers are of this run on this machine.</footer>",
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    return (
        f"<!doctype html><html lang=en><head>{head}<title>nomad-dsec demo</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


_REWARD_WORDS = (
    "The reward is the share of the task's tests that pass, graded with tests that the agent could not change. "
    "Each dot is a rollout, the line its group's mean."
)


def _tiles(outcome: Outcome) -> str:
    wanted = (
        "create, p50 / p99",
        "exec round trip, p50 / p99",
        "create + kill, 16 at a time",
        "rewards",
        "sandboxes lost",
        "attempts denied, default profile",
        "submissions judged",
    )
    rows = dict(outcome.summary())
    found = ((name, escape(rows[name])) for name in wanted if name in rows)
    tiles = (f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in found)
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _timeline_words(outcome: Outcome) -> str:
    if outcome.crash is None:
        return "Every row is a rollout."
    crash = outcome.crash
    return (
        f"Every row is a rollout. The node daemon (pid {crash.old_pid}) was killed with {crash.in_flight} execs in "
        f"flight; its successor (pid {crash.new_pid}) served {crash.back_at - crash.killed_at:.2f} s later. "
        f"{len(outcome.faults)} rollouts had to be masked, {outcome.lost} sandboxes were lost."
    )


def _timeline(outcome: Outcome) -> str:
    crash = outcome.crash
    killed, back = (crash.killed_at, crash.back_at) if crash is not None else (None, None)
    return charts.timeline(outcome.rollouts, killed_at=killed, back_at=back)


def _key() -> str:
    return (
        '<div class="key">'
        + "".join(f'<span><i style="background:var({_variable(shade)})"></i>{name}</span>' for shade, name in _KEY)
        + "</div>"
    )


def _variable(shade: str) -> str:
    return {"exec": "--accent", "timeout": "--part", "oom": "--bad"}.get(shade, f"--{shade}")


def _agents(outcome: Outcome) -> str:
    rows = []
    for agent in sorted({rollout.agent for rollout in outcome.rollouts}):
        members = [rollout for rollout in outcome.rollouts if rollout.agent == agent]
        rewards = [rollout.reward for rollout in members if rollout.reward is not None]
        advantages = [rollout.advantage or 0.0 for rollout in members if rollout.reward is not None]
        mean = f"{sum(rewards) / len(rewards):.2f}" if rewards else "-"
        advantage = f"{sum(advantages) / len(advantages):+.2f}" if advantages else "-"
        rows.append((agent, str(len(members)), mean, advantage))
    return _table(("agent", "rollouts", "mean reward", "mean advantage"), rows)


def _latency(outcome: Outcome) -> str:
    found = outcome.latencies
    return (
        f'<div class="pair"><div><h2>create</h2>{charts.histogram(found.create_ms, unit="ms")}</div>'
        f"<div><h2>exec <code>true</code></h2>{charts.histogram(found.exec_ms, unit='ms')}</div></div>"
        "<h2>Where a create spends its time (medians)</h2>"
        f"{charts.steps_bar(found.where_ms)}"
    )


def _isolation(outcome: Outcome) -> str:
    isolation = outcome.isolation
    if isolation is None:
        return ""
    rows = []
    for name, found in isolation.outcomes.items():
        cells = [f"<td>{escape(name)}</td>"]
        for profile in PROFILES:
            answer = found.get(profile, "-")
            shade = "ok" if answer != "allowed" else "no" if profile == PROFILES[0] else ""
            cells.append(f'<td class="{shade}">{escape(answer)}</td>')
        rows.append("<tr>" + "".join(cells) + "</tr>")
    heads = "".join(f"<th>{escape(head)}</th>" for head in ("attempt", *(f"profile {name}" for name in PROFILES)))
    table = f"<table><tr>{heads}</tr>{''.join(rows)}</table>"
    notes = "".join(f"<p>{escape(note)}</p>" for note in isolation.notes)
    title = "<h2 style='margin-top:20px'>A result is not a fault</h2>"
    ends = title + _table(("a command that", "is told as"), isolation.ends)
    return _section("Isolation", "What was tried from inside, and the answer of the kernel.", table, notes, ends)


def _judging(outcome: Outcome) -> str:
    found = outcome.judging
    if found is None:
        return ""
    tables = (report_judging.verdict_table(found), report_judging.kinds_table(found)) if found.judged else ()
    return _section("Judged submissions", report_judging.words(found), *tables, report_judging.notes(found))


def _section(title: str, words: str, *parts: str) -> str:
    text = f"<p>{escape(words)}</p>" if words else ""
    return f"<section><h2>{escape(title)}</h2>{text}{''.join(parts)}</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"
