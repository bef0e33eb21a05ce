"""Wire requests of calls from arguments, checked before anything is sent, so that an error names the argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import msgspec

from libdsec._requests import checked, new_id
from libdsec.errors import UsageError
from libdsec.wire_fncall import MAX_STDIN_BYTES, Checker, FnLimits, FnRequest, FnTest, SubmitRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SLACK_S = 60.0


class FnOptions(TypedDict, total=False):
    """How a call is run; all optional.

    stdin: given whole, EOF without it. files: relative name -> content, put into its working directory. fetch_files:
    names (or patterns with *) of files wanted back. args: appended to the program's own. env: on top of the language's.
    limits, compile_limits: `FnLimits` or a mapping with cpu_s, wall_s, memory_mib, output_bytes, disk_mib, pids. clean:
    a new interpreter instead of the warm one, with a hash seed of its own. expected: what stdout should be.
    checker: "tokens" (the default), "exact", "float", or a `Checker`. call_id: to cancel it by. queue_timeout_s: how
    long it may wait for room, 60.
    """

    stdin: bytes | str
    files: Mapping[str, bytes | str]
    fetch_files: Sequence[str]
    args: Sequence[str]
    env: Mapping[str, str]
    limits: FnLimits | Mapping[str, float]
    compile_limits: FnLimits | Mapping[str, float]
    clean: bool
    expected: bytes | str | None
    checker: Checker | str
    call_id: str
    queue_timeout_s: float


def call_request(code: str | Sequence[str], *, image: str, language: str, options: FnOptions) -> FnRequest:
    """The wire form of one call."""
    if not image:
        raise UsageError("no_image", "no image is named", field="image", hint="`dsec image ls` shows what there is")
    if isinstance(code, str):
        if not language:
            raise UsageError("no_language", "code was given without its language", field="language", hint='"python"')
        fields: dict[str, Any] = {"code": code, "language": language}
    else:
        if not code:
            raise UsageError("no_command", "no command is given", field="code", hint='give code or ["program", "arg"]')
        fields = {"argv": list(code), "language": language}
    given: dict[str, Any] = dict(options)
    fields |= {key: value for key, value in given.items() if value is not None}
    for key in ("stdin", "expected"):
        if isinstance(fields.get(key), str):
            fields[key] = fields[key].encode()
    if len(fields.get("stdin", b"")) > MAX_STDIN_BYTES:
        raise UsageError("stdin_too_large", f"stdin is over {MAX_STDIN_BYTES} bytes", field="stdin")
    if "files" in fields:
        contents = fields["files"].items()
        fields["files"] = {name: data.encode() if isinstance(data, str) else data for name, data in contents}
    for key in ("fetch_files", "args"):
        if key in fields:
            fields[key] = list(fields[key])
    if "env" in fields:
        fields["env"] = dict(fields["env"])
    for key in ("limits", "compile_limits"):
        if key in fields:
            fields[key] = _plain(fields[key])
    if "checker" in fields:
        chosen = fields["checker"]
        fields["checker"] = {"kind": chosen} if isinstance(chosen, str) else _plain(chosen)
    fields.setdefault("call_id", "")
    fields["call_id"] = fields["call_id"] or new_id("fc")
    return checked(FnRequest, image=image, **fields)


def submit_request(
    program: FnRequest, tests: Iterable[FnTest | Mapping[str, Any]], *, stop_at_first: bool
) -> SubmitRequest:
    """The wire form of a submission; a test is an FnTest or a mapping with stdin, expected, name (text or bytes)."""
    wanted = []
    for test in tests:
        fields = dict(_plain(test))
        for key in ("stdin", "expected"):
            if isinstance(fields.get(key), str):
                fields[key] = fields[key].encode()
        wanted.append(fields)
    if not wanted:
        raise UsageError("no_tests", "there are no tests", field="tests", hint="give at least one")
    return checked(SubmitRequest, program=program, tests=wanted, stop_at_first=stop_at_first)


class Bounded(Protocol):
    """What of a call says how long it may take."""

    limits: FnLimits
    compile_limits: FnLimits
    checker: Checker
    queue_timeout_s: float


def longest_s(request: Bounded, *, tests: int = 1) -> float:
    """Seconds within which a node must have answered: it waits, compiles, runs and checks within these."""
    each = request.limits.wall_s * (2 if request.checker.kind == "program" else 1)
    return request.queue_timeout_s + 2 * request.compile_limits.wall_s + each * tests + SLACK_S


def _plain(value: Any) -> dict[str, Any]:
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    return dict(value)
