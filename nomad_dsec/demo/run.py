"""The stages of the demo, one after the other, with progress bars; at the end nothing of it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libdsec.client import AsyncClient
from libdsec.errors import DsecError, PlatformError
from libdsec.sandbox import AsyncSandbox
from libdsec.wire import LIVE_STATES

from nomad_dsec.demo.agents import cast
from nomad_dsec.demo.judging import judge
from nomad_dsec.demo.measure import machine_facts, measure
from nomad_dsec.demo.outcome import Crash, Outcome
from nomad_dsec.demo.probes import PROFILES, probe
from nomad_dsec.demo.rollout import Rollout, Stage, run_rollout, set_advantages
from nomad_dsec.demo.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rich.progress import Progress

    from nomad_dsec.dev.layout import DevState, Layout

_STEPS_EACH = 7
_KILL_AT = 0.4
_BACK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """groups of `size` rollouts; creates, execs and burst: how much the latency stage does.

    submissions: how many the judging stage judges; 0 leaves it out.
    """

    image: str
    groups: int = 4
    size: int = 8
    creates: int = 40
    execs: int = 400
    burst: int = 120
    submissions: int = 250
    crash: bool = True


async def run_demo(layout: Layout, state: DevState, options: DemoOptions, progress: Progress) -> Outcome:
    """All stages against a running `dsec dev`."""
    began = time.monotonic()
    outcome = Outcome(image=options.image, facts=await asyncio.to_thread(machine_facts))
    async with AsyncClient(state.endpoint, state.api_key) as client:
        with_bar = _Bars(progress)
        moved = with_bar.start("latency: creates and execs", options.creates + options.burst)
        outcome.latencies = await measure(
            client, options.image, creates=options.creates, execs=options.execs, burst=options.burst, moved=moved
        )
        await _rollouts(client, layout, options, outcome, with_bar)
        moved = with_bar.start("isolation: what must not work", len(PROFILES) + 1)
        outcome.isolation = await probe(client, options.image, moved)
        if options.submissions:
            told = with_bar.tally("judging: submissions in several languages", options.submissions)
            outcome.judging = await judge(client, options.image, options.submissions, told)
        left = await AsyncSandbox.list(client=client)
        outcome.lost = sum(1 for info in left if info.state == "lost")
        outcome.left_over = sum(1 for info in left if info.state in LIVE_STATES)
    outcome.took_s = time.monotonic() - began
    return outcome


class _Bars:
    """Starts a bar for each stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def start(self, title: str, total: int) -> Callable[[], None]:
        """A bar; call the result for each unit done."""
        task = self._progress.add_task(title, total=total, note="")

        def moved() -> None:
            self._progress.advance(task)
            done = self._progress.tasks[task]
            self._progress.update(task, note=f"{done.completed:.0f} / {done.total:.0f}")

        return moved

    def tally(self, title: str, total: int) -> Callable[[str], None]:
        """A bar that counts words beside its progress; call the result with the word of each unit done."""
        task, words = self._progress.add_task(title, total=total, note=""), Counter[str]()

        def told(word: str) -> None:
            words[word] += 1
            counts = ", ".join(f"{one.replace('_', ' ')} {count}" for one, count in words.most_common())
            self._progress.update(task, advance=1, note=f"{words.total()} / {total}: {counts}")

        return told

    def finish(self) -> None:
        """The last bar's total was a guess: what came is all there is."""
        last = self._progress.tasks[-1]
        self._progress.update(last.id, total=last.completed, note=f"{last.completed:.0f}")

    def note(self, text: str) -> None:
        """A line above the bars."""
        self._progress.console.print(text)


async def _rollouts(client: AsyncClient, layout: Layout, options: DemoOptions, outcome: Outcome, bars: _Bars) -> None:
    expected = options.groups * options.size * _STEPS_EACH
    reached = asyncio.Event()
    moved = bars.start("rollouts: agents explore, edit, test", expected)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        moved()
        if done >= expected * _KILL_AT:
            reached.set()

    stage = Stage(step)
    async with asyncio.TaskGroup() as tasks:
        members = (_group(client, options, number, stage, outcome) for number in range(options.groups))
        groups = [tasks.create_task(member) for member in members]
        if options.crash:
            crash = tasks.create_task(_crash(layout, stage, reached, bars))
            await asyncio.wait(groups)
            reached.set()
            outcome.crash = await crash
    bars.finish()
    outcome.rollouts_s = stage.now()
    outcome.execs = stage.execs
    outcome.rollouts.sort(key=lambda rollout: (rollout.group, rollout.index))
    set_advantages(outcome.rollouts)


async def _group(client: AsyncClient, options: DemoOptions, number: int, stage: Stage, outcome: Outcome) -> None:
    """One prompt, `size` sandboxes made at once, one rollout in each."""
    task = TASKS[number % len(TASKS)]
    agents = cast(number, options.size)
    rollouts = [Rollout(group=number, index=at, task=task, agent=agent) for at, agent in enumerate(agents)]
    outcome.rollouts.extend(rollouts)
    async with _sandboxes(client, options, number, rollouts, stage, outcome) as sandboxes:
        await asyncio.gather(
            *(run_rollout(rollout, sandbox, stage) for rollout, sandbox in zip(rollouts, sandboxes, strict=False))
        )


@asynccontextmanager
async def _sandboxes(
    client: AsyncClient, options: DemoOptions, number: int, rollouts: list[Rollout], stage: Stage, outcome: Outcome
) -> AsyncIterator[list[AsyncSandbox]]:
    """A gang; when it can't be made, that is a fault of each of its rollouts."""
    began = stage.now()
    try:
        group = await AsyncSandbox.create_many(
            options.size,
            options.image,
            client=client,
            cpus=0.5,
            memory_mib=256,
            wait_s=120.0,
            labels={"demo": f"group-{number}"},
        )
    except DsecError as error:
        for rollout in rollouts:
            rollout.fault = str(error)
        yield []
        return
    outcome.groups_ms.append((stage.now() - began) * 1000)
    async with group:
        yield list(group)


async def _crash(layout: Layout, stage: Stage, reached: asyncio.Event, bars: _Bars) -> Crash:
    """SIGKILL the node daemon when enough has happened; return when its successor answers."""
    await reached.wait()
    before = layout.read_state()
    if before is None or "node" not in before.children:
        raise PlatformError("no_node", f"{layout.state_file} names no node daemon to kill")
    old = before.children["node"].pid
    in_flight, killed_at = stage.in_flight, stage.now()
    os.kill(old, signal.SIGKILL)
    bars.note(f"[red]SIGKILL[/red] to the node daemon (pid {old}) with {in_flight} execs in flight")
    async with asyncio.timeout(_BACK_S):
        while True:
            now = layout.read_state()
            new = now.children["node"].pid if now is not None and "node" in now.children else old
            if new != old and await _ready(layout):
                break
            await asyncio.sleep(0.02)
    bars.note(f"[green]back[/green] as pid {new} after {stage.now() - killed_at:.2f} s")
    return Crash(killed_at=killed_at, back_at=stage.now(), in_flight=in_flight, old_pid=old, new_pid=new)


async def _ready(layout: Layout) -> bool:
    async with AsyncClient(f"unix:{layout.node_socket}", "", reconnect_s=0.0) as direct:
        try:
            async with direct.transport.open("GET", "/readyz", timeout_s=2.0):
                return True
        except DsecError:
            return False
