"""What the guest is asked and what it answers, as plain data. Pure; frames.py encodes it, channel.py carries it."""

from __future__ import annotations

from dataclasses import dataclass, field

from libdsec.errors import UsageError

STDOUT = 1
STDERR = 2
DEFAULT_OUTPUT_BYTES = 1024 * 1024
MAX_OUTPUT_BYTES = 64 * 1024 * 1024
MIN_KEPT_BYTES = 4 * 1024 * 1024
MAX_EXEC_ID = 64
MAX_ARGS_BYTES = 2 * 1024 * 1024 - 65536  # argv, env and their framing in one EXEC frame
MAX_RLIMITS = 16
RLIM_INFINITY = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rlimit:
    """One resource limit; `resource` is a RLIMIT_* number of Linux, soft and hard are in its own unit."""

    resource: int
    soft: int
    hard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecSpec:
    """One command, exactly: nothing is added to argv or env.

    user: "" or "0" (root inside), "name", "uid", "name:group", "uid:gid"; names resolve in the sandbox's own
    /etc/passwd and /etc/group, a bare number means that uid and the same gid, without supplementary groups.
    cwd: absolute, resolved inside the root; magic links (/proc/self/fd/N) are refused.
    pty: (rows, cols); output is then all on stream 1, and stdin is the terminal. stdin False: EOF at once.
    timeout_s: enforced inside, kills the whole tree. exec_id: 1-64 of [A-Za-z0-9_-], "" lets the channel choose one;
    an id that the guest knows attaches to that exec instead of running it again.
    hold: while somebody is attached and slow the program waits, as in a pipe, and no output is dropped.
    """

    argv: tuple[bytes, ...]
    env: tuple[tuple[bytes, bytes], ...] = ()
    cwd: bytes = b"/"
    user: str = ""
    rlimits: tuple[Rlimit, ...] = ()
    pty: tuple[int, int] | None = None
    stdin: bool = False
    timeout_s: float | None = None
    max_output_bytes: int = DEFAULT_OUTPUT_BYTES
    exec_id: str = ""
    no_new_privs: bool = True
    hold: bool = False

    def check(self) -> None:
        """UsageError naming the field that the guest would refuse."""
        if not self.argv or not self.argv[0]:
            raise UsageError("bad_argv", "argv is empty", field="argv", hint="give at least the program's name")
        size = 0
        for name, items in (("argv", self.argv), ("env", tuple(k + b"=" + v for k, v in self.env))):
            for index, item in enumerate(items):
                size += len(item) + 16
                if b"\0" in item:
                    raise UsageError("bad_" + name, "holds a NUL byte", field=f"{name}[{index}]", hint="remove it")
        if size > MAX_ARGS_BYTES:
            raise UsageError(
                "args_too_large", f"argv and env take {size} bytes", field="argv",
                hint=f"at most {MAX_ARGS_BYTES}; pass content through files or stdin",
            )  # fmt: skip
        if any(not key or b"=" in key for key, _ in self.env):
            raise UsageError("bad_env", "a name is empty or holds '='", field="env", hint="use NAME, then its value")
        if not self.cwd.startswith(b"/") or b"\0" in self.cwd or len(self.cwd) > 4095:
            raise UsageError("bad_cwd", f"{self.cwd[:80]!r}", field="cwd", hint="use an absolute path")
        if len(self.exec_id) > MAX_EXEC_ID or not all(c.isascii() and (c.isalnum() or c in "_-") for c in self.exec_id):
            raise UsageError("bad_exec_id", f"{self.exec_id[:80]!r}", field="exec_id", hint="1-64 of [A-Za-z0-9_-]")
        if self.timeout_s is not None and not 0 < self.timeout_s < 2**31:
            raise UsageError("bad_timeout", f"{self.timeout_s}", field="timeout_s", hint="a positive number of seconds")
        if not 0 <= self.max_output_bytes <= MAX_OUTPUT_BYTES:
            raise UsageError(
                "bad_max_output", f"{self.max_output_bytes}", field="max_output_bytes",
                hint=f"0 to {MAX_OUTPUT_BYTES}",
            )  # fmt: skip
        if len(self.rlimits) > MAX_RLIMITS:
            raise UsageError("too_many_rlimits", f"{len(self.rlimits)}", field="rlimits", hint=f"at most {MAX_RLIMITS}")
        if self.pty is not None and not all(1 <= n <= 65535 for n in self.pty):
            raise UsageError("bad_pty", f"{self.pty}", field="pty", hint="rows and cols are 1 to 65535")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """Output bytes at `offset` of the exec's one log, which runs over both streams. A jump in offset is a gap."""

    stream: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StartError:
    """Why the program never ran. code: cwd_missing, cwd_denied, user_unknown, command_not_found, command_denied,
    command_invalid, rlimit_denied, no_memory, no_processes, pty_failed, start_failed; errno as on Linux (0: none).
    """

    code: str
    message: str
    errno: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecOutcome:
    """How an exec ended. Exactly one of exit_code, signal and start_error is set.

    oom_killed: the kernel killed it, or what its shell waited for, because the sandbox had no memory left.
    host_signal: the last signal that SIGNAL sent to it (0: none), so that a SIGKILL of ours is told from others.
    total_bytes: written by the program; truncated: stdout + stderr hold less than that.
    max_rss_kib and cpu_s are those of the program and its reaped children (wait4(2)).
    """

    exec_id: str
    exit_code: int | None = None
    signal: int | None = None
    start_error: StartError | None = None
    timed_out: bool = False
    oom_killed: bool = False
    host_signal: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    total_bytes: int = 0
    duration_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_kib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecState:
    """One exec that the guest remembers, running or ended.

    log_from..log_to: kept output is [0, head_end) and [tail_start, total_bytes). background: its tree still has
    live processes after its main one ended.
    """

    exec_id: str
    running: bool
    pid: int
    exit_code: int | None = None
    signal: int | None = None
    start_error: StartError | None = None
    timed_out: bool = False
    oom_killed: bool = False
    host_signal: int = 0
    total_bytes: int = 0
    head_end: int = 0
    tail_start: int = 0
    background: bool = False
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """One directory entry. kind: file, dir, symlink, fifo, socket, char, block. mode is st_mode & 07777."""

    name: bytes
    kind: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    nlink: int = 1
    link: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """An entry left out of a tree transfer. reason: fifo, socket, device, unsafe, changed, too_deep, unreadable."""

    name: bytes
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSummary:
    """Result of a tree upload."""

    files: int
    total_bytes: int
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEvent:
    """kind: created, modified, removed, moved_from, moved_to, attrib, overflow (look again: events were lost).

    path is relative to the watched one; cookie pairs moved_from with moved_to.
    """

    kind: str
    path: bytes
    is_dir: bool = False
    cookie: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAttempt:
    """One thing to try with an exec's rights.

    kind and args: open_read/open_write (target = path; nothing is created), socket (domain, type, protocol),
    connect (target = "ip port", TCP), syscall (number, up to six arguments).
    errnos: the acceptable outcomes, 0 for success; a fatal signal counts as 1000 + its number.
    """

    kind: str
    args: tuple[int, ...] = ()
    target: bytes = b""
    errnos: tuple[int, ...] = field(default=(1, 13))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFinding:
    """What an attempt came to: errno (0 success, 1000 + n killed by signal n) and whether that was acceptable."""

    attempt: PolicyAttempt
    errno: int
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The guest's greeting. boot_id changes when dsec-init was started anew."""

    version: int
    features: int
    boot_id: bytes
    max_payload: int


def kept_output_bytes(memory_mib: int) -> int:
    """What dsec-init keeps of the output of all commands, in a sandbox of that memory, to which it is charged.

    A sixteenth: it is part of dsec-init's size, and the largest process is the first to be killed.
    """
    return min(MAX_OUTPUT_BYTES, max(MIN_KEPT_BYTES, memory_mib * 1024 * 1024 // 16))
