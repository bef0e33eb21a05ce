"""Who we are to a store: asked for at each need, so that secrets can change; never part of a URL, label or error."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_imagefs.stores.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_AUTHFILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """User name and password; for S3 the access key id and the secret key, with `token` of a session.

    For a registry `token` is an identity token (OAuth2 refresh token), used when there is no password.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)

    def basic(self) -> str:
        """The value of an ``Authorization`` header."""
        pair = f"{self.user}:{self.password}".encode()
        return "Basic " + base64.b64encode(pair).decode("ascii")


Logins = Callable[[str], "Login | None"]
"""Maps ``host[:port]/repository`` (for S3 ``host[:port]/bucket``) to a login; None for access without one.

Called from any thread."""


def no_login(_where: str) -> Login | None:
    """For stores that everyone may read."""
    return None


def authfile_logins(path: Path) -> Logins:
    """Logins of a containers-auth.json(5); it is read at each need, and the longest match of its keys counts."""

    def find(where: str) -> Login | None:
        return parse_authfile(_read(path), where, str(path))

    return find


def find_authfile(environ: Mapping[str, str]) -> Path | None:
    """The auth file podman, skopeo and docker would use, or None when there is none."""
    home = Path(environ.get("HOME", "/root"))
    named = environ.get("REGISTRY_AUTH_FILE")
    runtime = environ.get("XDG_RUNTIME_DIR")
    places = [Path(named)] if named else []
    places += [Path(runtime) / "containers/auth.json"] if runtime else []
    places += [home / ".config/containers/auth.json", home / ".docker/config.json"]
    return next((place for place in places if place.is_file()), None)


def parse_authfile(raw: bytes, where: str, shown: str) -> Login | None:
    """The login for ``host/repository`` in an auth file's text.

    Raises:
        StoreError: ``denied`` when the file can't be read or leaves the login to a helper program.
    """
    try:
        found = json.loads(raw)
        auths: dict[str, Any] = found.get("auths") or {}
        helpers: dict[str, Any] = found.get("credHelpers") or {}
        host = where.partition("/")[0]
        for key in _keys(where):
            if entry := auths.get(key):
                return _login(entry)
        if host in helpers or (found.get("credsStore") and host in auths):
            hint = "write the login into the file (skopeo login --authfile), or give it as a secret"
            raise StoreError("denied", f"{shown} leaves {host} to a helper program, which is not run here", hint)
    except (ValueError, TypeError, AttributeError, binascii.Error):
        raise StoreError("denied", f"{shown} is no auth file", "see containers-auth.json(5)", "authfile") from None
    return None


def _keys(where: str) -> list[str]:
    """``h/a/b`` -> itself, ``h/a``, ``h``, and the ways Docker writes a host."""
    parts = where.split("/")
    keys = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    host = parts[0]
    return [*keys, f"https://{host}", f"https://{host}/v1/", f"https://{host}/v2/", f"http://{host}"]


def _login(entry: dict[str, Any]) -> Login:
    if "auth" in entry:
        user, _, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
    else:
        user, password = str(entry.get("username", "")), str(entry.get("password", ""))
    return Login(user=user, password=password, token=str(entry.get("identitytoken", "")))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_AUTHFILE_BYTES + 1)
    except OSError as error:
        raise StoreError("denied", f"the auth file {path} can't be read: {error.strerror}", field="authfile") from error
    if len(raw) > MAX_AUTHFILE_BYTES:
        raise StoreError("denied", f"the auth file {path} is over {MAX_AUTHFILE_BYTES} bytes", field="authfile")
    return raw
