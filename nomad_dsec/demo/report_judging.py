"""The report's part on judged submissions: verdicts by language, and every kind with what it cost."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from libdsec.wire_fncall import VERDICTS

from nomad_dsec.demo.judging import by_kind
from nomad_dsec.demo.measure import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nomad_dsec.demo.judging import Judged, Judging


def words(judging: Judging) -> str:
    """What happened, in sentences."""
    if not judging.judged:
        return "No submission could be judged here."
    cached = sum(one.cached for one in judging.judged)
    compiled = sum(one.compiled for one in judging.judged)
    waited = percentile([one.queue_s for one in judging.judged], 50)
    return (
        f"{len(judging.judged)} submissions in {judging.took_s:.1f} s, each in fresh namespaces with every limit on. "
        f"{len(judging.judged) - len(judging.astray)} got the verdict they were made for. {compiled} were compiled "
        f"languages, {cached} of them found their compile in the cache. The median waited {waited:.2f} s for a free "
        "place, which is in no time below. Internal error is the one verdict that is the platform's: here a checker "
        "that is broken on purpose."
    )


def verdict_table(judging: Judging) -> str:
    """Languages down, verdicts across."""
    languages = sorted({one.submission.language for one in judging.judged})
    heads = "".join(f"<th>{escape(verdict.replace('_', ' '))}</th>" for verdict in VERDICTS)
    rows = [_counts(name, [one for one in judging.judged if one.submission.language == name]) for name in languages]
    rows.append(_counts("all", judging.judged))
    return f"<table><tr><th>language</th>{heads}</tr>{''.join(rows)}</table>"


def kinds_table(judging: Judging) -> str:
    """Each kind of submission: the verdict it was made for, how many got it, medians of what it cost."""
    heads = ("program", "language", "verdict", "got it", "cpu s", "wall s", "MiB")
    rows = []
    for kind, mine in by_kind(judging.judged):
        right = sum(one.as_planned for one in mine)
        cells = [
            f"<td>{escape(kind.title)}</td>",
            f"<td>{escape(kind.language)}</td>",
            f"<td>{escape(kind.verdict)}</td>",
            f'<td class="{"ok" if right == len(mine) else "no"}">{right} of {len(mine)}</td>',
            *(f"<td>{_median(mine, name):.3f}</td>" for name in ("cpu_s", "wall_s")),
            f"<td>{_median(mine, 'max_rss_mib'):.1f}</td>",
        ]
        rows.append("<tr>" + "".join(cells) + "</tr>")
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def notes(judging: Judging) -> str:
    """What was missing, and what went astray."""
    lines = [f"Missing: {text}" for text in judging.missing]
    lines += [
        f"{one.submission.title} ({one.submission.language}): {one.verdict or 'no verdict'} instead of "
        f"{one.submission.verdict}. {one.error or one.message}"
        for one in judging.astray[:20]
    ]
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _counts(name: str, judged: Sequence[Judged]) -> str:
    cells = []
    for verdict in VERDICTS:
        count = sum(one.verdict == verdict for one in judged)
        cells.append(f"<td>{count or ''}</td>")
    return f"<tr><td>{escape(name)}</td>{''.join(cells)}</tr>"


def _median(judged: Sequence[Judged], name: str) -> float:
    return percentile([getattr(one, name) for one in judged], 50)
