"""The door to HTTP stores: connections with one deadline for the whole exchange, and redirects that can't do harm.

urllib3 does the protocol. Added here, since stores are slow, broken or hostile: a deadline that holds for each byte
of headers and body, the exact-range rule, no credentials to another origin, no way to addresses of the machine itself.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util.ssl_ import create_urllib3_context

from dsec_imagefs.stores.base import StoreError, remaining
from dsec_imagefs.stores.retry import Pacer

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping

    from dsec_imagefs.stores.bodies import Part

CONNECT_S = 10.0
IDLE_S = 30.0
MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_BLOCK_BYTES = 256 << 10
_PIECE_BYTES = (1 << 20) + 1  # a block of the usual size, and the byte more that must not come, by one call
_REST_BYTES = 16 << 10
_PORTS = {"http": 80, "https": 443}
_METADATA = ("fd00:ec2::/32", "100.100.100.200/32")  # of clouds, outside the link-local range
_threads = threading.local()


class _DeadlineReader(io.RawIOBase):
    """A socket's bytes; each wait ends at the exchange's deadline, so that a drip of bytes can't stretch it."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._inner = sock.makefile("rb", buffering=0)
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline is over")
        self._sock.settimeout(min(left, IDLE_S))
        return self._inner.readinto(buffer)

    def close(self) -> None:
        self._inner.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = io.BufferedReader(_DeadlineReader(sock, _threads.deadline), 64 << 10)


class _Plain(HTTPConnection):
    response_class = _Response


class _Secure(HTTPSConnection):
    response_class = _Response


class _StrangerPlain(_Plain):
    def _new_conn(self) -> socket.socket:
        return _checked_peer(super()._new_conn())


class _StrangerSecure(_Secure):
    def _new_conn(self) -> socket.socket:
        return _checked_peer(super()._new_conn())


class _PlainPool(HTTPConnectionPool):
    ConnectionCls = _Plain


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _Secure


class _StrangerPlainPool(HTTPConnectionPool):
    ConnectionCls = _StrangerPlain


class _StrangerSecurePool(HTTPSConnectionPool):
    ConnectionCls = _StrangerSecure


def is_private_to_host(address: str) -> bool:
    """Whether an IP address is the machine's own or its cloud's metadata: a store may not send us there."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    known = any(ip in net for text in _METADATA if (net := ipaddress.ip_network(text)).version == ip.version)
    return known or ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast


def _checked_peer(sock: socket.socket) -> socket.socket:
    """After connect, before the first byte is sent: the name may resolve to anything."""
    address = sock.getpeername()[0]
    if is_private_to_host(address):
        sock.close()
        raise StoreError("denied", f"a redirect leads to {address}, an address of this machine or its cloud")
    return sock


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A response whose body is not read yet."""

    status: int
    headers: urllib3.HTTPHeaderDict
    url: str
    raw: urllib3.BaseHTTPResponse
    what: str
    deadline: float

    def chunks(self, limit: int) -> Iterator[bytes]:
        """The body in pieces, at most `limit` bytes of it; then the connection is not used again unless it ended."""
        left = limit
        with _faults(self.what, self.deadline):
            while left and (chunk := self.raw.read(min(left, _PIECE_BYTES), decode_content=False)):
                left -= len(chunk)
                yield chunk

    def whole(self, limit: int) -> bytes:
        """The body; raises StoreError ``too_large`` beyond `limit` bytes."""
        body = b"".join(self.chunks(limit + 1))
        if len(body) > limit:
            raise StoreError("too_large", f"{self.what}: a reply of more than {limit} bytes")
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpDoor:
    """Connections to one origin (``https://host[:port]``) and to where it redirects.

    Attributes:
        origin: the store's own scheme and host.
        ca_file: certificates to trust instead of the system's, or "".
        connections: kept open for each host; more are made when more threads ask.
    """

    origin: str
    ca_file: str = ""
    connections: int = 16
    pacer: Pacer = field(default_factory=Pacer)
    _own: urllib3.PoolManager = field(init=False)
    _strangers: urllib3.PoolManager = field(init=False)

    def __post_init__(self) -> None:
        _hide_queries()
        trusted = self._manager({"http": _PlainPool, "https": _SecurePool})
        if is_loopback_url(self.origin) or isinstance(trusted, urllib3.ProxyManager):
            strangers = trusted  # another port of this machine; or a proxy, whose address says nothing of the target's
        else:
            strangers = self._manager({"http": _StrangerPlainPool, "https": _StrangerSecurePool})
        object.__setattr__(self, "_own", trusted)
        object.__setattr__(self, "_strangers", strangers)

    def _manager(self, pools: Mapping[str, Any]) -> urllib3.PoolManager:
        context = create_urllib3_context()
        if self.ca_file:
            context.load_verify_locations(self.ca_file)
        else:
            context.load_default_certs()
        options: dict[str, Any] = {
            "num_pools": 8, "maxsize": self.connections, "retries": False, "blocksize": _BLOCK_BYTES,
            "ssl_context": context,
        }  # fmt: skip
        target = urlsplit(self.origin)
        proxy = getproxies().get(target.scheme)
        if proxy and not proxy_bypass(target.hostname or ""):
            manager: urllib3.PoolManager = urllib3.ProxyManager(proxy, **options)
        else:
            manager = urllib3.PoolManager(**options)
        manager.pool_classes_by_scheme = dict(pools)
        return manager

    @contextmanager
    def exchange(
        self,
        method: str,
        url: str,
        *,
        deadline: float,
        what: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | Part | None = None,
        follow: bool = True,
    ) -> Iterator[Reply]:
        """One request and its reply; redirects are followed for GET and HEAD.

        Args:
            method: of HTTP.
            url: absolute, or a path of the origin.
            deadline: instant of `time.monotonic()` by which the last byte must be here.
            what: for messages, without secrets: "registry.example/repo: object 12ab".
            headers: ``Authorization`` and ``Cookie`` go to the origin only.
            body: sent with its length.
            follow: False to get a redirect as the reply.

        Raises:
            StoreError: ``unavailable``, ``deadline``, ``short``, ``denied`` (a redirect to where it must not lead).
        """
        target = urljoin(self.origin + "/", url)
        sent = {"User-Agent": "nomad-dsec", "Accept-Encoding": "identity", **(headers or {})}
        for _ in range(MAX_REDIRECTS + 1):
            self.pacer.wait_free(deadline, what)
            with self._once(method, target, sent, body, what, deadline) as reply:
                location = reply.headers.get("Location", "")
                if not (follow and reply.status in _REDIRECTS and location and method in ("GET", "HEAD")):
                    yield reply
                    return
            target = self.redirect_target(target, location, what)
            if not same_origin(target, self.origin):
                sent = {key: value for key, value in sent.items() if key not in ("Authorization", "Cookie")}
        raise StoreError("bad_reply", f"{what}: more than {MAX_REDIRECTS} redirects")

    def redirect_target(self, url: str, location: str, what: str) -> str:
        """Where a redirect leads; raises StoreError ``denied`` for other schemes, from https to http, to ourselves."""
        try:
            target = urljoin(url, location)
            parts = urlsplit(target)
            host, _ = parts.hostname or "", parts.port
        except ValueError as error:
            raise StoreError("bad_reply", f"{what}: a redirect to no URL") from error
        if parts.scheme not in _PORTS or not host:
            raise StoreError("denied", f"{what}: a redirect to {parts.scheme[:20]}:, only http and https are followed")
        if parts.scheme == "http" and url.startswith("https:"):
            raise StoreError("denied", f"{what}: a redirect from https to http ({host})")
        if parts.username is not None or parts.password is not None:
            raise StoreError("denied", f"{what}: a redirect with a user name in it ({host})")
        if not is_loopback_url(self.origin) and _is_literal(host) and is_private_to_host(host):
            raise StoreError("denied", f"{what}: a redirect to {host}, an address of this machine or its cloud")
        return target

    @contextmanager
    def _once(
        self, method: str, url: str, headers: dict[str, str], body: bytes | Part | None, what: str, deadline: float
    ) -> Iterator[Reply]:
        left = remaining(deadline, what)
        pools = self._own if same_origin(url, self.origin) else self._strangers
        timeout = urllib3.Timeout(connect=min(left, CONNECT_S), read=min(left, IDLE_S))
        _threads.deadline = deadline
        with _faults(what, deadline):
            raw = pools.urlopen(
                method, url, headers=headers, body=body, timeout=timeout, preload_content=False, redirect=False,
                decode_content=False,
            )  # fmt: skip
        good = False
        try:
            yield Reply(status=raw.status, headers=raw.headers, url=url, raw=raw, what=what, deadline=deadline)
            good = raw.connection is None or _read_rest(raw, method)
        finally:
            if not good:
                raw.close()
            raw.release_conn()

    def close(self) -> None:
        """Close all connections."""
        self._own.clear()
        self._strangers.clear()


def _read_rest(raw: urllib3.BaseHTTPResponse, method: str) -> bool:
    """Whether the connection can be used again: the rest of the body is short, and read.

    Errors may come with a length that is not true (416 has the object's): their bodies are not waited for.
    """
    left = raw.length_remaining
    if left is None or left > _REST_BYTES or (raw.status >= 400 and method != "HEAD"):
        return False
    try:
        raw.read(left + 1, decode_content=False)
    except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError):
        return False
    return True


def same_origin(url: str, origin: str) -> bool:
    """Whether scheme, host and port are the same."""
    return _origin(url) == _origin(origin)


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme)


def is_loopback_url(url: str) -> bool:
    """Whether a URL names this machine: ``localhost`` or a loopback address."""
    host = (urlsplit(url).hostname or "").lower()
    return host == "localhost" or (_is_literal(host) and ipaddress.ip_address(host).is_loopback)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


@contextmanager
def _faults(what: str, deadline: float) -> Iterator[None]:
    """Errors of urllib3 as ours, cut from their cause: its text quotes URLs with signatures in them."""
    try:
        yield
    except (urllib3.exceptions.SSLError, urllib3.exceptions.LocationValueError) as error:
        text = f"{what}: no secure connection ({type(error).__name__})"
        raise StoreError("unavailable", text, "check the certificate, or give ca=") from None
    except (
        urllib3.exceptions.NewConnectionError,
        urllib3.exceptions.ProxyError,
    ) as error:  # the first is a timeout too
        reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else type(error).__name__
        raise StoreError("unavailable", f"{what}: no connection ({reason})", retryable=True) from None
    except (urllib3.exceptions.TimeoutError, TimeoutError):
        late = time.monotonic() >= deadline
        code, text = ("deadline", "did not answer in time") if late else ("unavailable", "is silent")
        raise StoreError(code, f"{what}: {text}", retryable=True) from None
    except (urllib3.exceptions.ProtocolError, http.client.HTTPException, ConnectionError):
        raise StoreError("short", f"{what}: the connection broke", retryable=True) from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise StoreError("unavailable", f"{what}: no answer ({type(error).__name__})", retryable=True) from None


def _hide_queries() -> None:
    """urllib3 logs the URLs of odd replies; those of presigned objects are secrets."""
    for name in ("urllib3.connection", "urllib3.connectionpool"):
        log = logging.getLogger(name)
        if _without_query not in log.filters:
            log.addFilter(_without_query)


def _without_query(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(
            arg.partition("?")[0] + "?…" if isinstance(arg, str) and "?" in arg else arg for arg in record.args
        )
    record.exc_info = None
    return True
