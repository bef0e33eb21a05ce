"""The judging stage: a few hundred submissions at once, and whether each got the verdict that it was made for."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from libdsec.errors import CapacityError
from libdsec.fncall import AsyncFnCall

from nomad_dsec.demo.submissions import SUBMISSIONS, request_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from libdsec.client import AsyncClient
    from libdsec.fncall_results import FnOutcome

    from nomad_dsec.demo.submissions import Submission

IN_FLIGHT = 32
ATTEMPTS_APART = 4  # attempts of a program that differ; further ones find their compile in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One submission as it was judged. error: the platform's fault, when there was no verdict."""

    submission: Submission
    verdict: str = ""
    error: str = ""
    message: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    queue_s: float = 0.0
    max_rss_mib: float = 0.0
    compiled: bool = False
    cached: bool = False

    @property
    def as_planned(self) -> bool:
        """It got the verdict that it was made for."""
        return self.verdict == self.submission.verdict


@dataclass(slots=True, kw_only=True)
class Judging:
    """All of the stage. missing: why calls, or a language, could not be had."""

    judged: list[Judged] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def rate(self) -> float:
        """Submissions a second, compiles and limits that had to be waited for included."""
        return len(self.judged) / self.took_s if self.took_s else 0.0

    @property
    def astray(self) -> list[Judged]:
        """Those that did not get the verdict they were made for."""
        return [one for one in self.judged if not one.as_planned]

    def verdicts(self) -> Counter[str]:
        """How often each was given."""
        return Counter(one.verdict or "no verdict" for one in self.judged)


async def judge(client: AsyncClient, image: str, count: int, moved: Callable[[str], None]) -> Judging:
    """Judge `count` submissions, each kind in turn; moved is told each one's verdict as it finishes."""
    found = Judging()
    try:
        languages = {row.name: row for row in await AsyncFnCall.languages(image, client=client)}
    except CapacityError as error:
        found.missing.append(str(error))
        return found
    wanted = {one.language for one in SUBMISSIONS}
    absent = sorted(name for name in wanted if name not in languages or not languages[name].available)
    found.missing += [f"{name}: {languages[name].reason if name in languages else 'not known'}" for name in absent]
    kinds = [one for one in SUBMISSIONS if one.language not in absent]
    chosen = [(kinds[number % len(kinds)], number // len(kinds)) for number in range(count)] if kinds else []
    requests = [request_of(one, image=image, number=number % ATTEMPTS_APART) for one, number in chosen]
    began = time.monotonic()
    async for outcome in AsyncFnCall.run_many(requests, in_flight=IN_FLIGHT, client=client):
        found.judged.append(_judged(chosen[outcome.index][0], outcome))
        moved(found.judged[-1].verdict or "no verdict")
    found.took_s = time.monotonic() - began
    return found


def by_kind(judged: Sequence[Judged]) -> list[tuple[Submission, list[Judged]]]:
    """In the order of SUBMISSIONS."""
    return [(kind, mine) for kind in SUBMISSIONS if (mine := [one for one in judged if one.submission is kind])]


def _judged(submission: Submission, outcome: FnOutcome) -> Judged:
    result = outcome.result
    if result is None:
        return Judged(submission=submission, error=str(outcome.error))
    return Judged(
        submission=submission,
        verdict=result.verdict,
        message=result.message,
        cpu_s=result.cpu_s,
        wall_s=result.wall_s,
        queue_s=result.queue_s,
        max_rss_mib=result.max_rss_mib,
        compiled=result.compile is not None,
        cached=result.compile is not None and result.compile.cached,
    )
