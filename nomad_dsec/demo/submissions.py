"""The submissions of the demo: real programs over several languages, each made for one verdict. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

from libdsec.wire_fncall import Checker, FnLimits, FnRequest

SHORT = FnLimits(cpu_s=0.5, wall_s=5.0, memory_mib=64, output_bytes=64 * 1024)
ASLEEP = FnLimits(cpu_s=0.5, wall_s=1.0, memory_mib=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A program and the verdict that it must get. title: what it does, in words."""

    title: str
    language: str
    verdict: str
    code: str
    stdin: bytes = b""
    expected: bytes | None = None
    limits: FnLimits = SHORT
    checker: Checker = field(default_factory=Checker)


_NUMBERS = b"8 3 -5 40 12\n"
_SUM = b"58"
_PYTHON_SUM = "print(sum(map(int, input().split())))\n"
_C_SUM = """#include <stdio.h>
int main(void) {
    long sum = 0, x;
    while (scanf("%ld", &x) == 1) sum += x;
    printf("%ld\\n", sum);
}
"""
_CPP_PRIMES = """#include <iostream>
#include <vector>
int main() {
    std::size_t n, count = 0;
    std::cin >> n;
    std::vector<bool> composite(n + 1);
    for (std::size_t i = 2; i <= n; i++) {
        if (composite[i]) continue;
        count++;
        for (std::size_t j = i * i; j <= n; j += i) composite[j] = true;
    }
    std::cout << count << '\\n';
}
"""
_PYTHON_QUEENS = """def place(row, columns, left, right, n):
    if row == n:
        return 1
    free = ~(columns | left | right) & ((1 << n) - 1)
    count = 0
    while free:
        bit = free & -free
        free ^= bit
        count += place(row + 1, columns | bit, (left | bit) << 1, (right | bit) >> 1, n)
    return count
print(place(0, 0, 0, 0, int(input())))
"""
_ANY_ORDER = """import sys
given, wrote, wanted = (open(path).read().split() for path in sys.argv[1:4])
sys.exit(0 if sorted(wrote) == sorted(wanted) else 1)
"""

SUBMISSIONS: tuple[Submission, ...] = (
    Submission(title="sum", language="python", verdict="accepted", code=_PYTHON_SUM, stdin=_NUMBERS, expected=_SUM),
    Submission(
        title="eight queens", language="python", verdict="accepted", code=_PYTHON_QUEENS, stdin=b"6", expected=b"4"
    ),
    Submission(title="sum", language="c", verdict="accepted", code=_C_SUM, stdin=_NUMBERS, expected=_SUM),
    Submission(title="primes", language="cpp", verdict="accepted", code=_CPP_PRIMES, stdin=b"100000", expected=b"9592"),
    Submission(
        title="sort -n",
        language="bash",
        verdict="accepted",
        code="tr ' ' '\\n' | sort -n | tr '\\n' ' '\n",
        stdin=b"3 1 2",
        expected=b"1 2 3",
    ),
    Submission(
        title="pi, to a tolerance",
        language="python",
        verdict="accepted",
        code="print(355 / 113)",
        expected=b"3.1415926",
        checker=Checker(kind="float", rel_tol=1e-6),
    ),
    Submission(
        title="any order, by a checker program",
        language="python",
        verdict="accepted",
        code="print(3, 1, 2)",
        expected=b"1 2 3",
        checker=Checker(kind="program", language="python", code=_ANY_ORDER),
    ),
    Submission(title="off by one", language="python", verdict="wrong_answer", code="print(57)", expected=_SUM),
    Submission(
        title="reads one number too few",
        language="c",
        verdict="wrong_answer",
        stdin=_NUMBERS,
        expected=_SUM,
        code=_C_SUM.replace("while (scanf", "for (int i = 0; i < 4 && scanf").replace("== 1)", "== 1; i++)"),
    ),
    Submission(title="divides by zero", language="python", verdict="runtime_error", code="print(1 // 0)"),
    Submission(
        title="writes through NULL",
        language="c",
        verdict="runtime_error",
        code="int main(void) { *(volatile int *)0 = 1; }",
    ),
    Submission(title="exit 3", language="bash", verdict="runtime_error", code="exit 3"),
    Submission(
        title="throws",
        language="cpp",
        verdict="runtime_error",
        code='#include <stdexcept>\nint main() { throw std::runtime_error("no"); }',
    ),
    Submission(title="a missing semicolon", language="cpp", verdict="compile_error", code="int main() { return 0 }"),
    Submission(title="an unknown name", language="c", verdict="compile_error", code="int main(void) { return nope; }"),
    Submission(title="while True: pass", language="python", verdict="cpu_time_limit", code="while True: pass"),
    Submission(
        title="spins in a child", language="bash", verdict="cpu_time_limit", code="(while :; do :; done) & wait"
    ),
    Submission(title="for (;;)", language="c", verdict="cpu_time_limit", code="int main(void) { for (;;) ; }"),
    Submission(
        title="sleeps",
        language="python",
        verdict="wall_time_limit",
        limits=ASLEEP,
        code="import time; time.sleep(60)",
    ),
    Submission(
        title="ignores SIGTERM in a session of its own",
        language="bash",
        verdict="wall_time_limit",
        limits=ASLEEP,
        code="trap '' TERM; setsid sleep 60 & sleep 60",
    ),
    Submission(
        title="allocates for ever",
        language="python",
        verdict="memory_limit",
        code="held = []\nwhile True: held.append(bytearray(1 << 20))",
    ),
    Submission(
        title="allocates for ever",
        language="cpp",
        verdict="memory_limit",
        code="#include <cstring>\n#include <cstdlib>\n"
        "int main() { for (;;) { void *p = malloc(1 << 20); if (p) memset(p, 1, 1 << 20); } }",
    ),
    Submission(title="floods stdout", language="python", verdict="output_limit", code='while True: print("x" * 1000)'),
    Submission(title="yes", language="bash", verdict="output_limit", code="yes"),
    Submission(
        title="meets a checker that is broken",
        language="python",
        verdict="internal_error",
        code="print(1)",
        expected=b"1",
        checker=Checker(kind="program", language="python", code="raise SystemExit(9)"),
    ),
)


def request_of(submission: Submission, *, image: str, number: int) -> FnRequest:
    """The call of a submission. A comment with the number makes each a program of its own: no compile is shared."""
    mark = "#" if submission.language in ("python", "bash") else "//"
    return FnRequest(
        image=image,
        code=f"{submission.code.rstrip()}\n{mark} attempt {number}\n",
        language=submission.language,
        stdin=submission.stdin,
        expected=submission.expected,
        limits=submission.limits,
        checker=submission.checker,
        queue_timeout_s=300.0,
    )
