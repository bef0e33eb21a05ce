"""SandboxFusion's POST /run_code as ours: its request to an FnRequest, our result to its reply. Pure.

Source of shapes and words: bytedance/SandboxFusion (sandbox/server/sandbox_api.py, sandbox/runners) and the clients in
verl (verl/utils/reward_score/sandbox_fusion) and on PyPI (sandbox-fusion). Where its limits are not enforced, ours are:
memory, processes, disk and output are bounded, and a program that passes one is `Failed` with a return code.
"""

from __future__ import annotations

import base64
import binascii
import posixpath
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from libdsec.errors import UsageError
from libdsec.wire_fncall import MAX_FILES, FnLimits, FnRequest
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from libdsec.wire_fncall import CompileResult, FnResult

# Its names of languages, and ours.
LANGUAGES: Mapping[str, str] = {
    "python": "python",
    "cpp": "cpp",
    "nodejs": "javascript",
    "go": "go",
    "java": "java",
    "bash": "bash",
    "typescript": "typescript",
    "rust": "rust",
    "c": "c",
}
# Those that are a program of the image run on the code as a file: (file name, argv).
BY_ARGV: Mapping[str, tuple[str, Sequence[str]]] = {
    "pytest": ("test_main.py", ("python3", "-B", "-m", "pytest", "-p", "no:cacheprovider", "test_main.py")),
}
# What it knows besides: a call for one is a fault of the platform, so that no client grades it.
UNSERVED = frozenset(
    "go_test php csharp sql cuda lua R perl D_ut ruby scala julia junit kotlin_script jest verilog python_gpu lean "
    "swift racket".split()
)
TIME_MAX_S = 3500.0  # the wire's longest queue holds it and QUEUE_S
OUTPUT_BYTES = 1024 * 1024  # as much of each stream as it keeps
DISK_MIB = 256
PIDS = 256
MEMORY_MIB = 1024  # when the client gives no limit
COMPILE_MEMORY_MIB = 1024
CPU_PER_WALL = 2.0  # its time limit is of the clock; runtimes such as Java's use a second core for themselves
# Clients give up 10 s after both their timeouts; by then they have heard from us. What is compiled waits for a place
# twice, for its compiler and for itself, each time for half of it. What is not compiled may wait for a place as long
# as its compile could have taken: verl scores a call that it gave up as a failed test.
QUEUE_S = 8.0
COMPILED = frozenset({"cpp", "go", "java", "typescript", "rust", "c"})
KILLED = -9


class RunCodeRequest(msgspec.Struct, kw_only=True):
    """Its request; fields of later versions are ignored, as it does."""

    code: str
    language: Annotated[str, Meta(min_length=1, max_length=64)]
    compile_timeout: float = 10.0
    run_timeout: float = 10.0
    memory_limit_MB: int = -1
    stdin: str | None = None
    files: Annotated[dict[str, str | None], Meta(max_length=MAX_FILES)] = {}
    fetch_files: Annotated[list[str], Meta(max_length=MAX_FILES)] = []
    args: list[str] = []


class CommandRunResult(msgspec.Struct, kw_only=True):
    """One command of a reply. return_code is None when it ran out of time, negative for a signal."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class Ours(msgspec.Struct, kw_only=True):
    """What our result says and theirs can't; its clients ignore it."""

    verdict: str
    cpu_s: float
    queue_s: float
    max_rss_mib: float
    message: str
    stdout_truncated: bool
    stderr_truncated: bool


class RunCodeReply(msgspec.Struct, kw_only=True):
    """Its reply. message: why, for SandboxError."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}
    dsec: Ours | None = None


def is_unserved(language: str) -> bool:
    """Whether it is one of its languages that we do not run."""
    return language in UNSERVED


def to_call(request: RunCodeRequest, *, image: str) -> FnRequest:
    """The call; UsageError names the field."""
    memory = MEMORY_MIB if request.memory_limit_MB <= 0 else min(65_536, max(4, request.memory_limit_MB))
    run_s = _seconds(request.run_timeout, "run_timeout")
    files = {_relative(name, "files"): _decoded(name, text) for name, text in request.files.items() if text is not None}
    compile_s = _seconds(request.compile_timeout, "compile_timeout")
    call = FnRequest(
        image=image,
        stdin=(request.stdin or "").encode("utf-8", "surrogatepass"),
        fetch_files=[_relative(name, "fetch_files") for name in request.fetch_files],
        limits=_limits(run_s, memory),
        compile_limits=_limits(compile_s, max(COMPILE_MEMORY_MIB, memory)),
        queue_timeout_s=QUEUE_S / 2 if request.language in COMPILED else QUEUE_S + compile_s,
    )
    if request.language in BY_ARGV:
        name, argv = BY_ARGV[request.language]
        code = {name: request.code.encode("utf-8", "surrogatepass")}
        return msgspec.structs.replace(call, argv=[*argv, *request.args], files=files | code)
    ours = LANGUAGES.get(request.language)
    if ours is None:
        raise UsageError(
            "unknown_language", f"{request.language!r} is no language", field="language", hint=", ".join(LANGUAGES)
        )
    return msgspec.structs.replace(call, code=request.code, language=ours, args=request.args, files=files)


def to_reply(request: RunCodeRequest, result: FnResult, *, node: str) -> RunCodeReply:
    """The reply for a call that was judged."""
    ours = Ours(
        verdict=result.verdict,
        cpu_s=result.cpu_s,
        queue_s=result.queue_s,
        max_rss_mib=result.max_rss_mib,
        message=result.message,
        stdout_truncated=result.stdout_truncated,
        stderr_truncated=result.stderr_truncated,
    )
    compiled = _compile_result(result.compile) if result.compile is not None else None
    if result.verdict == "internal_error":
        message = result.message or "the platform failed"
        return RunCodeReply(status="SandboxError", message=message, executor_pod_name=node, dsec=ours)
    ran = None if result.verdict == "compile_error" else _run_result(result)
    return RunCodeReply(
        status="Success" if result.verdict == "accepted" else "Failed",
        compile_result=compiled,
        run_result=ran,
        executor_pod_name=node,
        files=_fetched(request, result),
        dsec=ours,
    )


def fault(message: str) -> RunCodeReply:
    """The reply when the platform could not do it: its clients neither grade nor fail on it."""
    return RunCodeReply(status="SandboxError", message=message)


def _run_result(result: FnResult) -> CommandRunResult:
    out_of_time = result.verdict in ("cpu_time_limit", "wall_time_limit")
    return CommandRunResult(
        status="TimeLimitExceeded" if out_of_time else "Finished",
        execution_time=result.wall_s,
        return_code=None if out_of_time else _return_code(result),
        stdout=_text(result.stdout),
        stderr=_text(result.stderr),
    )


def _return_code(result: FnResult) -> int:
    """A killed program has the signal's number, negative. One that passed a limit has failed, whatever it returned."""
    code = -result.signal if result.signal is not None else result.exit_code
    return KILLED if result.verdict != "accepted" and not code else code or 0


def _compile_result(compiled: CompileResult) -> CommandRunResult:
    out_of_time = not compiled.ok and compiled.exit_code is None
    return CommandRunResult(
        status="TimeLimitExceeded" if out_of_time else "Finished",
        execution_time=compiled.wall_s,
        return_code=None if out_of_time else compiled.exit_code or (0 if compiled.ok else 1),
        stdout=_text(compiled.stdout),
        stderr=_text(compiled.stderr),
    )


def _fetched(request: RunCodeRequest, result: FnResult) -> dict[str, str]:
    """Under the names that were asked for; a file that is not there is left out."""
    names = {name: _relative(name, "fetch_files") for name in request.fetch_files}
    return {
        asked: base64.b64encode(result.files[name]).decode() for asked, name in names.items() if name in result.files
    }


def _limits(wall_s: float, memory_mib: int) -> FnLimits:
    return FnLimits(
        cpu_s=min(TIME_MAX_S, wall_s * CPU_PER_WALL),
        wall_s=wall_s,
        memory_mib=memory_mib,
        output_bytes=OUTPUT_BYTES,
        disk_mib=DISK_MIB,
        pids=PIDS,
    )


def _seconds(value: float, field: str) -> float:
    if not value > 0:
        raise UsageError("bad_request", f"{value} is no length of time", field=field, hint="give seconds above 0")
    return min(TIME_MAX_S, value)


def _relative(name: str, field: str) -> str:
    """A name inside the working directory; one that leads out of it is refused."""
    plain = posixpath.normpath(name) if name else "."
    if plain in (".", "..") or plain.startswith(("/", "../")) or "\0" in plain or len(plain) > 255:
        raise UsageError(
            "bad_name", f"{name[:80]!r} is no file below the working directory", field=field, hint="give a/b.txt"
        )
    return plain


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except (binascii.Error, ValueError) as error:
        raise UsageError("bad_file", f"{name[:80]!r} is not base64: {error}", field="files") from error


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
