"""Vault's documented HTTP for what we ask of it, in memory. A request that the documentation does not have is a fault.

`with strict_vault() as vault` raises at its end when one came. Paths and bodies: the API pages of KV v2, token, AppRole
and JWT.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DENIED = {"errors": ["permission denied"]}


@dataclass
class Token:
    """ttl 0: it does not expire. prefix: the paths of secrets that it may read."""

    ttl: int = 0
    renewable: bool = False
    prefix: str = ""
    renewals: int = 0


@dataclass
class StrictVault:
    """State, and what came: `requests` as (method, path), `unexpected` in words."""

    address: str = ""
    namespace: str = ""
    tokens: dict[str, Token] = field(default_factory=dict)
    kv: dict[str, list[dict[str, Any] | None]] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    jwts: dict[str, str] = field(default_factory=dict)
    answer: tuple[int, dict[str, str], bytes] | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    hold: threading.Event | None = None
    _serial: int = 0

    def new_token(self, prefix: str, *, ttl: int = 3600, renewable: bool = True) -> str:
        """A token that reads the secrets below `prefix`."""
        self._serial += 1
        text = f"hvs.strict-{self._serial}-{'x' * 20}"
        self.tokens[text] = Token(ttl=ttl, renewable=renewable, prefix=prefix)
        return text

    def put(self, path: str, data: dict[str, Any]) -> None:
        """A new version of `mount/path`."""
        self.kv.setdefault(path, []).append(data)

    def delete(self, path: str) -> None:
        """The newest version is deleted."""
        self.kv[path][-1] = None

    def revoke(self, token: str) -> None:
        """It is no longer good."""
        del self.tokens[token]

    def new_approle(self, prefix: str) -> tuple[str, str]:
        """(role_id, secret_id)."""
        self._serial += 1
        role, secret = f"role-{self._serial}", f"secret-id-{self._serial}-{'s' * 16}"
        self.roles[role + "\0" + secret] = prefix
        return role, secret

    def new_jwt(self, role: str, prefix: str) -> str:
        """A JWT that opens this role."""
        self._serial += 1
        jwt = f"eyJ.strict-{self._serial}.sig"
        self.jwts[role + "\0" + jwt] = prefix
        return jwt

    def handle(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        """(status, JSON)."""
        self.requests.append((method, path))
        if headers.get("x-vault-request") != "true":
            return self._strange(f"{method} {path} without X-Vault-Request")
        if headers.get("x-vault-namespace", "") != self.namespace:
            return self._strange(f"{method} {path} in namespace {headers.get('x-vault-namespace')}")
        token = headers.get("x-vault-token", "")
        login = re.fullmatch(r"/v1/auth/([a-z-]+)/login", path)
        if login is not None:
            if method != "POST":
                return self._strange(f"{method} {path}: logins are POSTed")
            return self._strange("a login with a token") if token else self._login(login[1], json.loads(body))
        if token not in self.tokens:
            return 403, DENIED
        if (method, path) == ("GET", "/v1/auth/token/lookup-self"):
            facts = self.tokens[token]
            return 200, {"data": {"ttl": facts.ttl, "renewable": facts.renewable, "policies": ["default"]}}
        if (method, path) == ("POST", "/v1/auth/token/renew-self"):
            return self._renew(token)
        read = re.fullmatch(r"/v1/([a-z]+)/data/([A-Za-z0-9._/-]+)", path)
        if method == "GET" and read is not None and not body:
            return self._read(self.tokens[token], f"{read[1]}/{read[2]}")
        return self._strange(f"{method} {path}")

    def _strange(self, what: str) -> tuple[int, Any]:
        self.unexpected.append(what)
        return 405, {"errors": ["1 error occurred: unsupported operation"]}

    def _login(self, method: str, body: dict[str, Any]) -> tuple[int, Any]:
        if method == "approle" and body.keys() == {"role_id", "secret_id"}:
            prefix = self.roles.get(f"{body['role_id']}\0{body['secret_id']}")
        elif method == "jwt-nomad" and body.keys() == {"role", "jwt"}:
            prefix = self.jwts.get(f"{body['role']}\0{body['jwt']}")
        else:
            return self._strange(f"a login by {method} with {sorted(body)}")
        if prefix is None:
            return 400, {"errors": ["invalid role or secret ID"]}
        token = self.new_token(prefix)
        return 200, {"auth": {"client_token": token, "lease_duration": 3600, "renewable": True, "policies": ["x"]}}

    def _renew(self, token: str) -> tuple[int, Any]:
        facts = self.tokens[token]
        if not facts.renewable:
            return 400, {"errors": ["lease is not renewable"]}
        facts.renewals += 1
        return 200, {"auth": {"client_token": token, "lease_duration": facts.ttl, "renewable": True}}

    def _read(self, token: Token, path: str) -> tuple[int, Any]:
        if not path.startswith(token.prefix):
            return 403, DENIED
        versions = self.kv.get(path)
        if versions is None:
            return 404, {"errors": []}
        deleted = versions[-1] is None
        metadata = {"version": len(versions), "deletion_time": "2026-01-01T00:00:00Z" if deleted else ""}
        return (404 if deleted else 200), {"data": {"data": versions[-1], "metadata": metadata}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    vault: StrictVault

    def log_message(self, *_args: Any) -> None:
        """Quiet."""

    def _serve(self) -> None:
        vault = self.vault
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if vault.hold is not None:
            vault.hold.wait(30)
        if vault.answer is not None:
            status, headers, data = vault.answer
            vault.requests.append((self.command, self.path))
        else:
            status, answer = vault.handle(
                self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body
            )
            headers, data = {"Content-Type": "application/json"}, json.dumps(answer).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_LIST = do_PATCH = _serve


@contextmanager
def strict_vault(*, certificate: Path | None = None, client_ca: Path | None = None) -> Iterator[StrictVault]:
    """A server on loopback; certificate: a PEM of key and certificate; client_ca: clients must show one of its."""
    vault = StrictVault()
    handler = type("Handler", (_Handler,), {"vault": vault})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a TLS client that does not trust us
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    vault.address = f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield vault
        assert not vault.unexpected, vault.unexpected
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
