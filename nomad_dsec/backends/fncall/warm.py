"""What a compiler would make anew in every call (Go: its standard library), made once an image for all compilations.

It is made by the image's own tools in a lane, like any compilation, from no byte of any request, and kept with the
artefacts: in memory as a sealed file, on disk with its digest. A compilation reads it as its stdin, so that nothing of
it is shared that one could change for the next. Making it goes on when the call that caused it is given up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from libdsec.errors import DsecError
from libdsec.wire_fncall import CompileResult

from nomad_dsec.backends.fncall.artefacts import key_of
from nomad_dsec.backends.fncall.lane import Room
from nomad_dsec.backends.fncall.languages import BINARY
from nomad_dsec.backends.fncall.outcome import check_started, facts_of, result_of
from nomad_dsec.backends.fncall.program import MIB, WARM_LIMITS, plan_probe, plan_warm
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from nomad_dsec.backends.fncall.artefacts import Artefact, ArtefactCache
    from nomad_dsec.backends.fncall.lane_wire import LaneCall
    from nomad_dsec.backends.fncall.languages import Language
    from nomad_dsec.backends.fncall.pool import LaneKind
    from nomad_dsec.backends.fncall.runner import Ran, Runner

QUEUE_S: Final = 60.0
_COLD_MAX: Final = 256
_log = get_log("fncall.warm")


class WarmUps:
    """Over the runner and the cache. `spawn` starts a task that the daemon ends at its own end."""

    def __init__(
        self,
        runner: Runner,
        cache: ArtefactCache,
        spawn: Callable[[str, Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._spawn = spawn
        self._making: dict[str, asyncio.Task[None]] = {}
        self._cold: dict[str, None] = {}

    async def take(
        self, row: Language, env: list[bytes], *, kind: LaneKind, namespace: str, wait_s: float
    ) -> Artefact | None:
        """What the image's compiler is given, which the caller releases; None: compile without.

        wait_s: how long to wait while it is made. UsageError language_unavailable when the image lacks the compiler.
        """
        if not row.warm:
            return None
        call = plan_warm(row, env)
        key = key_of([b"warm", kind.purpose.encode(), kind.digest.encode(), *call.argv, *call.env])
        if key in self._cold:
            return None
        found = await self._cache.take(key)
        if found is not None:
            return found
        making = self._making.get(key)
        if making is None:
            await self._probe(row, env, kind, namespace)
            making = self._making.get(key) or self._start(key, row, call, kind, namespace)
        await asyncio.wait([making], timeout=wait_s)
        return await self._cache.take(key)

    def _start(self, key: str, row: Language, call: LaneCall, kind: LaneKind, namespace: str) -> asyncio.Task[None]:
        making = self._spawn(f"warm {row.name}", self._make(key, row, call, kind, namespace))
        self._making[key] = making
        making.add_done_callback(lambda _: self._making.pop(key, None))
        return making

    async def _probe(self, row: Language, env: list[bytes], kind: LaneKind, namespace: str) -> None:
        call = plan_probe(row, env)
        ran = await self._run(call, kind, namespace)
        check_started(ran.reply, call.argv[0], language=row.name)

    async def _make(self, key: str, row: Language, call: LaneCall, kind: LaneKind, namespace: str) -> None:
        try:
            ran = await self._run(call, kind, namespace)
        except DsecError as error:  # a full queue, a lost lane: the next compilation tries again
            _log.warning("could not warm a compiler up", language=row.name, digest=kind.digest, error=str(error))
            return
        outcome = result_of(ran.reply, WARM_LIMITS, queue_s=ran.queue_s)
        if outcome.verdict != "accepted" or BINARY not in ran.reply.files:
            said = (outcome.stderr or outcome.message.encode()).decode("utf-8", "replace")[-400:]
            _log.warning("a compiler stays cold", language=row.name, digest=kind.digest, error=said)
            if len(self._cold) >= _COLD_MAX:
                self._cold.clear()
            self._cold[key] = None
            return
        facts = facts_of(ran.reply)
        result = CompileResult(ok=True, exit_code=0, wall_s=facts.wall_s, cpu_s=facts.cpu_s)
        (await self._cache.put(key, result, ran.reply.files)).release()
        size_mib = len(ran.reply.files[BINARY]) // MIB
        _log.info("a compiler is warm", language=row.name, digest=kind.digest, size_mib=size_mib, took_s=facts.wall_s)

    async def _run(self, call: LaneCall, kind: LaneKind, namespace: str) -> Ran:
        room = Room(
            memory_bytes=WARM_LIMITS.memory_mib * MIB + call.disk_bytes + call.fetch_bytes, pids=WARM_LIMITS.pids
        )
        return await self._runner.run(kind, call, room, namespace=namespace, timeout_s=QUEUE_S)
