"""The faulty repository in a sandbox, the tasks set on it, and their grading by tests that the agent can't touch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from libdsec.errors import DeadlineExceeded, NotFoundError

if TYPE_CHECKING:
    from libdsec.sandbox import AsyncSandbox

HOME = Path(__file__).parent / "task"
REPOSITORY = "/work/tally"
# What the program itself may use; time that it waits for a busy machine is not held against it. pytest needs half a
# second. An endless loop uses all of it, which takes as many times longer as programs share a core: with 5 s and forty
# busy sandboxes on two cores that was 100 s, the longest step of the whole demo.
GRADE_CPU_S = 3
GRADE_TIMEOUT_S = 120.0
_GIT = "git -c user.name=tally -c user.email=tally@localhost -c init.defaultBranch=main -c commit.gpgsign=false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One fault to repair. right: what the faulty text must become; half: an edit that helps with a part of it."""

    name: str
    source: str
    test: str
    right: tuple[tuple[str, str], ...]
    half: tuple[tuple[str, str], ...]


TASKS = (
    Task(
        name="durations",
        source="tally/duration.py",
        test="tests/test_duration.py",
        right=(
            ("(d|h|m|s|ms)", "(ms|d|h|m|s)"),
            (
                "    if not text:\n",
                "    if ''.join(map(''.join, parts)) != text:\n"
                "        raise ValueError(f'not a duration: {text!r}')\n    if not text:\n",
            ),
        ),
        half=(("(d|h|m|s|ms)", "(ms|d|h|m|s)"),),
    ),
    Task(
        name="percentiles",
        source="tally/stats.py",
        test="tests/test_stats.py",
        right=(
            ("    values.sort()\n", "    ordered = sorted(values)\n"),
            ("values[int(len(values) * share / 100) - 1]", "ordered[-(-len(ordered) * share // 100) - 1]"),
        ),
        half=(("    values.sort()\n    return values[", "    ordered = sorted(values)\n    return ordered["),),
    ),
    Task(
        name="spans",
        source="tally/spans.py",
        test="tests/test_spans.py",
        right=(("begin < merged", "begin <= merged"), ("[0], end)", "[0], max(merged[-1][1], end))")),
        half=(("begin < merged", "begin <= merged"),),
    ),
)


async def set_up(sandbox: AsyncSandbox) -> None:
    """Put the repository with its history into the sandbox; its last commit brought the faults in."""
    commits = sorted((HOME / "commits").iterdir())
    script = [f"set -e; mkdir -p {REPOSITORY}; cd {REPOSITORY}; {_GIT} init -q ."]
    await sandbox.files.upload(HOME / "commits", "/work/commits")
    for commit in commits:
        message = commit.name.partition("-")[2].capitalize()
        script.append(f"cp -r /work/commits/{commit.name}/. .; git add .; {_GIT} commit -q -m '{message}'")
    script.append("rm -rf /work/commits")
    (await sandbox.exec("\n".join(script), timeout_s=60)).check()


async def grade(sandbox: AsyncSandbox, task: Task) -> float:
    """The share of the task's tests that pass, 0 when they use too much CPU.

    Raises DeadlineExceeded when the machine was too busy for a verdict: that is no reward.
    The tests and the grader come from here, so what the agent did to its copies does not count.
    """
    pristine = next(path for path in sorted((HOME / "commits").glob(f"*/{task.test}")))
    await sandbox.files.write(f"{REPOSITORY}/{task.test}", pristine, parents=True)
    await sandbox.files.write("/work/grade.py", HOME / "grade.py")
    result = await sandbox.exec(
        ["python3", "/work/grade.py", task.test, "/work/grade.json"],
        cwd=REPOSITORY,
        env={"PYTHONPATH": REPOSITORY},
        rlimits={"cpu": GRADE_CPU_S},
        timeout_s=GRADE_TIMEOUT_S,
    )
    if result.timed_out:
        raise DeadlineExceeded("grade_timeout", f"no grade of {task.name} within {GRADE_TIMEOUT_S:g} s")
    if not result.ok:
        return 0.0
    try:
        counts = json.loads(await sandbox.files.read("/work/grade.json", length=4096))
    except (NotFoundError, ValueError):
        return 0.0
    return counts["passed"] / counts["total"] if counts["total"] else 0.0


def edited(text: str, edits: tuple[tuple[str, str], ...]) -> str:
    """The text with every edit made."""
    for old, new in edits:
        text = text.replace(old, new)
    return text
