"""Where nodes are found: endpoints, and sources of them. A static list now; Consul is another source later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from libdsec.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """How to reach one node daemon: an http base URL, or a Unix socket path; the token is only for TCP."""

    url: str = ""
    unix_path: str = ""
    token: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """For logs and listings; no secret in it."""
        return f"unix:{self.unix_path}" if self.unix_path else self.url


def parse_endpoint(text: str) -> Endpoint:
    """`unix:/path/node.sock` or `http://host:port#token`; UsageError bad_endpoint says what is wrong."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/"):
            raise _bad(text, "the socket path must be absolute")
        return Endpoint(unix_path=path)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _bad(text, str(error)) from error
    if parts.scheme != "http" or not parts.hostname or port is None:
        raise _bad(text, "it is neither unix:/path nor http://host:port#token")
    if parts.path not in ("", "/") or parts.query or parts.username is not None:
        raise _bad(text, "there may be nothing between the port and the #")
    if not parts.fragment:
        raise _bad(text, "the node's token is missing")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Endpoint(url=f"http://{host}:{port}", token=parts.fragment)


def _bad(text: str, why: str) -> UsageError:
    shown = text.partition("#")[0][:120]
    return UsageError(
        "bad_endpoint",
        f"{shown!r} is no node endpoint: {why}",
        field="gateway.nodes",
        hint="give unix:/path/node.sock or http://host:port#token (the token is in the node's <data>/token)",
    )


class NodeSource(Protocol):
    """Where the gateway learns of nodes. Asked every few seconds; a failing source keeps the last answer."""

    async def endpoints(self) -> Sequence[Endpoint]:
        """All endpoints at present."""
        ...


class StaticSource:
    """A fixed list, from settings."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = tuple(dict.fromkeys(endpoints))

    async def endpoints(self) -> Sequence[Endpoint]:
        """The list."""
        return self._endpoints
