"""AsyncFnCall: stateless calls, one or many, and submissions judged by tests. `libdsec.sync` has FnCall."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Any, TypeVar, Unpack
from urllib.parse import quote

from libdsec._fncall_requests import FnOptions, call_request, longest_s, submit_request
from libdsec.client import AsyncClient, default_client
from libdsec.errors import CapacityError, DeadlineExceeded, DsecError, UsageError
from libdsec.fncall_results import FnOutcome, FnResult, FnSubmission, result_of, submission_of
from libdsec.wire import Ok
from libdsec.wire_fncall import MAX_CALL_BYTES, CancelRequest, FnRequest, LanguageInfo, LanguageList
from libdsec.wire_fncall import FnResult as FnReply
from libdsec.wire_fncall import SubmitResult as SubmitReply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from libdsec._http import Transport
    from libdsec.wire_fncall import FnTest

T = TypeVar("T")
MAX_IN_FLIGHT = 10_000
_PATH = "/v1/fncall"
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class AsyncFnCall:
    """Stateless calls: each runs in a fresh, empty place of its own and leaves nothing behind.

    How a program ended is a result, never an exception. Cancelling the waiting coroutine cancels the call.
    """

    @classmethod
    async def run(
        cls,
        code: str | Sequence[str],
        *,
        image: str,
        language: str = "",
        client: AsyncClient | None = None,
        **options: Unpack[FnOptions],
    ) -> FnResult:
        """Run code in a language, or a list as exact argv, and return how it went.

        options: see `FnOptions`. Raises UsageError naming the field, CapacityError when there was no room within
        queue_timeout_s, PlatformError.
        """
        request = call_request(code, image=image, language=language, options=options)
        return await _run((client or await default_client()).transport, request)

    @classmethod
    def request(
        cls, code: str | Sequence[str], *, image: str, language: str = "", **options: Unpack[FnOptions]
    ) -> FnRequest:
        """The checked request of a call, for `run_many`; nothing is sent."""
        return call_request(code, image=image, language=language, options=options)

    @classmethod
    async def run_many(
        cls,
        requests: Iterable[FnRequest] | AsyncIterable[FnRequest],
        *,
        in_flight: int = 64,
        client: AsyncClient | None = None,
    ) -> AsyncIterator[FnOutcome]:
        """Run all, at most in_flight at once, and yield each as it finishes; `index` is its place in `requests`.

        Requests are taken one by one as there is room, and no further ones while nobody takes the outcomes. A fault of
        the platform is an outcome with `error` and ends no other call. Closing the iterator cancels what is under way.
        """
        if not 1 <= in_flight <= MAX_IN_FLIGHT:
            raise UsageError(
                "bad_argument", f"in_flight is {in_flight}", field="in_flight", hint=f"use 1 to {MAX_IN_FLIGHT}"
            )
        transport = (client or await default_client()).transport
        source = _Source(requests)
        done: asyncio.Queue[FnOutcome | BaseException | None] = asyncio.Queue(maxsize=in_flight)
        workers = [asyncio.create_task(_work(transport, source, done)) for _ in range(in_flight)]
        try:
            working = in_flight
            while working:
                item = await done.get()
                if isinstance(item, FnOutcome):
                    yield item
                elif item is None:
                    working -= 1
                else:
                    raise item
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await source.close()

    @classmethod
    async def submit(
        cls,
        code: str | Sequence[str],
        *,
        tests: Iterable[FnTest | Mapping[str, Any]],
        image: str,
        language: str = "",
        stop_at_first: bool = False,
        client: AsyncClient | None = None,
        **options: Unpack[FnOptions],
    ) -> FnSubmission:
        """Judge a submission: compiled once, run once a test, each in a fresh place.

        tests: FnTest or mappings with stdin, expected and name. stop_at_first: run no further test after one that was
        not accepted. options: as in `run`; the limits are of each test.
        """
        program = call_request(code, image=image, language=language, options=options)
        request = submit_request(program, tests, stop_at_first=stop_at_first)
        transport = (client or await default_client()).transport
        longest = longest_s(program, tests=len(request.tests))
        return submission_of(await _ask(transport, f"{_PATH}/submit", SubmitReply, request, program, longest))

    @classmethod
    async def cancel(cls, call_id: str, *, client: AsyncClient | None = None) -> None:
        """End a call that waits or runs, whoever sent it with this key's namespace; unknown ids are fine."""
        body = CancelRequest(call_id=call_id)
        await (client or await default_client()).transport.request("POST", f"{_PATH}/cancel", Ok, body=body)

    @classmethod
    async def languages(cls, image: str, *, client: AsyncClient | None = None) -> Sequence[LanguageInfo]:
        """The languages that this image can run, and why not for the others."""
        transport = (client or await default_client()).transport
        path = f"{_PATH}/languages?image={quote(image, safe='')}"
        return (await transport.request("GET", path, LanguageList, timeout_s=120)).languages


async def _run(transport: Transport, request: FnRequest) -> FnResult:
    return result_of(await _ask(transport, _PATH, FnReply, request, request, longest_s(request)))


async def _ask(transport: Transport, path: str, kind: type[T], body: Any, program: FnRequest, longest: float) -> T:
    """Ask again while the platform is busy, for queue_timeout_s in all. Calls are stateless: a repeat does no harm."""
    give_up_at = time.monotonic() + program.queue_timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            async with asyncio.timeout(longest):
                return await transport.request(
                    "POST", path, kind, body=body, quick=False, timeout_s=longest, max_bytes=MAX_CALL_BYTES
                )
        except TimeoutError as late:
            raise DeadlineExceeded(
                "fncall_no_reply",
                f"no result came within {longest:g} s",
                hint="is the gateway overloaded? `dsec top` shows",
                details={"call_id": program.call_id},
            ) from late
        except CapacityError as full:
            left_s = give_up_at - time.monotonic()
            if full.retry_after_s is None or left_s <= 0:
                raise
            wanted_s = min(max(pause_s, full.retry_after_s), _LONGEST_PAUSE_S)
            await asyncio.sleep(min(left_s, wanted_s * random.uniform(0.5, 1.5)))  # noqa: S311 - jitter
            pause_s *= 2


class _Source:
    """Hands out (index, request) to many workers, one at a time, from a plain or an async iterable."""

    def __init__(self, requests: Iterable[FnRequest] | AsyncIterable[FnRequest]) -> None:
        self._lock = asyncio.Lock()
        self._index = 0
        self._slow = aiter(requests) if isinstance(requests, AsyncIterable) else None
        self._quick = None if isinstance(requests, AsyncIterable) else iter(requests)

    async def take(self) -> tuple[int, FnRequest] | None:
        """The next one, None at the end."""
        async with self._lock:
            request: FnRequest | None
            if self._slow is not None:
                request = await anext(self._slow, None)
            else:
                assert self._quick is not None
                request = next(self._quick, None)
            if request is None:
                return None
            index, self._index = self._index, self._index + 1
            return index, request

    async def close(self) -> None:
        """Let an async generator end."""
        close = getattr(self._slow, "aclose", None)
        if close is not None:
            await close()


async def _work(transport: Transport, source: _Source, done: asyncio.Queue[FnOutcome | BaseException | None]) -> None:
    """Take, run, tell, until there is no more. An error of the source itself ends the whole run."""
    try:
        while (taken := await source.take()) is not None:
            index, request = taken
            try:
                outcome = FnOutcome(index=index, result=await _run(transport, request))
            except DsecError as error:
                outcome = FnOutcome(index=index, error=error)
            await done.put(outcome)
    except Exception as error:  # noqa: BLE001 - the caller's iterable may raise anything; it is raised to the caller
        await done.put(error)
        return
    await done.put(None)
