"""Where nodes are found: endpoints, and sources of them. A static list here; discovered.py has Consul."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from libdsec.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """How to reach one node daemon: an http base URL, or a Unix socket path; the token is only for TCP.

    node: the id that it must call itself by, where the source of it says so; "" for those of the settings.
    """

    url: str = ""
    unix_path: str = ""
    token: str = field(default="", repr=False)
    node: str = ""

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
    return Endpoint(url=_url(parts.hostname, port), token=parts.fragment)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def node_url(host: str, port: int) -> str:
    """`http://host:port`; ValueError when they can't be that."""
    if _HOST.fullmatch(host) is None or not 0 < port < 65_536:
        raise ValueError(host, port)
    return _url(host, port)


def _bad(text: str, why: str) -> UsageError:
    shown = text.partition("#")[0][:120]
    return UsageError(
        "bad_endpoint",
        f"{shown!r} is no node endpoint: {why}",
        field="gateway.nodes",
        hint="give unix:/path/node.sock or http://host:port#token (the token is in the node's <data>/token)",
    )


class NodeSource(Protocol):
    """Where the gateway learns of nodes. Asked every few seconds and when it says so; what fails keeps its answer."""

    @property
    def changed(self) -> asyncio.Event:
        """Set when the answer may be another; the asker clears it."""
        ...

    @property
    def stale(self) -> bool:
        """Whether there may be nodes that it does not know of now."""
        ...

    async def endpoints(self) -> Sequence[Endpoint]:
        """All endpoints at present."""
        ...

    def remember(self, nodes: Mapping[str, str]) -> None:
        """Nodes of a former run of the gateway: id -> name of the endpoint."""
        ...

    def age_s(self) -> float | None:
        """Seconds since the answer was last confirmed, None when it never was."""
        ...

    def notes(self) -> list[str]:
        """What an operator should know of the answer."""
        ...


class StaticSource:
    """A fixed list, from settings."""

    stale = False

    def __init__(self, endpoints: Sequence[Endpoint], *, notes: Sequence[str] = ()) -> None:
        self._endpoints = tuple(dict.fromkeys(endpoints))
        self._notes = list(notes)
        self.changed = asyncio.Event()

    async def endpoints(self) -> Sequence[Endpoint]:
        """The list."""
        return self._endpoints

    def remember(self, nodes: Mapping[str, str]) -> None:
        """The settings have the last word."""

    def age_s(self) -> float | None:
        """Always true."""
        return 0.0

    def notes(self) -> list[str]:
        """What was said when it was made."""
        return self._notes
