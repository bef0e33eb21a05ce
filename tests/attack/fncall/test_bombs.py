"""Bombs and floods in calls: each is judged right, says which layer stopped it, and leaves nothing behind.

The positive twins are in the same programs: what is refused beyond a limit works below it.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from tests.attack.fncall.lanes import assert_clean
from tests.kit.abilities import needs

if TYPE_CHECKING:
    from tests.kit.calls import CallHost

pytestmark = [
    needs("root", "erofs", "cgroup", "filters", "debootstrap", "debian-packages"),
    pytest.mark.leaks_ok,
    pytest.mark.timeout(300),
]


async def test_fork_bomb(calls: CallHost) -> None:
    """Layer: the pids controller (EAGAIN from fork); then the time limit of the whole tree."""
    code = (
        "import os, time\n"
        "made = 0\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0: time.sleep(30); os._exit(0)\n"
        "        made += 1\n"
        "except OSError as e: print(made, e.errno)\n"
    )
    few = await calls.python(code, limits={"pids": 20})
    assert few.verdict == "accepted", few
    made, number = map(int, few.stdout.split())
    assert number == errno.EAGAIN
    assert 15 <= made <= 30
    bomb = await calls.run(argv=["bash", "-c", ":(){ :|:& };:; wait; sleep 20"], limits={"wall_s": 2.0, "cpu_s": 1.0})
    assert bomb.verdict in ("wall_time_limit", "cpu_time_limit"), bomb
    await assert_clean(calls)


async def test_thread_bomb(calls: CallHost) -> None:
    """Layer: the pids controller counts threads."""
    code = (
        "import threading, time, os\n"
        "made = 0\n"
        "try:\n"
        "    while True: threading.Thread(target=time.sleep, args=(30,), daemon=True).start(); made += 1\n"
        "except RuntimeError: print(made, flush=True); os._exit(0)\n"
    )
    result = await calls.python(code, limits={"pids": 30, "memory_mib": 512})
    assert result.verdict == "accepted", result
    assert 20 <= int(result.stdout) <= 40
    await assert_clean(calls)


async def test_disk_filler(calls: CallHost) -> None:
    """Layers: the tmpfs's size (ENOSPC), its inodes, RLIMIT_FSIZE; the rest of the root is read-only (EROFS)."""
    code = (
        "import os\n"
        "def attempt(name, size, chunk=1 << 20):\n"
        "    done = 0\n"
        "    try:\n"
        "        with open(name, 'wb') as f:\n"
        "            while done < size: done += f.write(b'x' * chunk)\n"
        "    except OSError as e: print(name, done >> 20, e.errno)\n"
        "    else: print(name, done >> 20, 0)\n"
        "attempt('/tmp/a', 5 << 20)\n"
        "attempt('/dev/shm/b', 100 << 20)\n"
        "attempt('/etc/c', 1)\n"
        "attempt('/dev/d', 1)\n"
        "attempt('/var/tmp/e', 1)\n"
        "os.remove('/dev/shm/b')\n"
        "made = 0\n"
        "try:\n"
        "    while True: open(f'/tmp/work/{made}', 'x').close(); made += 1\n"
        "except OSError as e: print('inodes', made > 1000, e.errno)\n"
    )
    result = await calls.python(code, limits={"disk_mib": 16, "memory_mib": 256})
    got = {line.split()[0]: line.split()[1:] for line in result.stdout.decode().splitlines()}
    assert got["/tmp/a"] == ["5", "0"], result
    assert got["/dev/shm/b"] == ["11", str(errno.ENOSPC)]
    assert got["/etc/c"][1] in (str(errno.EROFS), str(errno.EACCES))
    assert got["/dev/d"][1] in (str(errno.EROFS), str(errno.EACCES))
    assert got["/var/tmp/e"] == ["0", str(errno.EROFS)]
    assert got["inodes"] == ["True", str(errno.ENOSPC)]
    sparse = await calls.python("open('x', 'wb').truncate(1 << 40)", limits={"disk_mib": 16})
    assert b"File too large" in sparse.stderr
    await assert_clean(calls)


async def test_what_fills_memory_by_files_is_charged_and_given_back(calls: CallHost) -> None:
    """Layer: the memory controller, since tmpfs pages are the call's; the charge is gone before the next call."""
    fill = "open('/dev/shm/fat', 'wb').write(b'x' * (200 << 20))"
    result = await calls.python(fill, limits={"disk_mib": 256, "memory_mib": 100})
    assert result.verdict == "memory_limit", result
    held = await calls.python("open('/tmp/fat', 'wb').write(b'x' * (60 << 20))", limits={"memory_mib": 200})
    assert held.verdict == "accepted", held
    again = await calls.python("b = bytearray(80 << 20)", limits={"memory_mib": 100})
    assert again.verdict == "accepted", again
    await assert_clean(calls)


async def test_memory_limit_holds_on_this_hosts_cgroups(calls: CallHost) -> None:
    """Case E10: twice the limit dies as memory, nine tenths live; so do many small ones together."""
    inside = await calls.python("b = bytearray(56 << 20); print(len(b))", limits={"memory_mib": 64})
    twice = await calls.python("b = bytearray(128 << 20)", limits={"memory_mib": 64})
    together = await calls.python(
        "import os, time\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0: b = bytearray(16 << 20); time.sleep(5); os._exit(0)\n"
        "for _ in range(8): os.wait()",
        limits={"memory_mib": 64, "wall_s": 10.0},
    )
    assert inside.verdict == "accepted", inside
    assert twice.verdict == "memory_limit", twice
    assert together.verdict == "memory_limit", together
    await assert_clean(calls)


async def test_daemons_and_the_deaf_die_with_their_call(calls: CallHost) -> None:
    """Layer: the pid namespace. A double-forked setsid daemon, one that ignores SIGTERM, a stopped one."""
    code = (
        "import os, signal, time\n"
        "for sig in range(1, 32):\n"
        "    try: signal.signal(sig, signal.SIG_IGN)\n"
        "    except OSError: pass\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.close(1); os.close(2)\n"
        "        time.sleep(1000)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "print('left')\n"
    )
    result = await calls.python(code, limits={"wall_s": 5.0})
    assert (result.verdict, result.stdout) == ("accepted", b"left\n")
    deaf = await calls.python(code + "time.sleep(1000)", limits={"wall_s": 0.5})
    assert (deaf.verdict, deaf.signal) == ("wall_time_limit", 9)
    await assert_clean(calls)
