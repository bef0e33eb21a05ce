"""A fake node that runs calls: it interprets a few words instead of a language, over the real HTTP contract.

The code is a line of words: `print X`, `exit N`, `signal N`, `spin`, `sleep`, `eat`, `flood`, `broken`, `nocompile`,
`slowcompile`, `cat`, `write NAME`, `wait` (until cancelled or `release` is set).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from libdsec import wire
from libdsec.errors import StateError, UsageError
from libdsec.wire_fncall import (
    DIGEST_HEADER,
    MAX_CALL_BYTES,
    NAMESPACE_HEADER,
    CancelRequest,
    CompileResult,
    FnRequest,
    FnResult,
    LanguageInfo,
    LanguageList,
    SubmitRequest,
    SubmitResult,
)

from nomad_dsec.httpd import json_reply, read_json
from tests.kit.fakenode import FakeNode

if TYPE_CHECKING:
    from libdsec.errors import DsecError

_LIMITS = {"spin": "cpu_time_limit", "sleep": "wall_time_limit", "eat": "memory_limit", "flood": "output_limit"}


class FnNode(FakeNode):
    """refuse_calls: the error that every call meets. seen: (namespace, digest, request) of each call."""

    def __init__(self, node: str = "n1", **capacity: Any) -> None:
        super().__init__(node, **capacity)
        self.offers.append(wire.BackendFingerprint(name="fncall", available=True))
        self.refuse_calls: DsecError | None = None
        self.seen: list[tuple[str, str, FnRequest]] = []
        self.cancelled: list[str] = []
        self.release = asyncio.Event()
        self.arrived = asyncio.Event()
        self.running = 0
        self.most_running = 0
        self._waits: dict[tuple[str, str], asyncio.Event] = {}

    def routes(self, app: web.Application) -> None:
        """The paths of the contract."""
        app.router.add_post("/v1/fncall", self._call)
        app.router.add_post("/v1/fncall/submit", self._submit)
        app.router.add_post("/v1/fncall/cancel", self._cancel)
        app.router.add_get("/v1/fncall/languages", self._languages)

    async def _call(self, request: web.Request) -> web.Response:
        asked = await read_json(request, FnRequest, max_bytes=MAX_CALL_BYTES)
        return json_reply(await self._judge(request, asked))

    async def _submit(self, request: web.Request) -> web.Response:
        asked = await read_json(request, SubmitRequest, max_bytes=MAX_CALL_BYTES)
        results = []
        for test in asked.tests:
            program = msgspec.structs.replace(asked.program, stdin=test.stdin, expected=test.expected)
            results.append(msgspec.structs.replace(await self._judge(request, program), name=test.name))
            if asked.stop_at_first and results[-1].verdict != "accepted":
                break
        bad = next((result.verdict for result in results if result.verdict != "accepted"), "accepted")
        passed = sum(result.verdict == "accepted" for result in results)
        return json_reply(SubmitResult(verdict=bad, tests=results, passed=passed, total=len(asked.tests)))

    async def _cancel(self, request: web.Request) -> web.Response:
        asked = await read_json(request, CancelRequest)
        event = self._waits.get((request.headers[NAMESPACE_HEADER], asked.call_id))
        if event is not None:
            event.set()
        return json_reply(wire.Ok())

    async def _languages(self, request: web.Request) -> web.Response:
        assert request.query["image"].startswith("sha256:")
        return json_reply(LanguageList(languages=[LanguageInfo(name="python", available=True, version="3.11")]))

    async def _judge(self, request: web.Request, asked: FnRequest) -> FnResult:
        if self.refuse_calls is not None:
            raise self.refuse_calls
        namespace = request.headers[NAMESPACE_HEADER]
        self.seen.append((namespace, request.headers[DIGEST_HEADER], asked))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._run(asked, (namespace, asked.call_id))
        except asyncio.CancelledError:
            self.cancelled.append(asked.call_id)
            raise
        finally:
            self.running -= 1

    async def _run(self, asked: FnRequest, place: tuple[str, str]) -> FnResult:
        word, _, rest = asked.code.strip().partition(" ")
        base: dict[str, Any] = {"wall_s": 0.25, "cpu_s": 0.2, "queue_s": 0.5, "call_id": asked.call_id}
        if asked.language == "rust":
            raise UsageError("language_unavailable", "the image has no rustc", field="language")
        if word == "wait":
            await self._wait(place)
        if word in _LIMITS:
            return FnResult(verdict=_LIMITS[word], signal=9, stdout=b"so far", **base)  # type: ignore[arg-type]
        if word == "broken":
            return FnResult(verdict="internal_error", message="the lane broke", **base)
        if word in ("nocompile", "slowcompile"):
            code = 1 if word == "nocompile" else None
            failed = CompileResult(ok=False, exit_code=code, stderr=b"main.cpp:1: error", wall_s=0.5)
            return FnResult(verdict="compile_error", compile=failed, **base)
        if word in ("exit", "signal"):
            end = {"exit_code" if word == "exit" else "signal": int(rest)}
            verdict = "accepted" if end == {"exit_code": 0} else "runtime_error"
            return FnResult(verdict=verdict, stderr=b"oops", **end, **base)
        out = asked.stdin if word == "cat" else rest.encode()
        verdict = "accepted" if asked.expected in (None, out) else "wrong_answer"
        files = {name: b"content of " + name.encode() for name in asked.fetch_files if name == rest}
        compiled = CompileResult(ok=True, exit_code=0, wall_s=0.5) if asked.language == "cpp" else None
        return FnResult(verdict=verdict, exit_code=0, stdout=out, files=files, compile=compiled, **base)

    async def _wait(self, place: tuple[str, str]) -> None:
        event = self._waits[place] = asyncio.Event()
        self.arrived.set()
        tasks = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self.release.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            del self._waits[place]
        if event.is_set():
            raise StateError("cancelled", f"call {place[1]} was cancelled")
