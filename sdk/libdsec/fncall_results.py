"""What a call came to, as data to grade: verdicts, outputs as bytes and text, times without any queue of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from libdsec import wire_fncall as wire
    from libdsec.errors import DsecError
    from libdsec.wire_fncall import CompileResult, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class FnResult:
    """How one call went. `verdict` is about the program, but for `internal_error`, which is ours: mask, do not grade.

    exit_code or signal is set when the program ended by itself or was killed. stdout_bytes, stderr_bytes: exact; a
    `..._truncated` flag says that more was written than was kept. cpu_s counts the whole tree; queue_s is never part of
    wall_s. compile: for compiled languages. files: those asked for by `fetch_files` that were there.
    """

    verdict: Verdict
    exit_code: int | None = None
    signal: int | None = None
    stdout_bytes: bytes = field(default=b"", repr=False)
    stderr_bytes: bytes = field(default=b"", repr=False)
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    cpu_s: float = 0.0
    wall_s: float = 0.0
    queue_s: float = 0.0
    max_rss_mib: float = 0.0
    compile: CompileResult | None = None
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    message: str = ""
    name: str = ""
    call_id: str = ""

    @property
    def stdout(self) -> str:
        """The kept standard output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """The kept standard error as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def accepted(self) -> bool:
        """The program ended well, and what it wrote is what was expected, if anything was."""
        return self.verdict == "accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class FnSubmission:
    """A submission judged by tests. verdict: accepted when every test was, else that of the first that was not.

    tests: those that ran, in order. passed and total count the tests that were given.
    """

    verdict: Verdict
    tests: Sequence[FnResult] = ()
    compile: CompileResult | None = None
    passed: int = 0
    total: int = 0

    @property
    def accepted(self) -> bool:
        """Every test was accepted."""
        return self.verdict == "accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class FnOutcome:
    """One of many calls, as it finished: its place in what was given, and its result or the platform's error."""

    index: int
    result: FnResult | None = None
    error: DsecError | None = None

    def get(self) -> FnResult:
        """The result, or raises the error."""
        if self.result is None:
            assert self.error is not None
            raise self.error
        return self.result


def result_of(reply: wire.FnResult) -> FnResult:
    """The user's view of a reply."""
    return FnResult(
        verdict=reply.verdict,
        exit_code=reply.exit_code,
        signal=reply.signal,
        stdout_bytes=reply.stdout,
        stderr_bytes=reply.stderr,
        stdout_truncated=reply.stdout_truncated,
        stderr_truncated=reply.stderr_truncated,
        cpu_s=reply.cpu_s,
        wall_s=reply.wall_s,
        queue_s=reply.queue_s,
        max_rss_mib=reply.max_rss_mib,
        compile=reply.compile,
        files=reply.files,
        message=reply.message,
        name=reply.name,
        call_id=reply.call_id,
    )


def submission_of(reply: wire.SubmitResult) -> FnSubmission:
    """The user's view of a judged submission."""
    return FnSubmission(
        verdict=reply.verdict,
        tests=tuple(result_of(test) for test in reply.tests),
        compile=reply.compile,
        passed=reply.passed,
        total=reply.total,
    )
