"""What a command did, as data to grade. A non-zero exit, a signal, a timeout, an OOM kill are results, not errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from libdsec.errors import DsecError

if TYPE_CHECKING:
    from libdsec.wire import ExecReply


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended. Exactly one of exit_code and signal is set.

    stdout_bytes, stderr_bytes: what was kept, exact bytes; when `truncated`, head and tail. timed_out: our timeout
    killed the whole process tree. oom_killed: the memory limit of the sandbox killed it. total_bytes: what it wrote.
    duration_s: wall time of the program, without any queue of ours.
    """

    exec_id: str
    exit_code: int | None = None
    signal: int | None = None
    stdout_bytes: bytes = field(default=b"", repr=False)
    stderr_bytes: bytes = field(default=b"", repr=False)
    timed_out: bool = False
    oom_killed: bool = False
    truncated: bool = False
    total_bytes: int = 0
    duration_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_mib: float = 0.0

    @property
    def stdout(self) -> str:
        """The kept standard output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """The kept standard error as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out and not self.oom_killed

    def describe(self) -> str:
        """The end in a few words, such as `exit code 2` or `killed by signal 9 (timeout)`."""
        why = " (timeout)" if self.timed_out else " (out of memory)" if self.oom_killed else ""
        if self.exit_code is not None:
            return f"exit code {self.exit_code}{why}"
        return f"killed by signal {self.signal}{why}"

    def check(self) -> ExecResult:
        """Itself when `ok`, else CommandFailed that carries it."""
        if not self.ok:
            raise CommandFailed(self)
        return self


class CommandFailed(DsecError):
    """Raised only by `ExecResult.check()`: the user's command did not end with 0. `result` says how it ended."""

    kind = "command"

    def __init__(self, result: ExecResult) -> None:
        tail = (result.stderr or result.stdout).strip()[-500:]
        super().__init__("command_failed", f"{result.describe()}: {tail}" if tail else result.describe())
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        return (CommandFailed, (self.result,))


class Output(NamedTuple):
    """A piece of a live process's output, in the order it was written."""

    stream: Literal["stdout", "stderr"]
    data: bytes


def result_from_reply(reply: ExecReply) -> ExecResult:
    """The user's view of a finished exec."""
    return ExecResult(
        exec_id=reply.exec_id,
        exit_code=reply.exit_code,
        signal=reply.signal,
        stdout_bytes=reply.stdout,
        stderr_bytes=reply.stderr,
        timed_out=reply.timed_out,
        oom_killed=reply.oom_killed,
        truncated=reply.truncated,
        total_bytes=reply.total_bytes,
        duration_s=reply.duration_s,
        cpu_s=reply.cpu_s,
        max_rss_mib=reply.max_rss_mib,
    )
