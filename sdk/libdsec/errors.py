"""What can go wrong, named by whose fault it was. An exit code of the user's program is never one of these.

The wire carries `ErrorBody` (code, message, hint, field, retry, kind, details); never a class name or a traceback.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class ErrorBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The JSON form of an error: `{"error": {...}}` with an HTTP status >= 400."""

    kind: str
    code: str
    message: str
    hint: str = ""
    field: str = ""
    retry_after_s: float | None = None
    details: dict[str, Any] = {}


class DsecError(Exception):
    """Root of every error of ours.

    code: stable string of a closed set; message: one sentence; hint: what to do; field: the input at fault, if one is;
    retry_after_s: seconds after which the same call may succeed, None when repeating it is pointless.
    """

    kind: ClassVar[str] = "platform"
    status: ClassVar[int] = 500

    def __init__(
        self,
        code: str,
        message: str,
        *,
        hint: str = "",
        field: str = "",
        retry_after_s: float | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.field = field
        self.retry_after_s = retry_after_s
        self.details = details or {}

    def __str__(self) -> str:
        parts = [f"{self.code}: {self.message}"]
        if self.field:
            parts.append(f"(field {self.field})")
        if self.hint:
            parts.append(f"- {self.hint}")
        return " ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.to_body()))

    def to_body(self) -> ErrorBody:
        r"""The wire form. Bytes of names that are not UTF-8 (surrogates in Python) are spelt out, as `\xff`."""
        return ErrorBody(
            kind=self.kind,
            code=self.code,
            message=_spelt(self.message),
            hint=_spelt(self.hint),
            field=_spelt(self.field),
            retry_after_s=self.retry_after_s,
            details=_spelt_all(self.details),
        )


class UsageError(DsecError):
    """The request is wrong; the message names the field and the fix (HTTP 400)."""

    kind = "usage"
    status = 400


class NotFoundError(UsageError):
    """The named sandbox, exec, image or file does not exist (HTTP 404)."""

    kind = "not_found"
    status = 404


class StateError(DsecError):
    """The sandbox is in a state in which this can't be done, such as exec on an exited one (HTTP 409)."""

    kind = "state"
    status = 409


class NotSupported(StateError):
    """The backend or host has not got the feature; nothing was changed (HTTP 501)."""

    kind = "not_supported"
    status = 501


class DeniedError(DsecError):
    """Key, token or quota does not allow it (HTTP 401 or 403)."""

    kind = "denied"
    status = 403


class CapacityError(DsecError):
    """No room at present; `details["refusals"]` counts nodes by reason (HTTP 429 or 503)."""

    kind = "capacity"
    status = 503


class DeadlineExceeded(DsecError):
    """A wait of ours ended before what was waited for; the sandbox may still be fine (HTTP 504)."""

    kind = "deadline"
    status = 504


class ProtocolError(DsecError):
    """A peer sent what the protocol does not allow (HTTP 502)."""

    kind = "protocol"
    status = 502


class PlatformError(DsecError):
    """The platform could not do what was asked; training should mask or retry, not grade (HTTP 500)."""


_BY_KIND: dict[str, type[DsecError]] = {
    cls.kind: cls
    for cls in (
        UsageError,
        NotFoundError,
        StateError,
        NotSupported,
        DeniedError,
        CapacityError,
        DeadlineExceeded,
        ProtocolError,
        PlatformError,
    )
}


def _spelt(text: str) -> str:
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _spelt_all(value: Any) -> Any:
    if isinstance(value, str):
        return _spelt(value)
    if isinstance(value, dict):
        return {_spelt_all(key): _spelt_all(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelt_all(item) for item in value]
    return value


def error_from_body(body: ErrorBody) -> DsecError:
    """The exception for a wire error; an unknown kind becomes a PlatformError that keeps the code."""
    cls = _BY_KIND.get(body.kind, PlatformError)
    return cls(
        body.code,
        body.message,
        hint=body.hint,
        field=body.field,
        retry_after_s=body.retry_after_s,
        details=body.details,
    )


def _rebuild(cls: type[DsecError], body: ErrorBody) -> DsecError:
    del cls  # pickled inside one process family only; the kind says it all
    return error_from_body(body)
