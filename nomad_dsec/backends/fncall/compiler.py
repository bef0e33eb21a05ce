"""Compiling: in a lane, under the same confinement, once for the same content however many ask at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from libdsec.wire_fncall import CompileResult

from nomad_dsec.backends.fncall.artefacts import Artefact, key_of
from nomad_dsec.backends.fncall.lane import Room
from nomad_dsec.backends.fncall.outcome import check_started, facts_of, result_of
from nomad_dsec.backends.fncall.pool import LaneKind
from nomad_dsec.backends.fncall.program import COMPILE_PIDS, MIB, Program, plan_compile, tool_environment, with_warm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nomad_dsec.backends.fncall.artefacts import ArtefactCache
    from nomad_dsec.backends.fncall.lane_wire import LaneCall
    from nomad_dsec.backends.fncall.runner import Runner
    from nomad_dsec.backends.fncall.warm import WarmUps


class Compiler:
    """Over the runner and the cache, with what compilers were given beforehand."""

    def __init__(self, runner: Runner, cache: ArtefactCache, warm_ups: WarmUps) -> None:
        self._runner = runner
        self._cache = cache
        self._warm_ups = warm_ups
        self._under_way: dict[str, asyncio.Future[None]] = {}

    async def compiled(
        self,
        program: Program,
        env: list[bytes],
        *,
        image_env: Mapping[str, str],
        digest: str,
        namespace: str,
        purpose: str,
    ) -> tuple[Artefact, CompileResult]:
        """The artefact, which the caller releases, and what the compiler said. One that failed has no files.

        A failed compilation is remembered as well, unless a limit or a fault ended it.
        """
        call = plan_compile(program, env)
        limits = program.request.compile_limits
        # Checkers' are kept apart: nothing that a submission made reaches a checker's lane.
        key = key_of([purpose.encode(), digest.encode(), *_parts(call), str(limits).encode()])
        while True:
            found = await self._cache.take(key)
            if found is not None:
                return found, _cached(found.result)
            other = self._under_way.get(key)
            if other is None:
                break
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([other])
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way[key] = done
        try:
            kind = LaneKind(digest=digest, purpose=purpose)
            assert program.language is not None
            warm = await self._warm_ups.take(
                program.language,
                tool_environment(program.language, image_env),
                kind=kind,
                namespace=namespace,
                wait_s=limits.wall_s / 2,  # clients reckon with little more than their own limits
            )
            with ExitStack() as opened:
                stdin_fd = -1
                if warm is not None:
                    opened.callback(warm.release)
                    call = with_warm(call)
                    stdin_fd = os.open(f"/proc/self/fd/{warm.binary_fd}", os.O_RDONLY | os.O_CLOEXEC)
                    opened.callback(os.close, stdin_fd)
                return await self._compile(key, program, call, kind, namespace, stdin_fd)
        finally:
            del self._under_way[key]
            done.cancel()

    async def _compile(
        self, key: str, program: Program, call: LaneCall, kind: LaneKind, namespace: str, stdin_fd: int
    ) -> tuple[Artefact, CompileResult]:
        request, row = program.request, program.language
        limits = request.compile_limits
        assert row is not None
        room = Room(
            memory_bytes=(limits.memory_mib + row.memory_overhead_mib) * MIB + call.disk_bytes + call.fetch_bytes,
            pids=max(limits.pids, COMPILE_PIDS),
        )
        ran = await self._runner.run(
            kind, call, room, namespace=namespace, timeout_s=request.queue_timeout_s, stdin_fd=stdin_fd
        )
        check_started(ran.reply, call.argv[0], language=row.name)
        facts = facts_of(ran.reply)
        outcome = result_of(ran.reply, limits, queue_s=ran.queue_s)
        ok = outcome.verdict == "accepted" and bool(ran.reply.files)
        stderr = outcome.stderr
        if not ok and outcome.verdict not in ("accepted", "runtime_error"):
            stderr += f"\n{outcome.message} (while it was compiled)\n".encode()
        result = CompileResult(
            ok=ok,
            exit_code=outcome.exit_code,
            stdout=outcome.stdout,
            stderr=stderr,
            wall_s=facts.wall_s,
            cpu_s=facts.cpu_s,
        )
        if not ok and outcome.verdict != "runtime_error":
            return Artefact(result=result, files={}, users=1), result
        return await self._cache.put(key, result, ran.reply.files if ok else {}), result


def _parts(call: LaneCall) -> list[bytes]:
    parts = [*call.argv, b"\0env", *call.env, b"\0files"]
    for name, (_, content) in sorted(call.files.items()):
        parts += [name.encode("utf-8", "surrogateescape"), content]
    return parts


def _cached(result: CompileResult) -> CompileResult:
    return CompileResult(
        ok=result.ok,
        exit_code=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
        wall_s=result.wall_s,
        cpu_s=result.cpu_s,
        cached=True,
    )
