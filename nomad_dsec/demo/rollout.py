"""One rollout: an agent, its sandbox, its reward, and a record of every step for the report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from libdsec.errors import DsecError

from nomad_dsec.demo.agents import AGENTS
from nomad_dsec.demo.tasks import REPOSITORY, Task, grade, set_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from libdsec.results import ExecResult
    from libdsec.sandbox import AsyncSandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an agent did from `begin` to `end`, in seconds of the stage; outcome: ok, failed, timeout or oom."""

    kind: str
    begin: float
    end: float
    outcome: str


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One member of a group. fault: why the platform could not finish it; then the reward is masked, not zero."""

    group: int
    index: int
    task: Task
    agent: str
    sandbox: str = ""
    reward: float | None = None
    advantage: float | None = None
    fault: str = ""
    steps: list[Step] = field(default_factory=list)


class Stage:
    """The clock and the counters that all rollouts share. `moved` is called after every step."""

    def __init__(self, moved: Callable[[], None]) -> None:
        self.began = time.monotonic()
        self.execs = 0
        self.in_flight = 0
        self._moved = moved

    def now(self) -> float:
        """Seconds since the stage began."""
        return time.monotonic() - self.began

    def step_done(self) -> None:
        """Count one step."""
        self._moved()


class Tools:
    """What an agent may do, each use recorded."""

    def __init__(self, sandbox: AsyncSandbox, rollout: Rollout, stage: Stage) -> None:
        self._sandbox = sandbox
        self._rollout = rollout
        self._stage = stage

    async def run(self, cmd: Sequence[str] | str, *, timeout_s: float = 30.0) -> ExecResult:
        """Run a command in the repository."""
        begin = self._stage.now()
        self._stage.in_flight += 1
        try:
            result = await self._sandbox.exec(
                cmd, cwd=REPOSITORY, env={"PYTHONPATH": REPOSITORY, "HOME": "/tmp"}, timeout_s=timeout_s
            )
        finally:
            self._stage.in_flight -= 1
        self._stage.execs += 1
        outcome = "timeout" if result.timed_out else "oom" if result.oom_killed else "ok" if result.ok else "failed"
        self._note("exec", begin, outcome)
        return result

    async def read(self, path: str) -> str:
        """Read a file."""
        begin = self._stage.now()
        text = await self._sandbox.files.read_text(path)
        self._note("file", begin, "ok")
        return text

    async def write(self, path: str, text: str) -> None:
        """Write a file."""
        begin = self._stage.now()
        await self._sandbox.files.write(path, text)
        self._note("file", begin, "ok")

    def _note(self, kind: str, begin: float, outcome: str) -> None:
        self._rollout.steps.append(Step(kind=kind, begin=begin, end=self._stage.now(), outcome=outcome))
        self._stage.step_done()


async def run_rollout(rollout: Rollout, sandbox: AsyncSandbox, stage: Stage) -> None:
    """Set up, let the agent work, grade. A fault of the platform is noted and never becomes a reward."""
    rollout.sandbox = sandbox.id
    begin = stage.now()
    try:
        await set_up(sandbox)
        rollout.steps.append(Step(kind="setup", begin=begin, end=stage.now(), outcome="ok"))
        await AGENTS[rollout.agent](Tools(sandbox, rollout, stage), rollout.task)
        begin = stage.now()
        rollout.reward = await grade(sandbox, rollout.task)
        rollout.steps.append(Step(kind="grade", begin=begin, end=stage.now(), outcome="ok"))
    except DsecError as error:
        rollout.fault = str(error)


def set_advantages(rollouts: Sequence[Rollout]) -> None:
    """GRPO's advantage: the reward less its group's mean, over its standard deviation; faults are left out."""
    for group in {rollout.group for rollout in rollouts}:
        graded = [rollout for rollout in rollouts if rollout.group == group and rollout.reward is not None]
        rewards = [rollout.reward or 0.0 for rollout in graded]
        if not rewards:
            continue
        mean = sum(rewards) / len(rewards)
        deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
        for rollout in graded:
            rollout.advantage = ((rollout.reward or 0.0) - mean) / deviation if deviation > 1e-9 else 0.0
