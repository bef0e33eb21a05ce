"""Small pieces that every HTTP server of ours shares: decoding with named fields, errors as JSON, listening."""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from libdsec.errors import DeadlineExceeded, DeniedError, DsecError, ErrorBody, PlatformError, UsageError

from nomad_dsec.ids import new_request_id
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

log = get_log(__name__)
T = TypeVar("T")
N = TypeVar("N", int, float)
JSON_TYPE = "application/json"
BODY_TIMEOUT_S = 120.0
# What msgspec raises for text that is no JSON, is not what was asked for, or is nested too deeply.
DECODE_ERRORS = (msgspec.ValidationError, msgspec.DecodeError, RecursionError)
_KEY_IN_PATH = re.compile(r"dsk_[^/]*")
_encoder = msgspec.json.Encoder()


class _ErrorReply(msgspec.Struct):
    error: ErrorBody


def json_reply(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A msgspec-encodable value as the whole reply."""
    return web.Response(body=_encoder.encode(value), status=status, content_type=JSON_TYPE, headers=headers)


def error_reply(error: DsecError) -> web.Response:
    """The JSON form of an error, with Retry-After when the same call may succeed later."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return json_reply(_ErrorReply(error.to_body()), status=error.status, headers=headers)


def usage_from_decode(error: Exception, what: str) -> UsageError:
    """A UsageError that names the field, from msgspec's `... - at $.path` text."""
    text = str(error)
    message, _, where = text.replace(" - at `key` in `", " - at `").partition(" - at `")
    field = where.rstrip("`").removeprefix("$").removeprefix(".")
    if "unknown field `" in message:
        field = message.split("unknown field `", 1)[1].rstrip("`")
    elif "missing required field `" in message:
        field = message.split("missing required field `", 1)[1].rstrip("`")
    return UsageError("bad_request", f"{what}: {message}", field=field, hint="see /openapi.json for the shape")


def decode_json(body: bytes, kind: type[T]) -> T:
    """Decode and validate; UsageError bad_request names the field."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except DECODE_ERRORS as error:
        raise usage_from_decode(error, kind.__name__) from error


async def read_body(request: web.Request, *, max_bytes: int) -> bytes:
    """The whole body, or UsageError body_too_large, or DeadlineExceeded body_timeout when the client dawdles."""
    if request.content.is_eof():  # it came with the head, as that of most calls does: no timer, no turn of the loop
        body = request.content.read_nowait(-1)
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        return body
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _read_body(request, max_bytes)
    except TimeoutError as late:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise DeadlineExceeded("body_timeout", message, hint="is the connection that slow?", field="body") from late


async def _read_body(request: web.Request, max_bytes: int) -> bytes:
    if request.content_length is not None and request.content_length > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    async for chunk in request.content.iter_any():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(chunk)
    return b"".join(parts)


def _too_large(max_bytes: int) -> UsageError:
    return UsageError(
        "body_too_large", f"the body is over {max_bytes} bytes", field="body", hint="send large content by files.write"
    )


async def read_json(request: web.Request, kind: type[T], *, max_bytes: int = 4 * 1024 * 1024) -> T:
    """Read and decode a JSON body."""
    return decode_json(await read_body(request, max_bytes=max_bytes), kind)


def query_float(request: web.Request, name: str, default: float | None) -> float | None:
    """A number from the query string; UsageError names it."""
    return _query(request, name, default, float)


def query_int(request: web.Request, name: str, default: int | None) -> int | None:
    """A whole number from the query string; UsageError names it."""
    return _query(request, name, default, int)


def _query(request: web.Request, name: str, default: N | None, kind: Callable[[str], N]) -> N | None:
    text = request.query.get(name, "")
    if not text:
        return default
    try:
        return kind(text)
    except ValueError as error:
        raise UsageError(
            "bad_query", f"{text[:80]!r} is not a number", field=name, hint=f"give {name}=<number>"
        ) from error


def bearer(request: web.Request) -> str:
    """The token of the Authorization header, or DeniedError."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise DeniedError("no_credentials", "no API key was given", hint="send `Authorization: Bearer <key>`")
    return token.strip()


def without_keys(path: str) -> str:
    """A path as it may be logged: some clients can send their API key nowhere else."""
    return _KEY_IN_PATH.sub("dsk_...", path)


def same_secret(given: str, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


@web.middleware
async def error_middleware(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The boundary of every route: our errors become JSON, unforeseen ones are logged and named by a request id."""
    try:
        _check_encoding(request)
        return await handler(request)
    except DsecError as error:
        return error_reply(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        kind = DeniedError if error.status in (401, 403) else UsageError
        words = " ".join((error.text or "").split())  # such as what a WebSocket's request lacks
        hint = words if words != f"{error.status}: {error.reason}" else "GET /openapi.json lists what there is"
        message = f"{request.method} {without_keys(request.path)}: {error.reason}"
        reply = error_reply(kind(f"http_{error.status}", message, hint=hint))
        reply.set_status(error.status)
        return reply
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except Exception:
        request_id = new_request_id()
        path = without_keys(request.path)
        log.exception("a request failed unforeseen", request=request_id, method=request.method, path=path)
        return error_reply(
            PlatformError("internal_error", f"the server failed on this request ({request_id})", hint="see its log")
        )


def _check_encoding(request: web.Request) -> None:
    """Bodies are taken as they are: unpacked ones would be of another length than announced, and of any size."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise UsageError(
            "content_encoding",
            f"a body in {encoding[:40]!r} is not taken",
            field="Content-Encoding",
            hint="send the body itself, without that header",
        )


class _Connection(RequestHandler):
    """One connection, which answers in JSON also to what is no HTTP request; aiohttp would in plain text."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError) or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        # The first line says what is wrong; those below it repeat what was sent, which may hold a key.
        said = (message or exc.message or "it can't be read").splitlines()[0][:200].rstrip(": ")
        reply = error_reply(UsageError("bad_http", f"this is no HTTP request: {said}", hint="speak HTTP/1.1"))
        reply.set_status(status)
        reply.force_close()
        return reply


class _Server(web.Server):
    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    __slots__ = ()

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )


@dataclass(slots=True)
class Running:
    """A listening server."""

    address: str
    _runner: web.AppRunner

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """Stop listening, give running requests timeout_s, then cut them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s + 5):
                await self._runner.cleanup()


async def listen_tcp(app: web.Application, host: str, port: int, *, shutdown_s: float = 2.0) -> Running:
    """Serve on host:port (0 picks a free one); the address is `http://host:port`."""
    runner = _Runner(app, access_log=None, shutdown_timeout=shutdown_s, handler_cancellation=True)
    await runner.setup()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        await runner.cleanup()
        raise UsageError("cannot_listen", f"can't listen on {host}:{port}: {error.strerror}", field="port") from error
    await web.SockSite(runner, sock, backlog=4096).start()
    name = f"[{host}]" if family == socket.AF_INET6 else host
    return Running(f"http://{name}:{sock.getsockname()[1]}", runner)


async def listen_unix(app: web.Application, path: Path, *, shutdown_s: float = 2.0) -> Running:
    """Serve on a Unix socket that only this user may open."""
    runner = _Runner(app, access_log=None, shutdown_timeout=shutdown_s, handler_cancellation=True)
    await runner.setup()
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    path.chmod(0o600)
    await web.SockSite(runner, sock, backlog=4096).start()
    return Running(f"unix:{path}", runner)
