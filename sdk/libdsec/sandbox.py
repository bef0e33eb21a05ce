"""AsyncSandbox: create, find, use and end sandboxes. `libdsec.sync` has the same for code without an event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self, Unpack
from urllib.parse import quote, urlencode

from libdsec._creating import abandon, ask_until_room, failures_of
from libdsec._http import IDLE_S, Transport
from libdsec._requests import SNAPSHOTS_MISSING, checked, create_request, exec_request, new_id
from libdsec.client import AsyncClient, default_client
from libdsec.errors import DeadlineExceeded, DsecError
from libdsec.files import AsyncFiles
from libdsec.group import AsyncSandboxGroup, end_all
from libdsec.network import AsyncNetwork, not_supported
from libdsec.process import AsyncProcess, check_since
from libdsec.results import ExecResult, result_from_reply
from libdsec.wire import (
    DEFAULT_OUTPUT_BYTES,
    ExecList,
    ExecReply,
    ExecRequest,
    LeaseRequest,
    Metrics,
    Pty,
    SandboxInfo,
    SandboxList,
    SetTimeoutRequest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from libdsec._requests import CreateOptions
    from libdsec.wire import CreateRequest, State

_EXEC_SLACK_S = 120.0
_LARGE_STDIN_BYTES = 256 * 1024


class AsyncSandbox:
    """One sandbox. As an async context manager it is killed at the end of the block.

    id: `sb-<node>-<random>`; files, network: operations on those. `details`: as last seen.
    """

    def __init__(self, client: AsyncClient, details: SandboxInfo) -> None:
        self.id = details.id
        self.details = details
        self._client = client
        self._transport: Transport = client.transport
        self._path = f"/v1/sandboxes/{quote(details.id, safe='')}"
        self._execs_path = f"{self._path}/execs"
        self._files = AsyncFiles(self._transport, details.id)
        self._network = AsyncNetwork(self._transport, details.id, details.backend)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    @property
    def files(self) -> AsyncFiles:
        """Its files."""
        return self._files

    @property
    def network(self) -> AsyncNetwork:
        """Its network."""
        return self._network

    @classmethod
    async def create(
        cls,
        image: str = "",
        *,
        snapshot: str | None = None,
        client: AsyncClient | None = None,
        **options: Unpack[CreateOptions],
    ) -> AsyncSandbox:
        """Make one sandbox and return when it is ready for its first exec.

        image: name or digest that a node has. options: see `CreateOptions`. Raises UsageError naming the field,
        CapacityError with the refusals counted by reason, DeniedError by quota or key, PlatformError.
        """
        request = create_request(image, snapshot=snapshot, count=1, all_or_none=True, options=options)
        return (await _create(client or await default_client(), request, options))[0]

    @classmethod
    async def create_many(
        cls,
        n: int,
        image: str = "",
        *,
        all_or_none: bool = True,
        snapshot: str | None = None,
        client: AsyncClient | None = None,
        **options: Unpack[CreateOptions],
    ) -> AsyncSandboxGroup:
        """Make n alike. With all_or_none it is n or an error; without, `failures` says what is missing and why."""
        request = create_request(image, snapshot=snapshot, count=n, all_or_none=all_or_none, options=options)
        return await _create(client or await default_client(), request, options)

    @classmethod
    async def connect(cls, sandbox_id: str, *, client: AsyncClient | None = None) -> AsyncSandbox:
        """A sandbox made earlier or elsewhere; NotFoundError when this key sees none of that id."""
        client = client or await default_client()
        path = f"/v1/sandboxes/{quote(sandbox_id, safe='')}"
        return cls(client, await client.transport.request("GET", path, SandboxInfo))

    @classmethod
    async def list(
        cls,
        *,
        labels: Mapping[str, str] | None = None,
        state: State | None = None,
        namespace: str = "",
        client: AsyncClient | None = None,
    ) -> list[SandboxInfo]:
        """The live ones, or those in `state`, such as "exited"; labels: only those with all.

        namespace: the key's own unless given; an admin key may name another, or * for all.
        """
        client = client or await default_client()
        pairs = [("label", f"{key}={value}") for key, value in (labels or {}).items()]
        pairs += [("state", state)] if state else []
        pairs += [("namespace", namespace)] if namespace else []
        query = f"?{urlencode(pairs)}" if pairs else ""
        return (await client.transport.request("GET", f"/v1/sandboxes{query}", SandboxList)).sandboxes

    async def exec(
        self,
        cmd: Sequence[str] | str,
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        user: str = "",
        stdin: bytes | str = b"",
        timeout_s: float | None = None,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        rlimits: Mapping[str, int] | None = None,
        exec_id: str = "",
    ) -> ExecResult:
        """Run a command to its end. Never raises for how it ended; `result.check()` does.

        cmd: a list is exact argv, a text is run by /bin/sh -c. stdin: given whole; without it the command reads EOF.
        timeout_s: after it the whole process tree is killed and `timed_out` is set. Beyond max_output_bytes head and
        tail are kept. A lost connection is outlasted: the same exec_id is asked for again, and never runs twice.
        Raises PlatformError when the platform can't tell how it ended, StateError when the sandbox does not run.
        """
        request = exec_request(
            cmd,
            cwd=cwd,
            env=dict(env or {}),
            user=user,
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            rlimits=dict(rlimits or {}),
            exec_id=exec_id or new_id("ex"),
        )
        if len(request.stdin) > _LARGE_STDIN_BYTES:
            return await self._exec_streaming(request)
        sending = self._transport.request(
            "POST",
            self._execs_path,
            ExecReply,
            body=request,
            quick=False,
            timeout_s=min(IDLE_S, (timeout_s or IDLE_S) + 30),
        )
        if timeout_s is None:
            return result_from_reply(await sending)
        try:
            async with asyncio.timeout(timeout_s + _EXEC_SLACK_S):
                return result_from_reply(await sending)
        except TimeoutError as late:
            raise DeadlineExceeded(
                "exec_no_reply",
                f"no end of the command was told within {timeout_s + _EXEC_SLACK_S:g} s",
                hint="attach(exec_id) asks for it again",
                details={"exec_id": request.exec_id},
            ) from late

    async def spawn(
        self,
        cmd: Sequence[str] | str,
        *,
        pty: bool | tuple[int, int] = False,
        stdin: bytes | str | bool = False,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        user: str = "",
        timeout_s: float | None = None,
        max_output_bytes: int = DEFAULT_OUTPUT_BYTES,
        rlimits: Mapping[str, int] | None = None,
        exec_id: str = "",
    ) -> AsyncProcess:
        """Start a command and return while it runs.

        stdin: True keeps it open for `write`; bytes or text are given whole; otherwise EOF at once. pty: True or
        (rows, cols) gives it a terminal, whose stdin is open. The rest as in `exec`.
        """
        size = (24, 80) if pty is True else pty
        whole = stdin.encode() if isinstance(stdin, str) else stdin if isinstance(stdin, bytes) else b""
        request = exec_request(
            cmd,
            cwd=cwd,
            env=dict(env or {}),
            user=user,
            stdin=whole,
            stdin_open=stdin is True or bool(pty),
            pty=Pty(rows=size[0], cols=size[1]) if size else None,
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            rlimits=dict(rlimits or {}),
            exec_id=exec_id or new_id("ex"),
        )
        process = AsyncProcess(self._transport, self.id, request.exec_id, request=request, since=0)
        return await process._start()

    async def attach(self, exec_id: str, *, since: int = 0) -> AsyncProcess:
        """A command started earlier, by whomever, running or ended; output from the offset `since` on."""
        process = AsyncProcess(self._transport, self.id, exec_id, request=None, since=check_since(since))
        return await process._start()

    async def execs(self) -> Sequence[ExecReply]:
        """The commands that the sandbox remembers, running and ended, without their output."""
        return (await self._transport.request("GET", self._execs_path, ExecList)).execs

    async def logs(self, exec_id: str) -> ExecReply:
        """What is kept of a command's output, and how it ended if it has; at once, also while it runs.

        Raises NotFoundError exec_not_found. `attach` follows it instead.
        """
        return await self._transport.request("GET", f"{self._execs_path}/{quote(exec_id, safe='')}", ExecReply)

    async def kill(self) -> SandboxInfo:
        """End it and return when its resources are gone. Harmless when it has ended already."""
        self._client.drop_lease(self.id)
        self.details = await self._transport.request("DELETE", self._path, SandboxInfo, timeout_s=120)
        return self.details

    async def info(self) -> SandboxInfo:
        """State, reason of the end, times, effective policy, timings."""
        self.details = await self._transport.request("GET", self._path, SandboxInfo)
        return self.details

    async def set_timeout(self, timeout_s: float) -> SandboxInfo:
        """Let it end timeout_s from now."""
        body = checked(SetTimeoutRequest, timeout_s=float(timeout_s))
        return await self._transport.request("PUT", f"{self._path}/timeout", SandboxInfo, body=body)

    async def renew_lease(self, lease_s: float) -> SandboxInfo:
        """Let it end when no renewal comes for lease_s; a lease given at create is renewed in the background."""
        body = checked(LeaseRequest, lease_s=float(lease_s))
        return await self._transport.request("PUT", f"{self._path}/lease", SandboxInfo, body=body)

    async def metrics(self) -> Metrics:
        """CPU, memory, processes and disk in use."""
        return await self._transport.request("GET", f"{self._path}/metrics", Metrics)

    async def plan(self) -> Sequence[dict[str, Any]]:
        """The operations that made it, as data."""
        return await self._transport.request("GET", f"{self._path}/plan", list[dict[str, Any]])

    async def pause(self) -> SandboxInfo:
        """Freeze it. NotSupported where the backend can't."""
        return await self._transport.request("POST", f"{self._path}/pause", SandboxInfo, timeout_s=120)

    async def resume(self) -> SandboxInfo:
        """Thaw it."""
        return await self._transport.request("POST", f"{self._path}/resume", SandboxInfo, timeout_s=120)

    async def snapshot(self) -> str:
        """Keep its state under a name. Raises NotSupported in this version."""
        raise not_supported("snapshot", self.details.backend, SNAPSHOTS_MISSING)

    async def rollback(self, snapshot: str) -> None:
        """Go back to a snapshot. Raises NotSupported in this version."""
        del snapshot
        raise not_supported("rollback", self.details.backend, SNAPSHOTS_MISSING)

    async def fork(self, n: int = 1) -> AsyncSandboxGroup:
        """Copies of it as it is now. Raises NotSupported in this version."""
        del n
        raise not_supported("fork", self.details.backend, SNAPSHOTS_MISSING)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await end_all([self], error)

    async def _exec_streaming(self, request: ExecRequest) -> ExecResult:
        """Large stdin goes over a stream. The command may end without reading it all, which is no error."""
        whole, request.stdin, request.stdin_open = request.stdin, b"", True
        process = AsyncProcess(self._transport, self.id, request.exec_id, request=request, since=0)
        async with await process._start(), asyncio.TaskGroup() as tasks:
            feeding = tasks.create_task(_feed(process, whole))
            result = await process.wait()
            feeding.cancel()
        return result


async def _create(client: AsyncClient, request: CreateRequest, options: CreateOptions) -> AsyncSandboxGroup:
    try:
        reply = await ask_until_room(client.transport, request)
    except asyncio.CancelledError:
        # The gateway may have answered in this very moment: what it made must not live without a caller. A key of the
        # caller's own is another matter: a repeat with it is to find what was made.
        if not options.get("idempotency_key"):
            await abandon(client.transport, request.idempotency_key)
        raise
    failures = failures_of(reply)
    sandboxes = [AsyncSandbox(client, info) for info in reply.sandboxes]
    if request.lease_s is not None:
        for sandbox in sandboxes:
            client.keep_lease(sandbox.id, request.lease_s)
    return AsyncSandboxGroup(sandboxes, failures)


async def _feed(process: AsyncProcess, whole: bytes) -> None:
    try:
        await process.write(whole)
        await process.close_stdin()
    except DsecError as error:
        if error.code != "stdin_closed":
            raise
