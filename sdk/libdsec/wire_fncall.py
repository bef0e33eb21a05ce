"""Wire types of fncall: one stateless call, a submission judged by tests, and their results.

Seconds and MiB. A verdict is about the program; the only fault among them is `internal_error`.

Gateway and node daemon have the same paths: POST /v1/fncall FnRequest -> FnResult, POST /v1/fncall/submit SubmitRequest
-> SubmitResult, POST /v1/fncall/cancel CancelRequest -> Ok, GET /v1/fncall/languages?image= -> LanguageList. A gateway
passes a body on as it came and says in headers whose it is and which digest the image's name stands for. A connection
that ends before the reply cancels its call.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from libdsec.wire import MAX_ARG_BYTES, _Reply, _Wire

Verdict = Literal[
    "accepted",
    "wrong_answer",
    "runtime_error",
    "compile_error",
    "cpu_time_limit",
    "wall_time_limit",
    "memory_limit",
    "output_limit",
    "internal_error",
]
VERDICTS: tuple[str, ...] = Verdict.__args__  # type: ignore[attr-defined]

MAX_STDIN_BYTES = 128 * 1024 * 1024
MAX_CALL_BYTES = 192 * 1024 * 1024  # a request as JSON: stdin of the largest size as base64, and the rest
NAMESPACE_HEADER = "X-Dsec-Namespace"  # gateway to node: whose call it is, for fair shares
DIGEST_HEADER = "X-Dsec-Digest"  # gateway to node: what `image` stands for
MAX_FILES = 256
MAX_TESTS = 1000

FileName = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[^/\x00]+(/[^/\x00]+)*$")]


class FnLimits(_Wire, kw_only=True):
    """What one call may use. cpu_s counts the whole tree; wall_s starts when the program starts, never in a queue."""

    cpu_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    wall_s: Annotated[float, Meta(gt=0, le=3600)] = 20.0
    memory_mib: Annotated[int, Meta(ge=4, le=65_536)] = 256
    output_bytes: Annotated[int, Meta(ge=0, le=64 * 1024 * 1024)] = 1024 * 1024
    disk_mib: Annotated[int, Meta(ge=1, le=16_384)] = 64
    pids: Annotated[int, Meta(ge=1, le=4096)] = 64


class Checker(_Wire, kw_only=True):
    """How stdout is compared with the expected output.

    exact: byte for byte. tokens: split at white space. float: tokens, numbers within abs_tol or rel_tol.
    program: `code` in `language` reads files input, output, expected (argv 1-3); exit 0 accepts, 1 refuses, others are
    internal_error. It runs where the submission never was.
    """

    kind: Literal["exact", "tokens", "float", "program"] = "tokens"
    abs_tol: Annotated[float, Meta(ge=0)] = 1e-9
    rel_tol: Annotated[float, Meta(ge=0)] = 1e-9
    code: str = ""
    language: str = ""


class FnRequest(_Wire, kw_only=True):
    """One call: `code` in a `language`, or an exact `argv`. Files go into the working directory by relative name."""

    image: Annotated[str, Meta(min_length=1, max_length=512)]
    code: str = ""
    language: Annotated[str, Meta(max_length=32)] = ""
    argv: list[Annotated[str, Meta(max_length=MAX_ARG_BYTES)]] = []
    stdin: bytes = b""
    files: Annotated[dict[FileName, bytes], Meta(max_length=MAX_FILES)] = {}
    fetch_files: Annotated[list[FileName], Meta(max_length=MAX_FILES)] = []
    env: dict[str, str] = {}
    args: list[Annotated[str, Meta(max_length=MAX_ARG_BYTES)]] = []
    limits: FnLimits = msgspec.field(default_factory=FnLimits)
    compile_limits: FnLimits = msgspec.field(default_factory=lambda: FnLimits(cpu_s=30, wall_s=60, memory_mib=1024))
    clean: bool = False
    expected: bytes | None = None
    checker: Checker = msgspec.field(default_factory=Checker)
    call_id: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{0,64}$")] = ""
    queue_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class FnTest(_Wire, kw_only=True):
    """One test of a submission. With neither expected nor a checker program, a clean exit is accepted."""

    stdin: bytes = b""
    expected: bytes | None = None
    name: Annotated[str, Meta(max_length=256)] = ""


class SubmitRequest(_Wire, kw_only=True):
    """A program and its tests: compiled once, run once a test."""

    program: FnRequest
    tests: Annotated[list[FnTest], Meta(min_length=1, max_length=MAX_TESTS)]
    stop_at_first: bool = False


class CompileResult(_Reply, kw_only=True):
    """What the compiler said. cached: the result came from the cache and no compiler ran."""

    ok: bool
    exit_code: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    cached: bool = False


class FnResult(_Reply, kw_only=True):
    """How one call went. exit_code or signal is set when the program ended; queue_s is never part of wall_s."""

    verdict: Verdict
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    cpu_s: float = 0.0
    wall_s: float = 0.0
    queue_s: float = 0.0
    max_rss_mib: float = 0.0
    compile: CompileResult | None = None
    files: dict[str, bytes] = {}
    message: str = ""
    name: str = ""
    call_id: str = ""


class SubmitResult(_Reply, kw_only=True):
    """verdict: accepted when every test was, else that of the first that was not. Tests not run are not listed."""

    verdict: Verdict
    tests: list[FnResult] = []
    compile: CompileResult | None = None
    passed: int = 0
    total: int = 0


class CancelRequest(_Wire, kw_only=True):
    """End a call that waits or runs; unknown ids are fine."""

    call_id: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]


class LanguageInfo(_Reply, kw_only=True):
    """One language on one image; `available` false carries the reason."""

    name: str
    available: bool
    reason: str = ""
    compiled: bool = False
    version: str = ""


class LanguageList(_Reply, kw_only=True):
    """The languages of an image."""

    languages: list[LanguageInfo]
