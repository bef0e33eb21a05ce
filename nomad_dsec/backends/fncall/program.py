"""From a request to what a lane runs: words, environment, files, limits. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from libdsec.errors import UsageError
from libdsec.wire_fncall import FnLimits

from nomad_dsec.backends.fncall import lane_wire as wire
from nomad_dsec.backends.fncall.lane_wire import LaneCall
from nomad_dsec.backends.fncall.languages import BINARY, UNPACK, find_language, render

if TYPE_CHECKING:
    from collections.abc import Mapping

    from libdsec.wire_fncall import FnRequest

    from nomad_dsec.backends.fncall.languages import Language

MIB: Final = 1024 * 1024
STACK_MAX_BYTES: Final = 256 * MIB
STACK_MIN_BYTES: Final = 8 * MIB
FETCH_MAX_BYTES: Final = 64 * MIB
ARTEFACT_MAX_BYTES: Final = 128 * MIB
COMPILE_DISK_MIB: Final = 512
COMPILE_PIDS: Final = 256
NOFILE: Final = 1024
WARM_LIMITS: Final = FnLimits(cpu_s=300, wall_s=300, memory_mib=1024, disk_mib=768, pids=COMPILE_PIDS)
_BASE_ENV: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
# Read by the interpreter when it starts, so they mean nothing to a child of one that has started.
_START_UP_ENV: Final = frozenset(
    f"PYTHON{name}"
    for name in (
        "HASHSEED", "PATH", "HOME", "OPTIMIZE", "UNBUFFERED", "UTF8", "IOENCODING", "WARNINGS", "DEVMODE", "DEBUG",
        "MALLOC", "TRACEMALLOC", "FAULTHANDLER", "INTMAXSTRDIGITS", "SAFEPATH", "NOUSERSITE", "INSPECT", "VERBOSE",
        "BREAKPOINT", "COERCECLOCALE", "STARTUP", "ASYNCIODEBUG",
    )
)  # fmt: skip
_OWN_ENV: Final = {"HOME": "/tmp", "PWD": "/tmp/work", "USER": "nobody"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A request that makes sense. language: None for an exact argv."""

    request: FnRequest
    language: Language | None
    argv: tuple[bytes, ...]

    @property
    def zygote(self) -> str:
        """The interpreter whose zygote may run it, or "": for a clean run, or one that says how it is to start."""
        row = self.language
        if row is None or not row.zygote or self.request.clean or not _START_UP_ENV.isdisjoint(self.request.env):
            return ""
        return row.run[0]

    @property
    def is_compiled(self) -> bool:
        """Is there a compiler to run before."""
        return self.language is not None and bool(self.language.compile)

    @property
    def runs_binary(self) -> bool:
        """Is what runs the compiled program itself, handed over as a descriptor."""
        return self.is_compiled and self.language is not None and self.language.run[0] == "./{binary}"


def read_program(request: FnRequest) -> Program:
    """UsageError names the field that is wrong."""
    if bool(request.argv) == bool(request.language):
        raise UsageError(
            "bad_request", "give either a language and code, or an argv", field="argv" if request.argv else "language"
        )
    _check_names(request)
    if request.argv:
        if request.code:
            raise UsageError("bad_request", "code goes with a language", field="code", hint="or put it into files")
        return Program(request=request, language=None, argv=_words([*request.argv, *request.args], "argv"))
    row = find_language(request.language)
    if row.source in request.files and request.code:
        raise UsageError("bad_file_name", f"the code itself is called {row.source}", field=f"files.{row.source}")
    argv = _words([*render(row.run, row), *request.args], "args")
    return Program(request=request, language=row, argv=argv)


def _check_names(request: FnRequest) -> None:
    for field, names in (("files", request.files), ("fetch_files", request.fetch_files)):
        for name in names:
            if any(part in (".", "..") for part in name.split("/")) or (field == "files" and "*" in name):
                raise UsageError(
                    "bad_file_name", f"{name[:80]!r} is not a name below the working directory", field=f"{field}.{name}"
                )
    for name, value in request.env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise UsageError("bad_env", f"{name[:80]!r} can't be in an environment", field="env")


def _words(words: list[str] | tuple[str, ...], field: str) -> tuple[bytes, ...]:
    made = tuple(word.encode("utf-8", "surrogateescape") for word in words)
    if any(b"\0" in word for word in made):
        raise UsageError("bad_request", "a word holds a zero byte", field=field)
    return made


def environment(program: Program, image_env: Mapping[str, str]) -> list[bytes]:
    """The image's, the language's and the request's, the last one winning."""
    row_env = program.language.env if program.language else {}
    return list(wire.env_words(_BASE_ENV | dict(image_env) | _OWN_ENV | row_env | program.request.env))


def tool_environment(row: Language, image_env: Mapping[str, str]) -> list[bytes]:
    """What a language's tools run with where no request has a say."""
    return list(wire.env_words(_BASE_ENV | dict(image_env) | _OWN_ENV | row.env))


def sources(program: Program) -> dict[str, tuple[int, bytes]]:
    """Files of the request, the code among them."""
    files = {name: (0o644, content) for name, content in program.request.files.items()}
    if program.language is not None and (program.request.code or program.language.source not in files):
        files[program.language.source] = (0o644, program.request.code.encode("utf-8", "surrogateescape"))
    return files


def plan_compile(program: Program, env: list[bytes]) -> LaneCall:
    """The compiler's run."""
    row, limits = program.language, program.request.compile_limits
    assert row is not None
    disk_mib = max(limits.disk_mib, COMPILE_DISK_MIB)
    return _call(
        limits,
        argv=_words(render(row.compile, row), "language"),
        env=env,
        files=sources(program),
        fetch=list(render(row.artefacts, row)),
        fetch_bytes=ARTEFACT_MAX_BYTES,
        disk_mib=disk_mib,
    )


def plan_warm(row: Language, env: list[bytes]) -> LaneCall:
    """The run that makes what later compilations are given."""
    return _call(
        WARM_LIMITS,
        argv=_words(render(row.warm, row), "language"),
        env=env,
        files={},
        fetch=[BINARY],
        fetch_bytes=ARTEFACT_MAX_BYTES,
        disk_mib=WARM_LIMITS.disk_mib,
    )


def plan_probe(row: Language, env: list[bytes]) -> LaneCall:
    """The run that shows whether the image has the tool."""
    argv = _words(render(row.probe, row), "language")
    return _call(WARM_LIMITS, argv=argv, env=env, files={}, fetch=[], fetch_bytes=0, disk_mib=1)


def with_warm(call: LaneCall) -> LaneCall:
    """A compilation whose stdin is what plan_warm made."""
    return replace(call, argv=(*_words(UNPACK, "language"), *call.argv))


def plan_run(program: Program, env: list[bytes], *, stdin: bytes, files: dict[str, tuple[int, bytes]]) -> LaneCall:
    """The program's run; `stdin` only when it is short enough to go inline."""
    request = program.request
    argv = program.argv
    flags = 0
    if program.zygote:
        source = program.language.source if program.language else ""
        argv = _words([source, *request.args], "args")
        flags = wire.ZYGOTE
    return _call(
        request.limits,
        argv=argv,
        env=env,
        stdin=stdin,
        files=files,
        fetch=request.fetch_files,
        fetch_bytes=FETCH_MAX_BYTES if request.fetch_files else 0,
        disk_mib=request.limits.disk_mib,
        flags=flags,
    )


def _call(
    limits: FnLimits,
    *,
    argv: tuple[bytes, ...],
    env: list[bytes],
    files: dict[str, tuple[int, bytes]],
    fetch: list[str],
    fetch_bytes: int,
    disk_mib: int,
    stdin: bytes = b"",
    flags: int = 0,
) -> LaneCall:
    return LaneCall(
        argv=argv,
        env=env,
        stdin=stdin,
        files=files,
        fetch=fetch,
        fetch_bytes=fetch_bytes,
        wall_us=round(limits.wall_s * 1e6),
        cpu_us=round(limits.cpu_s * 1e6),
        output_bytes=limits.output_bytes,
        disk_bytes=disk_mib * MIB,
        stack_bytes=min(STACK_MAX_BYTES, max(STACK_MIN_BYTES, limits.memory_mib * MIB)),
        nofile=NOFILE,
        flags=flags,
    )
