"""What programs do and what the judge says of it, on real lanes."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

import pytest
from libdsec.errors import CapacityError, StateError, UsageError
from libdsec.wire_fncall import Checker, FnTest

from tests.kit.abilities import needs

if TYPE_CHECKING:
    from tests.kit.calls import CallHost

pytestmark = [
    needs("root", "erofs", "cgroup", "filters", "debootstrap", "debian-packages"),
    pytest.mark.leaks_ok,
    pytest.mark.timeout(300),
]
DOUBLE_C = '#include <stdio.h>\nint main(void) { int n; scanf("%d", &n); printf("%d\\n", 2 * n); return 0; }'


async def test_four_ends_are_four_verdicts(calls: CallHost) -> None:
    """Case E7."""
    exits = await calls.run(argv=["sh", "-c", "exit 255"])
    killed = await calls.run(argv=["sh", "-c", "kill -9 $$"])
    late = await calls.run(argv=["sleep", "20"], limits={"wall_s": 0.3})
    fat = await calls.python("b = bytearray(128 << 20)", limits={"memory_mib": 64})
    assert (exits.verdict, exits.exit_code, exits.signal) == ("runtime_error", 255, None)
    assert (killed.verdict, killed.exit_code, killed.signal) == ("runtime_error", None, 9)
    assert (late.verdict, late.exit_code) == ("wall_time_limit", None)
    assert (fat.verdict, fat.exit_code) == ("memory_limit", None)


@pytest.mark.parametrize("how", ["zygote", "clean", "c"])
async def test_the_ways_to_run_agree(calls: CallHost, how: str) -> None:
    """One program in each; signals and codes are the program's own although it is not PID 1."""
    codes = {"ok": 0, "three": 3, "abort": None}
    for what, code in codes.items():
        if how == "c":
            body = {"ok": "return 0;", "three": "return 3;", "abort": "abort();"}[what]
            result = await calls.run(language="c", code=f"#include <stdlib.h>\nint main(void) {{ {body} }}")
        else:
            body = {"ok": "pass", "three": "import sys; sys.exit(3)", "abort": "import os; os.abort()"}[what]
            result = await calls.python(body, clean=how == "clean")
        assert result.exit_code == code, result
        assert result.signal == (6 if what == "abort" else None)


async def test_python_ends_as_python_does(calls: CallHost) -> None:
    """atexit, threads that are joined, SystemExit with words, a traceback without our frames."""
    code = (
        "import atexit, sys, threading, time\n"
        "atexit.register(lambda: print('bye'))\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        "print(__name__, sys.argv[1:])\n"
    )
    for clean in (False, True):
        result = await calls.python(code, args=["a b"], clean=clean)
        assert result.stdout == b"__main__ ['a b']\nthread\nbye\n", (clean, result)
        failed = await calls.python("def f():\n    1 / 0\nf()", clean=clean)
        assert failed.stderr.startswith(b"Traceback (most recent call last):\n  File "), failed
        assert failed.stderr.count(b'File "/tmp/work/main.py"') == failed.stderr.count(b"File ") == 2
        cut = await calls.python("import os; os.kill(os.getpid(), 2)", clean=clean)
        assert (cut.signal, cut.stderr.count(b"File ")) == (2, 1)
        words = await calls.python("import sys; sys.exit('no')", clean=clean)
        assert (words.exit_code, words.stderr) == (1, b"no\n")


async def test_what_an_interpreter_reads_at_its_start_is_kept(calls: CallHost) -> None:
    """Children of a zygote share its hash seed; a call that names one of its own has it."""
    code = "import sys; print(hash('a'), sys.flags.optimize)"
    outputs = [
        (await calls.python(code, env=env)).stdout
        for env in ({"PYTHONHASHSEED": "7"}, {"PYTHONHASHSEED": "7"}, {"PYTHONHASHSEED": "8", "PYTHONOPTIMIZE": "2"})
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].split()[0] != outputs[2].split()[0]
    assert outputs[2].split()[1] == b"2"


@pytest.mark.parametrize("size", [0, 1, 32 * 1024, 32 * 1024 + 1, 100 * 1024 * 1024])
async def test_stdin_is_whole_and_ends(calls: CallHost, size: int) -> None:
    """Inline, by descriptor, and none: a reader sees the end (E1) and every byte."""
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    code = "import sys, hashlib; d = sys.stdin.buffer.read(); print(len(d), hashlib.sha256(d).hexdigest())"
    result = await calls.python(code, stdin=data, limits={"memory_mib": 512, "wall_s": 60.0})
    assert result.stdout.split() == [str(size).encode(), hashlib.sha256(data).hexdigest().encode()], result


async def test_output_is_bytes(calls: CallHost) -> None:
    """Not UTF-8, zeros, more than one message holds."""
    data = bytes(range(256)) * 2000
    result = await calls.python(
        "import sys; sys.stdout.buffer.write(bytes(range(256)) * 2000); sys.stderr.buffer.write(b'\\xff\\0')"
    )
    assert result.stdout == data
    assert result.stderr == b"\xff\0"
    assert not result.stdout_truncated


async def test_a_flood_is_cut_and_told(calls: CallHost) -> None:
    """Stopped at the limit, with all that fits."""
    result = await calls.run(argv=["yes"], limits={"output_bytes": 10_000})
    assert result.verdict == "output_limit"
    assert (len(result.stdout), result.stdout_truncated, result.stderr_truncated) == (10_000, True, False)


async def test_cpu_time_is_that_of_the_tree(calls: CallHost) -> None:
    """Three children that burn together pass a limit that none of them passes."""
    code = "import os\nfor _ in range(3):\n    if os.fork() == 0:\n        while True: pass\nos.wait()"
    result = await calls.python(code, limits={"cpu_s": 0.6, "wall_s": 20.0})
    assert result.verdict == "cpu_time_limit"
    assert 0.6 < result.cpu_s < 1.6


async def test_files_in_and_out(calls: CallHost) -> None:
    """By relative name, with directories; what can't be fetched is missing, links are not followed."""
    code = (
        "import os\n"
        "os.makedirs('out'); open('out/sum', 'w').write(str(sum(map(int, open('in/n').read().split()))))\n"
        "os.symlink('/etc/passwd', 'leak'); os.mkfifo('pipe')"
    )
    result = await calls.python(code, files={"in/n": b"1 2 3"}, fetch_files=["out/sum", "leak", "pipe", "absent"])
    assert result.verdict == "accepted", result
    assert result.files == {"out/sum": b"6"}


async def test_a_submission_is_compiled_once(calls: CallHost) -> None:
    """Its tests share one compilation; the same source again comes from the cache."""
    tests = [FnTest(stdin=str(n).encode(), expected=str(2 * n).encode(), name=f"t{n}") for n in range(5)]
    first = await calls.submit(tests, language="c", code=DOUBLE_C)
    again = await calls.submit(tests, language="c", code=DOUBLE_C)
    assert (first.verdict, first.passed, first.total) == ("accepted", 5, 5)
    assert first.compile is not None
    assert again.compile is not None
    assert (first.compile.cached, again.compile.cached) == (False, True)
    broken = await calls.submit(tests, language="c", code="int main(")
    assert (broken.verdict, broken.tests) == ("compile_error", [])
    assert broken.compile is not None
    assert b"error" in broken.compile.stderr


async def test_one_source_asked_for_at_once_is_compiled_once(calls: CallHost) -> None:
    """Single flight."""
    code = "int main(void) { return 0; } /* at once */"
    results = await asyncio.gather(*(calls.run(language="c", code=code) for _ in range(6)))
    assert [result.verdict for result in results] == ["accepted"] * 6
    assert sum(not result.compile.cached for result in results if result.compile) == 1


async def test_stop_at_first_failure(calls: CallHost) -> None:
    """Tests behind the first failure are not run."""
    tests = [FnTest(stdin=b"1", expected=b"2"), FnTest(stdin=b"1", expected=b"9"), FnTest(stdin=b"3", expected=b"6")]
    code = "print(int(input()) * 2)"
    stopped = await calls.submit(tests, language="python", code=code, stop_at_first=True)
    whole = await calls.submit(tests, language="python", code=code)
    assert [test.verdict for test in stopped.tests] == ["accepted", "wrong_answer"]
    assert [test.verdict for test in whole.tests] == ["accepted", "wrong_answer", "accepted"]
    assert whole.verdict == "wrong_answer"


async def test_more_tests_than_the_queue_holds(calls: CallHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission's tests do not fill the queue that all share; a refusal is one error, whatever it has judged."""
    queue = calls.lanes.queue
    monkeypatch.setattr(queue, "waiting_max", queue.running_max)
    tests = [FnTest(stdin=str(n).encode(), expected=str(n).encode(), name=str(n)) for n in range(50)]
    judged = await calls.submit(tests, language="python", code="print(input())")
    assert (judged.verdict, judged.passed) == ("accepted", 50)
    assert [test.name for test in judged.tests] == [test.name for test in tests]
    monkeypatch.setattr(queue, "waiting_max", 0)
    with pytest.raises(CapacityError) as full:
        await calls.submit(tests, language="python", code="print(input())")
    assert full.value.code == "queue_full"


@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("sys.exit(0 if open(o).read() == open(e).read() + open(i).read() else 1)", "accepted"),
        ("print('off by one'); sys.exit(1)", "wrong_answer"),
        ("sys.exit(2)", "internal_error"),
    ],
)
async def test_checker_programs(calls: CallHost, body: str, verdict: str) -> None:
    """Exit 0 accepts, 1 refuses with its words, anything else is the checker's fault and no grade."""
    checker = Checker(kind="program", language="python", code=f"import sys\ni, o, e = sys.argv[1:]\n{body}")
    test = FnTest(stdin=b"in", expected=b"out")
    judged = await calls.submit([test], language="python", code="print('outin', end='')", checker=checker)
    assert judged.verdict == verdict, judged
    if verdict == "wrong_answer":
        assert judged.tests[0].message == "off by one"


async def test_what_the_image_lacks_is_no_compile_error(calls: CallHost) -> None:
    """A UsageError that names the field."""
    with pytest.raises(UsageError) as missing:
        await calls.run(language="go", code="package main\nfunc main() {}")
    assert (missing.value.code, missing.value.field) == ("language_unavailable", "language")
    with pytest.raises(UsageError) as unknown:
        await calls.run(argv=["nonesuch"])
    assert unknown.value.code == "command_not_found"
    with pytest.raises(UsageError) as outside:
        await calls.python("", files={"a/../../b": b""})
    assert outside.value.code == "bad_file_name"
    with pytest.raises(UsageError) as large:
        await calls.python("", files={"a": b"x" * (3 << 20)}, limits={"disk_mib": 1})
    assert large.value.code == "files_too_large"
    listed = await calls.lanes.languages("debian-dev", namespace="test", digest="")
    offered = {info.name: info for info in listed.languages}
    assert offered["c"].available
    assert offered["c"].version
    assert not offered["go"].available
    assert offered["go"].reason


async def test_waiting_is_no_running(calls: CallHost) -> None:
    """Case E9: a call that waited longer than its wall limit is not late; a queue that is too long says busy."""
    turns = calls.lanes.queue.running_max
    blockers = [asyncio.ensure_future(calls.run(argv=["sleep", "1"])) for _ in range(turns)]
    await asyncio.sleep(0.2)
    waited = await calls.python("print(1)", limits={"wall_s": 0.5})
    assert waited.verdict == "accepted"
    assert waited.queue_s > 0.4
    assert waited.wall_s < 0.5
    await asyncio.gather(*blockers)
    blockers = [asyncio.ensure_future(calls.run(argv=["sleep", "2"])) for _ in range(turns)]
    await asyncio.sleep(0.2)
    with pytest.raises(CapacityError) as busy:
        await calls.python("print(1)", queue_timeout_s=0.1)
    assert busy.value.code == "queue_deadline"
    assert busy.value.retry_after_s is not None
    await asyncio.gather(*blockers)


async def test_a_spinning_call_can_be_cancelled(calls: CallHost) -> None:
    """By its id, by leaving; the same id joins instead of running twice."""
    request = {"code": "while True: pass", "call_id": "spin", "limits": {"cpu_s": 60.0, "wall_s": 60.0}}
    first = asyncio.ensure_future(calls.python(**dict(request)))
    second = asyncio.ensure_future(calls.python(**dict(request)))
    await asyncio.sleep(0.3)
    assert calls.lanes.queue.running == 1
    calls.lanes.cancel("other", "spin")
    calls.lanes.cancel("test", "spin")
    for waiting in (first, second):
        with pytest.raises(StateError) as cancelled:
            await waiting
        assert cancelled.value.code == "cancelled"
    left = asyncio.ensure_future(calls.python("while True: pass", limits={"cpu_s": 60.0, "wall_s": 60.0}))
    await asyncio.sleep(0.3)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert calls.lanes.queue.running == 0
    assert (await calls.python("print(1)")).verdict == "accepted"


async def test_loops_on_every_core_do_not_starve_the_judge(calls: CallHost) -> None:
    """Case E11: twice as many as there are cores; each is judged by its own time, and we still answer."""
    count = 2 * calls.lanes.queue.running_max
    loops = [asyncio.ensure_future(calls.python("while True: pass", limits={"cpu_s": 1.0})) for _ in range(count)]
    beats = 0
    while not all(loop.done() for loop in loops):
        await asyncio.sleep(0.01)
        beats += 1
    results = [loop.result() for loop in loops]
    assert {result.verdict for result in results} == {"cpu_time_limit"}
    assert all(1.0 <= result.cpu_s < 2.0 for result in results)
    assert beats > 20
