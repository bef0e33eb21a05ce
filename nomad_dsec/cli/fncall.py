"""`dsec fncall`: run a program once, judge one by its tests, list what an image can run.

run gives the program's own exit code, 128+n when signal n ended it, 123 for every other verdict but accepted, and 125
when it could not be run. judge gives 0 when every test was accepted, else 1, and 125 when it could not be judged.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from libdsec.errors import UsageError
from libdsec.fncall import AsyncFnCall
from libdsec.wire_fncall import Checker, FnLimits, FnTest

from nomad_dsec.backends.fncall.languages import TABLE
from nomad_dsec.cli.access import add_access, open_client
from nomad_dsec.cli.output import add_json, print_json, print_table, say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from libdsec.client import AsyncClient
    from libdsec.fncall_results import FnResult, FnSubmission

PLATFORM_FAULT = 125
OTHER_VERDICT = 123
_KINDS = ("tokens", "exact", "float")
_EXPECTED = (".out", ".ans", ".expected")
_MORE_SUFFIXES = {".cc": "cpp", ".cxx": "cpp", ".c++": "cpp", ".bash": "bash", ".mjs": "javascript"}
_LIMITS = (
    ("--cpu-s", "cpu_s", float, "CPU seconds of the whole tree"),
    ("--wall-s", "wall_s", float, "seconds of the clock, without any queue"),
    ("--memory-mib", "memory_mib", int, "memory"),
    ("--output-bytes", "output_bytes", int, "of stdout and of stderr"),
    ("--disk-mib", "disk_mib", int, "scratch space"),
    ("--pids", "pids", int, "processes and threads"),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Verbs of `dsec fncall`."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    run = verbs.add_parser("run", help="run a program once", description=__doc__)
    _program(run)
    run.add_argument("--stdin", default="", metavar="FILE", help="what it reads; - is our own stdin")
    run.add_argument("--arg", action="append", default=[], dest="args", help="an argument of the program; repeatable")
    run.set_defaults(run=run_run, fault_code=PLATFORM_FAULT)
    judge = verbs.add_parser("judge", help="judge a program by its tests", description=__doc__)
    _program(judge)
    judge.add_argument(
        "--tests",
        type=Path,
        required=True,
        metavar="DIR",
        help=f"NAME.in and, where there is one, NAME{'|'.join(_EXPECTED)}",
    )
    judge.add_argument("--stop-at-first", action="store_true", help="end at the first test that is not accepted")
    judge.add_argument(
        "--checker",
        default="tokens",
        metavar="KIND|FILE",
        help=f"{', '.join(_KINDS)}, or a program that reads the files input, output and expected (its arguments)",
    )
    judge.set_defaults(run=run_judge, fault_code=PLATFORM_FAULT)
    languages = verbs.add_parser("languages", help="what an image can run")
    languages.add_argument("--image", default="", help="default: the only image there is")
    add_json(languages)
    add_access(languages)
    languages.set_defaults(run=run_languages)


def _program(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the program's source")
    parser.add_argument("--image", default="", help="default: the only image there is")
    parser.add_argument("--language", default="", help="default: by the file's suffix")
    parser.add_argument("--file", action="append", default=[], type=Path, dest="files", help="put beside the program")
    parser.add_argument("--clean", action="store_true", help="a new interpreter instead of the warm one")
    for flag, _, kind, text in _LIMITS:
        parser.add_argument(flag, type=kind, default=None, help=text)
    add_json(parser)
    add_access(parser)


async def run_run(args: argparse.Namespace) -> int:
    """Its stdout on ours, its stderr on ours, the verdict in words; with --json the whole result."""
    code, language = _source(args.file, args.language)
    stdin = b""
    if args.stdin:
        stdin = await asyncio.to_thread(sys.stdin.buffer.read) if args.stdin == "-" else _read(Path(args.stdin))
    async with open_client(args) as client:
        result = await AsyncFnCall.run(
            code,
            image=await _image(client, args.image),
            language=language,
            stdin=stdin,
            args=args.args,
            files=_beside(args.files),
            clean=args.clean,
            limits=_limits(args),
            client=client,
        )
    if args.json:
        print_json(as_data(result))
        return 0
    if result.compile is not None and not result.compile.ok:
        sys.stderr.buffer.write(result.compile.stdout + result.compile.stderr)
    sys.stdout.buffer.write(result.stdout_bytes)
    sys.stdout.buffer.flush()
    sys.stderr.buffer.write(result.stderr_bytes)
    sys.stderr.buffer.flush()
    say(describe(result))
    return exit_code_of(result)


async def run_judge(args: argparse.Namespace) -> int:
    """One test a line, then the verdict; with --json the whole result."""
    code, language = _source(args.file, args.language)
    tests = read_tests(args.tests)
    async with open_client(args) as client:
        judged = await AsyncFnCall.submit(
            code,
            tests=tests,
            image=await _image(client, args.image),
            language=language,
            stop_at_first=args.stop_at_first,
            checker=checker_of(args.checker),
            files=_beside(args.files),
            clean=args.clean,
            limits=_limits(args),
            client=client,
        )
    if args.json:
        print_json(_submission_data(judged))
    else:
        _tell(judged)
    return 0 if judged.accepted else 1


async def run_languages(args: argparse.Namespace) -> int:
    """One language a line."""
    async with open_client(args) as client:
        found = await AsyncFnCall.languages(await _image(client, args.image), client=client)
    if args.json:
        print_json(found)
        return 0
    rows = [(row.name, "yes" if row.available else "no", row.version or row.reason) for row in found]
    print_table(("language", "available", "version"), rows)
    return 0


def read_tests(directory: Path) -> list[FnTest]:
    """The tests of a directory, by name; UsageError when there are none."""
    tests = []
    for given in sorted(directory.glob("*.in")) if directory.is_dir() else []:
        found = [given.with_suffix(suffix) for suffix in _EXPECTED]
        expected = next((path.read_bytes() for path in found if path.is_file()), None)
        tests.append(FnTest(stdin=given.read_bytes(), expected=expected, name=given.stem))
    if not tests:
        raise UsageError(
            "no_tests", f"{directory} holds no NAME.in", field="--tests", hint="give a directory with 1.in and 1.out"
        )
    return tests


def checker_of(text: str) -> Checker:
    """A kind by its name, else the program in that file."""
    if text in _KINDS:
        return Checker(kind=text)  # type: ignore[arg-type]  # one of the kinds
    code, language = _source(Path(text), "")
    return Checker(kind="program", code=code, language=language)


def language_of(path: Path) -> str:
    """By the suffix; UsageError lists those that are known."""
    known = {Path(row.source).suffix: row.name for row in reversed(TABLE)} | _MORE_SUFFIXES
    language = known.get(path.suffix.lower())
    if language is None:
        raise UsageError(
            "no_language",
            f"the suffix of {path.name} tells no language",
            field="--language",
            hint="give one of " + ", ".join(row.name for row in TABLE),
        )
    return language


def exit_code_of(result: FnResult) -> int:
    """See the module's words."""
    if result.accepted:
        return 0
    if result.verdict == "runtime_error":
        return 128 + result.signal if result.signal is not None else result.exit_code or OTHER_VERDICT
    return PLATFORM_FAULT if result.verdict == "internal_error" else OTHER_VERDICT


def describe(result: FnResult) -> str:
    """The verdict and what it cost, in a line."""
    why = result.message.partition("\n")[0][:200]
    cut = [name for name in ("stdout", "stderr") if getattr(result, f"{name}_truncated")]
    parts = [
        result.verdict + (f": {why}" if why else ""),
        f"cpu {result.cpu_s:.3f} s",
        f"wall {result.wall_s:.3f} s",
        f"queue {result.queue_s:.3f} s",
        f"memory {result.max_rss_mib:.1f} MiB",
    ]
    return ", ".join(parts) + "".join(f", {name} was cut" for name in cut)


def as_data(result: FnResult) -> dict[str, Any]:
    """For --json: output as text, and as base64 where it is not UTF-8."""
    data: dict[str, Any] = {
        key: getattr(result, key)
        for key in ("verdict", "exit_code", "signal", "cpu_s", "wall_s", "queue_s", "max_rss_mib", "message", "name")
    }
    for name, raw in (("stdout", result.stdout_bytes), ("stderr", result.stderr_bytes)):
        data[name] = raw.decode("utf-8", "replace")
        if data[name].encode() != raw:
            data[f"{name}_base64"] = base64.b64encode(raw).decode()
        data[f"{name}_truncated"] = getattr(result, f"{name}_truncated")
    if result.compile is not None:
        data["compile"] = _compile_data(result.compile)
    return data


def _compile_data(compiled: Any) -> dict[str, Any]:
    texts = {name: getattr(compiled, name).decode("utf-8", "replace") for name in ("stdout", "stderr")}
    return msgspec.structs.asdict(compiled) | texts


def _submission_data(judged: FnSubmission) -> dict[str, Any]:
    return {
        "verdict": judged.verdict,
        "passed": judged.passed,
        "total": judged.total,
        "compile": None if judged.compile is None else _compile_data(judged.compile),
        "tests": [as_data(test) for test in judged.tests],
    }


def _tell(judged: FnSubmission) -> None:
    if judged.compile is not None and not judged.compile.ok:
        say((judged.compile.stdout + judged.compile.stderr).decode("utf-8", "replace").rstrip())
    if judged.tests:
        rows = [
            (
                test.name or str(place + 1),
                test.verdict,
                f"{test.cpu_s:.3f}",
                f"{test.wall_s:.3f}",
                f"{test.max_rss_mib:.1f}",
                test.message.partition("\n")[0][:60],
            )
            for place, test in enumerate(judged.tests)
        ]
        print_table(("test", "verdict", "cpu s", "wall s", "MiB", "why"), rows)
    print(f"{judged.verdict}: {judged.passed} of {judged.total}")


def _source(path: Path, language: str) -> tuple[str, str]:
    chosen = language or language_of(path)
    try:
        return _read(path).decode("utf-8"), chosen
    except UnicodeDecodeError as error:
        raise UsageError("bad_source", f"{path} is not UTF-8", field="FILE") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError("bad_file", f"{path}: {error.strerror}", field="FILE", hint="check the path") from error


def _beside(paths: Sequence[Path]) -> dict[str, bytes]:
    return {path.name: _read(path) for path in paths}


def _limits(args: argparse.Namespace) -> dict[str, float]:
    """What was given; a longer CPU time without a wall time has room on the clock too."""
    given = {name: getattr(args, name) for _, name, _, _ in _LIMITS if getattr(args, name) is not None}
    if "cpu_s" in given and "wall_s" not in given:
        given["wall_s"] = max(FnLimits().wall_s, 2 * given["cpu_s"])
    return given


async def _image(client: AsyncClient, given: str) -> str:
    if given:
        return given
    images = await client.images()
    if len(images) != 1:
        names = ", ".join(name for image in images for name in image.names[:1]) or "there are none"
        raise UsageError("no_image", "which image?", field="--image", hint=f"give one of: {names}")
    return images[0].digest
