"""Case E10 for calls: their limits on whatever cgroups this machine has. Run in a machine by test_cgroup2_host.py.

On the machine that runs the other tests, tests/attack/fncall asks the same and more.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest_asyncio

from tests.kit.abilities import needs
from tests.kit.bare_calls import BareCalls, mount_image, open_bare_calls
from tests.kit.vm.machine import CALL_ROOT, INIT_BINARY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

pytestmark = needs("root", "cgroup", "filters", "call-root")
MIB = 1 << 20
FORKS = (
    "import os, time\n"
    "made = 0\n"
    "try:\n"
    "    while True:\n"
    "        if os.fork() == 0: time.sleep(60); os._exit(0)\n"
    "        made += 1\n"
    "except OSError as e: print(made, e.errno)\n"
)


@pytest_asyncio.fixture
async def calls(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[BareCalls]:
    """Lanes over Python and a shell."""
    scratch = tmp_path_factory.mktemp("calls")
    mount_image(Path(CALL_ROOT), scratch / "root")
    async with open_bare_calls(scratch, root=scratch / "root", init_binary=Path(INIT_BINARY)) as opened:
        yield opened


async def test_limits_hold_and_nothing_stays_charged(calls: BareCalls) -> None:
    """One lane sees all of it in a row, so each step also shows that the one before left nothing behind."""
    layout = calls.backend.host.cgroups.layout
    assert {"cpu", "memory", "pids"} <= layout.v2, "this machine's controllers are of cgroup v1"
    first = await calls.python("print(1)")
    assert (first.verdict, first.stdout) == ("accepted", b"1\n"), first
    (lane,) = (lane for line in calls.pool._lines.values() for lane in line.idle)
    cgroup = lane._live.cgroup
    assert cgroup is not None

    fits = await calls.python("b = bytearray(56 << 20); print(len(b))", limits={"memory_mib": 64})
    assert fits.verdict == "accepted", fits
    limit = int(Path(cgroup.unified, "memory.max").read_text())
    assert 64 * MIB <= limit <= 128 * MIB, "the call's limit is in the file that the kernel enforces"
    twice = await calls.python("b = bytearray(128 << 20)", limits={"memory_mib": 64})
    assert (twice.verdict, twice.exit_code) == ("memory_limit", None), twice
    together = await calls.python(
        "import os, time\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0: b = bytearray(16 << 20); time.sleep(5); os._exit(0)\n"
        "for _ in range(8): os.wait()",
        limits={"memory_mib": 64, "wall_s": 60.0, "cpu_s": 60.0},
    )
    assert together.verdict == "memory_limit", together
    files = await calls.python(
        "open('/dev/shm/fat', 'wb').write(b'x' * (150 << 20))",
        limits={"disk_mib": 256, "memory_mib": 64, "wall_s": 60.0},
    )
    assert files.verdict == "memory_limit", files
    held = await calls.python(
        "open('/dev/shm/fat', 'wb').write(b'x' * (60 << 20))", limits={"disk_mib": 128, "memory_mib": 200}
    )
    assert held.verdict == "accepted", held
    assert int(Path(cgroup.unified, "memory.current").read_text()) < 60 * MIB, "a file of the call is still charged"
    again = await calls.python("b = bytearray(56 << 20)", limits={"memory_mib": 64})
    assert again.verdict == "accepted", again

    forks = await calls.python(FORKS, limits={"pids": 20, "wall_s": 60.0})
    assert forks.verdict == "accepted", forks
    assert 15 <= int(forks.stdout.split()[0]) <= 30, forks
    burn = await calls.python(
        "import os\nfor _ in range(3):\n    if os.fork() == 0:\n        while True: pass\nos.wait()",
        limits={"cpu_s": 1.0, "wall_s": 60.0},
    )
    assert burn.verdict == "cpu_time_limit", burn
    assert 1.0 <= burn.cpu_s < 3.0, burn
    late = await calls.python("import time; time.sleep(60)", limits={"wall_s": 1.0})
    assert late.verdict == "wall_time_limit", late
    plain = await calls.python("import os; os.kill(os.getpid(), 9)")
    assert (plain.verdict, plain.signal) == ("runtime_error", 9), plain

    for _ in range(500):
        if len(cgroup.pids()) <= 3:
            break
        await asyncio.sleep(0.01)
    assert len(cgroup.pids()) <= 3, "PID 1, the next call's reaper and the zygote"
    assert (calls.pool.started, calls.pool.replaced) == (1, 0), "one lane did it all"
