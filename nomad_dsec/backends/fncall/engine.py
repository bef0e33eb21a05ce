"""The engine of stateless calls: one call, one submission with its tests, the languages of an image."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import msgspec
from libdsec.errors import DeadlineExceeded, PlatformError, UsageError
from libdsec.wire_fncall import FnRequest, FnResult, FnTest, LanguageInfo, LanguageList, SubmitResult

from nomad_dsec.backends.fncall import lane_wire as wire
from nomad_dsec.backends.fncall.checkers import check
from nomad_dsec.backends.fncall.lane import Room
from nomad_dsec.backends.fncall.languages import TABLE, render
from nomad_dsec.backends.fncall.outcome import check_started, result_of
from nomad_dsec.backends.fncall.pool import LaneKind
from nomad_dsec.backends.fncall.program import MIB, Program, environment, plan_run, read_program, sources
from nomad_dsec.backends.fncall.runner import Ran, Runner, open_input
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from libdsec.wire_fncall import Checker, CompileResult, SubmitRequest

    from nomad_dsec.backends.fncall.artefacts import Artefact
    from nomad_dsec.backends.fncall.compiler import Compiler

CHECKER: Final = "checker"
_CHECKER_FILES: Final = ("input", "output", "expected")
_CHECKER_WORDS: Final = 400
_log = get_log("fncall.engine")


class Engine:
    """Over a runner and a compiler. Namespaces share lanes, in which nothing of a call stays."""

    def __init__(self, runner: Runner, compiler: Compiler) -> None:
        self._runner = runner
        self._compiler = compiler
        self._without_zygote: set[str] = set()
        self._languages: dict[tuple[str, str], LanguageInfo] = {}

    @property
    def at_once(self) -> int:
        """How many tests of one submission run or wait for a turn at the same time."""
        return 2 * self._runner.turns

    async def run(self, request: FnRequest, *, digest: str, image_env: Mapping[str, str], namespace: str) -> FnResult:
        """One call. UsageError names what is wrong with it; a fault of ours is the verdict internal_error."""
        test = FnTest(stdin=request.stdin, expected=request.expected)
        judged = await self._judge(request, [test], digest, image_env, namespace, stop_at_first=True)
        if not judged.tests:  # it does not compile
            said = judged.compile.stderr or judged.compile.stdout if judged.compile else b""  # tsc uses stdout
            return FnResult(
                verdict=judged.verdict, compile=judged.compile, message=_words(said), call_id=request.call_id
            )
        result = judged.tests[0]
        result.compile = judged.compile
        result.call_id = request.call_id
        return result

    async def submit(
        self, request: SubmitRequest, *, digest: str, image_env: Mapping[str, str], namespace: str
    ) -> SubmitResult:
        """A program and its tests: compiled once, run once a test."""
        return await self._judge(
            request.program, request.tests, digest, image_env, namespace, stop_at_first=request.stop_at_first
        )

    async def _judge(
        self,
        request: FnRequest,
        tests: list[FnTest],
        digest: str,
        image_env: Mapping[str, str],
        namespace: str,
        *,
        stop_at_first: bool,
    ) -> SubmitResult:
        program = read_program(request)
        checker = _read_checker(request) if request.checker.kind == "program" else None
        case = _Case(self, program, checker, digest, environment(program, image_env), image_env, namespace)
        if not program.is_compiled:
            return await case.judge(tests, None, None, stop_at_first=stop_at_first)
        artefact, compiled = await self._compiler.compiled(
            program, case.env, image_env=image_env, digest=digest, namespace=namespace, purpose=""
        )
        try:
            if not compiled.ok:
                return SubmitResult(verdict="compile_error", compile=compiled, total=len(tests))
            return await case.judge(tests, artefact, compiled, stop_at_first=stop_at_first)
        finally:
            artefact.release()

    async def execute(
        self, program: Program, env: list[bytes], stdin: bytes, artefact: Artefact | None, *, digest: str,
        namespace: str, purpose: str,
    ) -> FnResult:  # fmt: skip
        """One run of a program, judged but for its output."""
        request, row = program.request, program.language
        if program.zygote and digest in self._without_zygote:
            request = msgspec.structs.replace(request, clean=True)
            program = read_program(request)
        files = sources(program) if artefact is None else _with_artefacts(program, artefact)
        with ExitStack() as opened:
            given = await open_input(stdin, opened)
            call = plan_run(program, env, stdin=given.inline, files=files)
            overhead_mib = row.memory_overhead_mib if row else 0
            # What PID 1 holds of output and files is charged to the lane, and must not be to the program.
            held = 2 * call.output_bytes + call.fetch_bytes
            ran = await self._run_one(
                LaneKind(digest=digest, zygote=program.zygote, purpose=purpose),
                call,
                Room(memory_bytes=(request.limits.memory_mib + overhead_mib) * MIB + held, pids=request.limits.pids),
                namespace,
                request.queue_timeout_s,
                given.fd,
                artefact.binary_fd if artefact is not None and program.runs_binary else -1,
            )
        if isinstance(ran, FnResult):
            return ran
        if ran.reply.flags & wire.NO_ZYGOTE:
            _log.warning("the image's interpreter can't be a zygote", digest=digest)
            self._without_zygote.add(digest)
            return await self.execute(
                program, env, stdin, artefact, digest=digest, namespace=namespace, purpose=purpose
            )
        check_started(ran.reply, call.argv[0], language=row.name if row else "")
        return result_of(ran.reply, request.limits, queue_s=ran.queue_s)

    async def _run_one(
        self, kind: LaneKind, call: wire.LaneCall, room: Room, namespace: str, timeout_s: float, stdin_fd: int,
        exec_fd: int,
    ) -> Ran | FnResult:  # fmt: skip
        try:
            return await self._runner.run(
                kind, call, room, namespace=namespace, timeout_s=timeout_s, stdin_fd=stdin_fd, exec_fd=exec_fd
            )
        except (PlatformError, DeadlineExceeded) as fault:
            _log.error("a call was lost", namespace=namespace, error=str(fault))
            return FnResult(verdict="internal_error", message=str(fault))

    async def check_by_program(
        self, checker: Program, image_env: Mapping[str, str], test: FnTest, output: bytes, *, digest: str,
        namespace: str,
    ) -> tuple[str, str]:  # fmt: skip
        """The verdict of a checker program, run in a lane that no submission ever was in, and what it said."""
        contents = dict(zip(_CHECKER_FILES, (test.stdin, output, test.expected or b""), strict=True))
        size_mib = sum(map(len, contents.values())) // MIB + 1
        limits = msgspec.structs.replace(
            checker.request.limits,
            disk_mib=checker.request.limits.disk_mib + size_mib,
            memory_mib=checker.request.limits.memory_mib + 3 * size_mib,
        )
        request = msgspec.structs.replace(checker.request, files=contents, limits=limits)
        program = read_program(request)
        env = environment(program, image_env)
        artefact = None
        try:
            if program.is_compiled:
                # Without the files: they are no part of the compilation.
                artefact, compiled = await self._compiler.compiled(
                    checker, env, image_env=image_env, digest=digest, namespace=namespace, purpose=CHECKER
                )
                if not compiled.ok:
                    return "internal_error", f"the checker does not compile: {_words(compiled.stderr)}"
            result = await self.execute(
                program, env, b"", artefact, digest=digest, namespace=namespace, purpose=CHECKER
            )
        finally:
            if artefact is not None:
                artefact.release()
        said = _words(result.stdout + b" " + result.stderr)
        if result.verdict == "accepted":
            return "accepted", ""
        if result.verdict == "runtime_error" and result.exit_code == 1:
            return "wrong_answer", said or "the checker refused it"
        return "internal_error", f"the checker ended with {result.verdict}: {result.message} {said}"

    async def languages(self, *, digest: str, image_env: Mapping[str, str], namespace: str) -> LanguageList:
        """Each language of the table: does the image have what it takes. Tried once an image."""
        found = [await self._language(row.name, digest, image_env, namespace) for row in TABLE]
        return LanguageList(languages=found)

    async def _language(self, name: str, digest: str, image_env: Mapping[str, str], namespace: str) -> LanguageInfo:
        known = self._languages.get((digest, name))
        if known is not None:
            return known
        row = next(row for row in TABLE if row.name == name)
        request = FnRequest(image=digest, argv=list(render(row.probe, row)))
        request.limits.memory_mib += row.memory_overhead_mib
        program = read_program(request)
        reason, version = "", ""
        try:
            result = await self.execute(
                program, environment(program, image_env), b"", None, digest=digest, namespace=namespace, purpose=""
            )
            lines = (result.stdout + result.stderr).decode("utf-8", "replace").splitlines()
            version = lines[0].strip() if lines else ""
            if result.verdict != "accepted":
                reason = f"{row.probe[0]} fails: {result.message}"
        except UsageError as error:
            reason = f"the image has no {row.probe[0]}" if error.code == "command_not_found" else str(error)
        info = LanguageInfo(
            name=name,
            available=not reason,
            reason=reason,
            compiled=bool(row.compile),
            version=version if not reason else "",
        )
        self._languages[(digest, name)] = info
        return info


class _Case:
    """One submission while it is judged."""

    def __init__(
        self, engine: Engine, program: Program, checker: Program | None, digest: str, env: list[bytes],
        image_env: Mapping[str, str], namespace: str,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._program = program
        self._checker = checker
        self._digest = digest
        self._image_env = image_env
        self._namespace = namespace
        self.env = env

    async def judge(
        self, tests: list[FnTest], artefact: Artefact | None, compiled: CompileResult | None, *, stop_at_first: bool
    ) -> SubmitResult:
        """One after the other when the first failure ends it, else as many at once as there are turns."""
        results: list[FnResult] = []
        if stop_at_first or len(tests) == 1:
            for test in tests:
                results.append(await self._one(test, artefact))
                if stop_at_first and results[-1].verdict != "accepted":
                    break
        else:
            results = await self._all(tests, artefact)
        failed = next((result for result in results if result.verdict != "accepted"), None)
        return SubmitResult(
            verdict=failed.verdict if failed else "accepted",
            tests=results,
            compile=compiled,
            passed=sum(result.verdict == "accepted" for result in results),
            total=len(tests),
        )

    async def _all(self, tests: list[FnTest], artefact: Artefact | None) -> list[FnResult]:
        """Those that could run soon wait in the queue, which is everybody's; the others wait here."""
        results: dict[int, FnResult] = {}
        numbered = iter(enumerate(tests))

        async def work() -> None:
            for place, test in numbered:
                results[place] = await self._one(test, artefact)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(tests), self._engine.at_once)):
                    group.create_task(work())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [results[place] for place in range(len(tests))]

    async def _one(self, test: FnTest, artefact: Artefact | None) -> FnResult:
        result = await self._engine.execute(
            self._program, self.env, test.stdin, artefact, digest=self._digest, namespace=self._namespace, purpose=""
        )
        result.name = test.name
        if result.verdict != "accepted":
            return result
        if self._checker is not None:
            verdict, message = await self._engine.check_by_program(
                self._checker, self._image_env, test, result.stdout, digest=self._digest, namespace=self._namespace
            )
            result.verdict, result.message = verdict, message  # type: ignore[assignment]
        elif test.expected is not None:
            right, where = check(self._program.request.checker, result.stdout, test.expected)
            if not right:
                result.verdict, result.message = "wrong_answer", where
        return result


def _read_checker(request: FnRequest) -> Program:
    checker: Checker = request.checker
    if not checker.code or not checker.language:
        raise UsageError(
            "bad_checker", "a checker program has code and a language", field="checker.code", hint="give both"
        )
    try:
        return read_program(
            FnRequest(
                image=request.image,
                code=checker.code,
                language=checker.language,
                args=list(_CHECKER_FILES),
                queue_timeout_s=request.queue_timeout_s,
            )
        )
    except UsageError as error:
        raise UsageError(error.code, error.message, hint=error.hint, field=f"checker.{error.field}") from error


def _with_artefacts(program: Program, artefact: Artefact) -> dict[str, tuple[int, bytes]]:
    """What a run of a compiled program finds in its directory: the compiler's output, and the files of the request."""
    files = {name: (0o644, content) for name, content in program.request.files.items()}
    return files | {name: (0o755, content) for name, content in artefact.files.items()}


def _words(text: bytes) -> str:
    return text.decode("utf-8", "replace").strip()[:_CHECKER_WORDS]
