"""Where the gateway is and who we are: arguments first, then DSEC_ENDPOINT and DSEC_API_KEY, read when first needed."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field

from libdsec.errors import UsageError

ENDPOINT_VARIABLE = "DSEC_ENDPOINT"
KEY_VARIABLE = "DSEC_API_KEY"
_MOST_CONNECTIONS = 512
_SPARE_FDS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to reach a gateway.

    endpoint: `http://host:port`, `https://...` or `unix:/path`. max_connections bounds the calls that are on their way
    at once, and apart from them the streams (further ones wait). reconnect_s: how long a call that may be repeated goes
    on trying after a cut.
    """

    endpoint: str
    api_key: str = field(repr=False)
    max_connections: int
    connect_timeout_s: float = 10.0
    reconnect_s: float = 60.0


def load_settings(
    endpoint: str | None = None,
    api_key: str | None = None,
    *,
    max_connections: int | None = None,
    connect_timeout_s: float = 10.0,
    reconnect_s: float = 60.0,
) -> Settings:
    """Settings from arguments, then the environment; UsageError when no endpoint is known."""
    where = (endpoint or os.environ.get(ENDPOINT_VARIABLE, "")).rstrip("/")
    if not where:
        raise UsageError(
            "no_endpoint",
            "no gateway is known",
            field="endpoint",
            hint=f"set {ENDPOINT_VARIABLE} and {KEY_VARIABLE} (`dsec dev` prints both) or pass endpoint= and api_key=",
        )
    if not where.startswith(("http://", "https://", "unix:")):
        raise UsageError(
            "bad_endpoint",
            f"{where[:80]!r} is not an endpoint",
            field="endpoint",
            hint="use http://host:port or unix:/path",
        )
    key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE, "")
    if not key.isascii() or any(ch in key for ch in "\r\n\0"):
        raise UsageError("bad_api_key", "the API key has characters no key has", field="api_key")
    return Settings(
        endpoint=where,
        api_key=key.strip(),
        max_connections=max_connections or _connections_that_fit(),
        connect_timeout_s=connect_timeout_s,
        reconnect_s=reconnect_s,
    )


def _connections_that_fit() -> int:
    """Many shells allow 1,024 fds: calls and streams together leave some to the training job, yet serve wide use."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(16, min(_MOST_CONNECTIONS, (soft - _SPARE_FDS) // 2))
