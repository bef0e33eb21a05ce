"""All that a demo run found, and the table that sums it up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nomad_dsec.demo.measure import Latencies, percentile

if TYPE_CHECKING:
    from nomad_dsec.demo.judging import Judging
    from nomad_dsec.demo.probes import Isolation
    from nomad_dsec.demo.rollout import Rollout


@dataclass(slots=True, kw_only=True)
class Crash:
    """The SIGKILL of the node daemon, in seconds of the stage."""

    killed_at: float
    back_at: float
    in_flight: int
    old_pid: int
    new_pid: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One run of the demo."""

    image: str
    facts: dict[str, str]
    backend: str = "container"
    latencies: Latencies = field(default_factory=Latencies)
    rollouts: list[Rollout] = field(default_factory=list)
    execs: int = 0
    rollouts_s: float = 0.0
    groups_ms: list[float] = field(default_factory=list)
    crash: Crash | None = None
    isolation: Isolation | None = None
    judging: Judging | None = None
    lost: int = 0
    left_over: int = 0
    took_s: float = 0.0

    @property
    def faults(self) -> list[Rollout]:
        """Rollouts that the platform could not finish."""
        return [rollout for rollout in self.rollouts if rollout.fault]

    @property
    def sandboxes(self) -> int:
        """How many were made in all."""
        return len(self.rollouts) + 1 + len(self.latencies.create_ms) + self.latencies.burst

    def summary(self) -> list[tuple[str, str]]:
        """Rows of the summary, for the terminal and the report."""
        found = self.latencies

        def pair(values: list[float], digits: int) -> str:
            return f"{percentile(values, 50):.{digits}f} / {percentile(values, 99):.{digits}f} ms"

        rows = [
            ("backend", self.backend),
            ("sandboxes made", str(self.sandboxes)),
            ("create + kill, 16 at a time", f"{found.burst_rate:.0f} /s"),
            ("first create, which mounts the image", f"{found.first_ms:.0f} ms"),
            ("create, p50 / p99", pair(found.create_ms, 1)),
            ("exec round trip, p50 / p99", pair(found.exec_ms, 2)),
            ("kill, p50", f"{percentile(found.kill_ms, 50):.1f} ms"),
            ("rollouts", f"{len(self.rollouts)} in {len({r.group for r in self.rollouts})} groups"),
            ("execs of the agents", f"{self.execs} in {self.rollouts_s:.1f} s"),
            ("rewards", self._rewards()),
        ]
        if self.crash is not None:
            gap = self.crash.back_at - self.crash.killed_at
            rows.append(("node daemon killed", f"{self.crash.in_flight} execs in flight; back after {gap:.2f} s"))
        rows += [("rollouts masked by faults", str(len(self.faults))), ("sandboxes lost", str(self.lost))]
        if self.isolation is not None:
            denied, tried = self.isolation.denied("default"), len(self.isolation.outcomes)
            rows.append(("attempts denied, default profile", f"{denied} of {tried}"))
        rows += self._judged()
        rows.append(("left over at the end", str(self.left_over)))
        return rows

    def _judged(self) -> list[tuple[str, str]]:
        if self.judging is None:
            return []
        if not self.judging.judged:
            return [("submissions judged", "none: " + "; ".join(self.judging.missing))]
        given = self.judging.verdicts()
        planted = sum(1 for one in self.judging.judged if one.submission.verdict == "internal_error")
        notes = {"internal_error": f" ({planted} planted: a checker that is broken)"}
        verdicts = [f"{verdict} {count}{notes.get(verdict, '')}" for verdict, count in given.most_common()]
        return [
            ("submissions judged", f"{len(self.judging.judged)} in {self.judging.took_s:.1f} s"),
            ("verdicts", ", ".join(verdicts)),
            ("verdicts astray", str(len(self.judging.astray))),
        ]

    def _rewards(self) -> str:
        rewards = [rollout.reward for rollout in self.rollouts if rollout.reward is not None]
        if not rewards:
            return "none"
        solved = sum(1 for reward in rewards if reward >= 0.999)
        groups = sorted({rollout.group for rollout in self.rollouts})
        members = [[r.reward for r in self.rollouts if r.group == one and r.reward is not None] for one in groups]
        means = ", ".join(f"{sum(group) / len(group):.2f}" if group else "none" for group in members)
        mean = sum(rewards) / len(rewards)
        return f"mean {mean:.2f} (by group {means}), {solved} solved of {len(rewards)}"
