"""Authorization at a registry: its challenge, the token it wants, and one refresh when that has expired."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from dsec_imagefs.stores.base import StoreError, remaining
from dsec_imagefs.stores.http import HttpDoor, is_loopback_url, same_origin
from dsec_imagefs.stores.ranges import status_error

if TYPE_CHECKING:
    from dsec_imagefs.stores.credentials import Login, Logins

MAX_TOKEN_BYTES = 256 << 10
_SCHEME = re.compile(r"\s*(bearer|basic)\b\s*(.*)", re.IGNORECASE | re.DOTALL)
_PARAMETER = re.compile(r'([a-zA-Z_]+)\s*=\s*(?:"((?:[^"\\]|\\.){0,4096})"|([^\s",]{0,4096}))')
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """A ``WWW-Authenticate``: `scheme` is ``bearer`` or ``basic``, `endpoint` what the header calls ``service``."""

    scheme: str
    realm: str = ""
    endpoint: str = ""


def parse_challenge(value: str) -> Challenge | None:
    """Read the header's first challenge; None when it is none we know."""
    match = _SCHEME.match(value[:16384])
    if match is None:
        return None
    found = {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(match[2])}
    return Challenge(scheme=match[1].lower(), realm=found.get("realm", ""), endpoint=found.get("service", ""))


@dataclass(slots=True, kw_only=True)
class Tokens:
    """The current ``Authorization`` of one repository. One thread renews it, the others wait and use what it got."""

    door: HttpDoor
    where: str
    repository: str
    logins: Logins
    _state: tuple[int, str] = field(default=(0, ""), repr=False)
    _last: Challenge | None = None
    _renewing: threading.Lock = field(default_factory=threading.Lock)

    def current(self) -> tuple[int, dict[str, str]]:
        """The generation and the headers to send."""
        generation, header = self._state
        return generation, {"Authorization": header} if header else {}

    def renew(self, generation: int, challenge: Challenge | None, *, push: bool, deadline: float) -> bool:
        """After a 401, or a 403 that a fresh token may cure: get a new header, unless another thread has.

        Args:
            generation: of what was refused.
            challenge: of the refusal; None means the last one again (expiry may come as a bare 403).
            push: whether writing is wanted.
            deadline: instant of `time.monotonic()`.

        Returns:
            False when there is nothing better to send than what was refused.
        """
        if not self._renewing.acquire(timeout=remaining(deadline, self.where)):
            raise StoreError("deadline", f"{self.where}: no token in time", retryable=True)
        try:
            if self._state[0] != generation:
                return True
            challenge = challenge or self._last
            if challenge is None:
                return False
            self._last = challenge
            login = self.logins(self.where)
            if challenge.scheme == "basic":
                header = login.basic() if login else ""
                if header in ("", self._state[1]):
                    return False
            else:
                header = "Bearer " + self._fetch(challenge, login, push, deadline)
            self._state = (generation + 1, header)
            return True
        finally:
            self._renewing.release()

    def _fetch(self, challenge: Challenge, login: Login | None, push: bool, deadline: float) -> str:
        what = f"{self.where}: token"
        realm = self._checked_realm(challenge.realm)
        # The scope the registry names is not taken: it must not widen a token to other repositories.
        query = {"scope": f"repository:{self.repository}:pull" + (",push" if push else "")}
        if challenge.endpoint:
            query["service"] = challenge.endpoint
        if login is not None and login.token and not login.password:
            form = query | {"grant_type": "refresh_token", "refresh_token": login.token, "client_id": "nomad-dsec"}
            sent = {"Content-Type": "application/x-www-form-urlencoded"}
            body = urlencode(form).encode()
            exchange = self.door.exchange("POST", realm, deadline=deadline, what=what, headers=sent, body=body)
        else:
            sent = {"Authorization": login.basic()} if login else {}
            url = realm + ("&" if "?" in realm else "?") + urlencode(query)
            exchange = self.door.exchange("GET", url, deadline=deadline, what=what, headers=sent, follow=False)
        with exchange as reply:
            if reply.status != 200:
                raise status_error(reply.status, reply.headers, what)
            return _read_token(reply.whole(MAX_TOKEN_BYTES), what)

    def _checked_realm(self, realm: str) -> str:
        """Where the password goes: never in clear text over a network, never to this machine's own addresses."""
        target = self.door.redirect_target(self.door.origin, realm, f"{self.where}: token")
        parts = urlsplit(target)
        if parts.scheme == "http" and not same_origin(target, self.door.origin) and not is_loopback_url(target):
            raise StoreError("denied", f"{self.where}: its tokens come from {parts.hostname} without https")
        return target


def _read_token(raw: bytes, what: str) -> str:
    try:
        found: Any = json.loads(raw)
        token = found.get("token") or found.get("access_token")
    except (ValueError, AttributeError):
        token = None
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise StoreError("bad_reply", f"{what}: the reply holds no token")
    return token
