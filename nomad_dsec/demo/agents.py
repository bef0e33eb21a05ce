"""Scripted agents: each explores, edits and tests as a model would, and some are wrong, lazy or dishonest.

They stand in for sampled completions of one prompt: what matters is that rewards in a group differ for good reasons.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from nomad_dsec.demo.tasks import REPOSITORY, Task, edited

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from libdsec.results import ExecResult

    from nomad_dsec.demo.rollout import Tools

    Agent = Callable[[Tools, Task], Awaitable[None]]

# What one group of eight is made of: enough that is right, wrong and hostile to give every group a spread of rewards.
MIX = ("historian", "reader", "half", "guesser", "cheat", "looper", "hog", "reader")


async def _explore(tools: Tools, task: Task) -> None:
    await tools.run("ls -la && git log --oneline && git status --short")
    await tools.run(["cat", task.test])
    await _test(tools, task)


async def _test(tools: Tools, task: Task, *, timeout_s: float = 30.0) -> ExecResult:
    command = ["python3", "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", task.test]
    return await tools.run(command, timeout_s=timeout_s)


async def _edit(tools: Tools, task: Task, edits: tuple[tuple[str, str], ...]) -> None:
    path = f"{REPOSITORY}/{task.source}"
    await tools.write(path, edited(await tools.read(path), edits))


async def historian(tools: Tools, task: Task) -> None:
    """Finds the commit that broke it and takes the file back."""
    await _explore(tools, task)
    await tools.run(["git", "diff", "HEAD~1", "--", task.source])
    await tools.run(["git", "checkout", "-q", "HEAD~1", "--", task.source])
    await _test(tools, task)


async def reader(tools: Tools, task: Task) -> None:
    """Reads the code and repairs it."""
    await _explore(tools, task)
    await tools.run(["grep", "-n", "def ", task.source])
    await _edit(tools, task, task.right)
    await _test(tools, task)
    await tools.run("git diff --stat")


async def half(tools: Tools, task: Task) -> None:
    """Stops after the first thing that helps."""
    await _explore(tools, task)
    await _edit(tools, task, task.half)
    await _test(tools, task)


async def guesser(tools: Tools, task: Task) -> None:
    """Edits without reading, and makes it worse."""
    await tools.run(["sed", "-i", "s/return /return not /", task.source])
    await _test(tools, task)


async def cheat(tools: Tools, task: Task) -> None:
    """Changes the tests instead of the code."""
    await _explore(tools, task)
    await tools.write(f"{REPOSITORY}/{task.test}", '"""All fine."""\n\n\ndef test_fine():\n    assert True\n')
    await _test(tools, task)


async def looper(tools: Tools, task: Task) -> None:
    """Writes an endless loop; the timeout ends the whole tree of the run."""
    await tools.run(["cat", task.source])
    await tools.write(f"{REPOSITORY}/{task.source}", "while True:\n    pass\n")
    await _test(tools, task, timeout_s=2.0)


async def hog(tools: Tools, task: Task) -> None:
    """Runs out of memory on the way, sees that in the result, and goes on to the repair."""
    await _explore(tools, task)
    await tools.run(["python3", "-c", "x = bytearray(2 << 30); x[::4096] = b'x' * (len(x) // 4096); print(len(x))"])
    await _edit(tools, task, task.right)
    await _test(tools, task)


AGENTS: dict[str, Agent] = {
    "historian": historian,
    "reader": reader,
    "half": half,
    "guesser": guesser,
    "cheat": cheat,
    "looper": looper,
    "hog": hog,
}


def cast(group: int, size: int) -> list[str]:
    """Which agents make up a group: the mix, repeated to its size, in an order of the group's own."""
    names = [MIX[at % len(MIX)] for at in range(size)]
    random.Random(group).shuffle(names)  # noqa: S311 - the same order in every run
    return names
