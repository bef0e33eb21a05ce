"""Charts as inline SVG: histograms, rewards by group, and the timeline of all rollouts. Pure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nomad_dsec.demo.measure import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nomad_dsec.demo.rollout import Rollout

_WIDTH = 960
_KIND_CLASS = {"setup": "setup", "exec": "exec", "file": "file", "grade": "grade"}


def histogram(values: Sequence[float], *, unit: str, buckets: int = 28, width: int = 460, height: int = 170) -> str:
    """How often each range of values was seen, up to the 99th percentile; the median and p99 as lines."""
    if not values:
        return "<p>nothing was measured</p>"
    ordered = sorted(values)
    low, high = ordered[0], percentile(ordered, 99)
    span = max(high - low, 1e-9)
    counts = [0] * buckets
    for value in ordered:
        counts[min(buckets - 1, int((value - low) / span * buckets))] += 1
    tallest, base, left = max(counts), height - 24, 8
    step = (width - 2 * left) / buckets
    parts = [_open(width, height)]
    for at, count in enumerate(counts):
        tall = count / tallest * (base - 26)
        parts.append(_rect(left + at * step + 1, base - tall, step - 2, tall, "bar", f"{count} of {len(values)}"))
    for share, name in ((50, "p50"), (99, "p99")):
        value = percentile(ordered, share)
        x = left + min(1.0, (value - low) / span) * (width - 2 * left)
        anchor = "end" if x > width * 0.7 else "start"
        shift = -5 if anchor == "end" else 5
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{base}"/>')
        parts.append(_text(x + shift, 22 if share < 90 else 38, f"{name} {value:.2f} {unit}", anchor, "label"))
    parts.append(f'<line class="axis" x1="{left}" x2="{width - left}" y1="{base}" y2="{base}"/>')
    parts.append(_text(left, height - 7, f"{low:.2f} {unit}", "start", "tick"))
    parts.append(_text(width - left, height - 7, f"{high:.2f} {unit}", "end", "tick"))
    return "".join([*parts, "</svg>"])


def steps_bar(steps: dict[str, float], *, width: int = _WIDTH) -> str:
    """One bar: where the time of a create goes."""
    shown = sorted(((name, took) for name, took in steps.items() if took >= 0.01), key=lambda pair: -pair[1])
    total = sum(took for _, took in shown)
    if not total:
        return "<p>the node told no steps</p>"
    parts, x = [_open(width, 34 + 20 * ((len(shown) + 2) // 3))], 0.0
    for at, (name, took) in enumerate(shown):
        wide = took / total * width
        parts.append(_rect(x, 0, max(wide - 1.5, 0.5), 22, f"hue{at % 8}", f"{name} {took:.2f} ms"))
        x += wide
        column, row = at % 3, at // 3
        parts.append(_rect(column * width / 3, 36 + 20 * row, 10, 10, f"hue{at % 8}", name))
        parts.append(_text(column * width / 3 + 16, 45 + 20 * row, f"{name} {took:.2f} ms", "start", "label"))
    return "".join([*parts, "</svg>"])


def rewards(rollouts: Sequence[Rollout]) -> str:
    """A column of dots for each group, at the height of their reward; a line at the group's mean."""
    groups = sorted({rollout.group for rollout in rollouts})
    height, base, top = 230, 190, 16
    step = _WIDTH / max(len(groups), 1)
    parts = [_open(_WIDTH, height)]
    for share in (0.0, 0.5, 1.0):
        y = base - share * (base - top)
        parts.append(f'<line class="grid" x1="30" x2="{_WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(_text(24, y + 4, f"{share:g}", "end", "tick"))
    for at, group in enumerate(groups):
        members = [rollout for rollout in rollouts if rollout.group == group]
        graded = [rollout.reward for rollout in members if rollout.reward is not None]
        left, wide = at * step + 40, step - 56
        for place, rollout in enumerate(members):
            x = left + wide * (place + 0.5) / len(members)
            if rollout.reward is None:
                parts.append(_text(x, base - 4, "×", "middle", "fault"))
                continue
            y = base - rollout.reward * (base - top)
            tip = f"{rollout.agent}: reward {rollout.reward:.2f}, advantage {rollout.advantage or 0:+.2f}"
            shade = "good" if rollout.reward >= 0.999 else "part" if rollout.reward > 0.5 else "bad"
            dot = f'<circle class="{shade}" cx="{x:.1f}" cy="{y:.1f}" r="6">'
            parts.append(f"{dot}<title>{escape(tip)}</title></circle>")
        if graded:
            y = base - sum(graded) / len(graded) * (base - top)
            parts.append(f'<line class="mean" x1="{left:.1f}" x2="{left + wide:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        name = members[0].task.name if members else ""
        parts.append(_text(left + wide / 2, base + 22, f"group {group + 1}: {name}", "middle", "label"))
    return "".join([*parts, "</svg>"])


def timeline(rollouts: Sequence[Rollout], *, killed_at: float | None, back_at: float | None) -> str:
    """A row for each rollout, its steps in time; the moment at which the node daemon was killed."""
    ends = [step.end for rollout in rollouts for step in rollout.steps]
    last = max([*ends, back_at or 0.0, 0.001])
    row, left, top = 13, 128, 22
    height = top + row * len(rollouts) + 26
    scale = (_WIDTH - left - 8) / last
    parts = [_open(_WIDTH, height)]
    for at, rollout in enumerate(rollouts):
        y = top + at * row
        reward = "masked" if rollout.reward is None else f"{rollout.reward:.2f}"
        parts.append(_text(left - 8, y + 9, f"{rollout.agent} {reward}", "end", "tick"))
        for step in rollout.steps:
            shade = _KIND_CLASS.get(step.kind, "exec") if step.outcome in {"ok", "failed"} else step.outcome
            tip = f"{rollout.agent}: {step.kind}, {step.outcome}, {(step.end - step.begin) * 1000:.0f} ms"
            wide = max((step.end - step.begin) * scale, 0.6)
            parts.append(_rect(left + step.begin * scale, y + 2, wide, row - 4, shade, tip))
    if killed_at is not None:  # over the rows: every bar that crosses it is a command that outlived the daemon
        x, bottom = left + killed_at * scale, top + row * len(rollouts)
        wide = max(((back_at or killed_at) - killed_at) * scale, 1.5)
        parts.append(_rect(x, top - 6, wide, bottom - top + 6, "outage", "no node daemon"))
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{bottom}"/>')
        parts.append(_text(x, 11, "SIGKILL of the node daemon", "middle", "label"))
    base = top + row * len(rollouts) + 4
    for share in range(5):
        at_s = last * share / 4
        parts.append(_text(left + at_s * scale, base + 14, f"{at_s:.1f} s", "end" if share == 4 else "middle", "tick"))
    return "".join([*parts, "</svg>"])


def _open(width: float, height: float) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" preserveAspectRatio="xMinYMin meet">'


def _rect(x: float, y: float, width: float, height: float, shade: str, tip: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.1):.1f}" height="{max(height, 0.1):.1f}"'
    return f'<rect class="{shade}" {place} rx="1.5"><title>{escape(tip)}</title></rect>'


def _text(x: float, y: float, words: str, anchor: str, shade: str) -> str:
    return f'<text class="{shade}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
