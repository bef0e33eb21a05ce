"""A real Vault or OpenBao in development mode, with the same words as tests/kit/strict_vault.py."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.kit.consul import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROOT = "root-of-the-test"  # an id of our own may have no dot
START_S = 40.0
_serial = itertools.count(1)


def vault_program() -> str:
    """`vault` or `bao` on PATH, or ""."""
    return shutil.which("vault") or shutil.which("bao") or ""


class DevVault:
    """One server; everything is made by its root token over plain HTTP."""

    def __init__(self, address: str, directory: Path) -> None:
        self.address = address
        self._directory = directory
        self._key = directory / "jwt.key"
        self._enabled: set[str] = set()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """JSON of one request, None for an empty answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"X-Vault-Token": ROOT, "X-Vault-Request": "true"}
        request = urllib.request.Request(f"{self.address}/v1/{path}", data=data, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=20) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def put(self, path: str, data: dict[str, Any]) -> None:
        mount, _, rest = path.partition("/")
        self.call("POST", f"{mount}/data/{rest}", {"data": data})

    def delete(self, path: str) -> None:
        mount, _, rest = path.partition("/")
        self.call("DELETE", f"{mount}/data/{rest}")

    def policy(self, prefix: str) -> str:
        """Reads secrets below mount/prefix; its name."""
        mount, _, rest = prefix.partition("/")
        name = f"p{next(_serial)}"
        rule = f'path "{mount}/data/{rest}*" {{\n  capabilities = ["read"]\n}}\n'
        self.call("PUT", f"sys/policies/acl/{name}", {"policy": rule})
        return name

    def new_token(self, prefix: str, *, ttl: int = 3600, renewable: bool = True) -> str:
        body = {"policies": [self.policy(prefix)], "ttl": f"{ttl}s", "renewable": renewable, "no_parent": True}
        token: str = self.call("POST", "auth/token/create", body)["auth"]["client_token"]
        return token

    def revoke(self, token: str) -> None:
        self.call("POST", "auth/token/revoke", {"token": token})

    def _enable(self, kind: str, path: str) -> None:
        if path not in self._enabled:
            self._enabled.add(path)
            self.call("POST", f"sys/auth/{path}", {"type": kind})

    def new_approle(self, prefix: str) -> tuple[str, str]:
        self._enable("approle", "approle")
        name = f"r{next(_serial)}"
        self.call("POST", f"auth/approle/role/{name}", {"token_policies": [self.policy(prefix)], "token_ttl": "1h"})
        role = self.call("GET", f"auth/approle/role/{name}/role-id")["data"]["role_id"]
        secret = self.call("POST", f"auth/approle/role/{name}/secret-id", {})["data"]["secret_id"]
        return role, secret

    def new_jwt(self, role: str, prefix: str) -> str:
        """Signed as Nomad signs a workload's identity (RS256), for a role that takes it."""
        if not self._key.exists():
            _openssl("genrsa", "-out", str(self._key), "2048")
            public = _openssl("rsa", "-in", str(self._key), "-pubout").decode()
            self._enable("jwt", "jwt-nomad")
            self.call("POST", "auth/jwt-nomad/config", {"jwt_validation_pubkeys": [public]})
        rule = {"role_type": "jwt", "bound_audiences": ["vault.io"], "user_claim": "sub", "token_ttl": "1h"}
        self.call("POST", f"auth/jwt-nomad/role/{role}", rule | {"token_policies": [self.policy(prefix)]})
        now = int(time.time())
        claims = {
            "aud": "vault.io",
            "sub": f"default:job:{next(_serial)}",
            "iat": now,
            "exp": now + 600,
            "nbf": now - 5,
        }
        signed = f"{_part({'alg': 'RS256', 'typ': 'JWT'})}.{_part(claims)}"
        text = self._directory / "jwt.txt"
        text.write_text(signed)
        return f"{signed}.{_base64(_openssl('dgst', '-sha256', '-sign', str(self._key), str(text)))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _part(data: dict[str, Any]) -> str:
    return _base64(json.dumps(data).encode())


def _openssl(*argv: str) -> bytes:
    return subprocess.run(["openssl", *argv], check=True, capture_output=True, timeout=60).stdout


@contextmanager
def dev_vault(directory: Path) -> Iterator[DevVault]:
    """Running and unsealed, with KV v2 at `secret/`."""
    (port,) = free_ports(1)
    argv = [vault_program(), "server", "-dev", f"-dev-root-token-id={ROOT}", "-dev-no-store-token"]
    env = {"PATH": os.environ["PATH"], "HOME": str(directory)}
    with (directory / "vault.log").open("wb") as log:
        child = subprocess.Popen(
            [*argv, f"-dev-listen-address=127.0.0.1:{port}"], stdout=log, stderr=log, env=env, start_new_session=True
        )
    server = DevVault(f"http://127.0.0.1:{port}", directory)
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert child.poll() is None, (directory / "vault.log").read_text()[-2000:]
            assert time.monotonic() < deadline, (directory / "vault.log").read_text()[-2000:]
            try:
                server.call("GET", "secret/config")
                break
            except OSError:
                time.sleep(0.1)
        yield server
    finally:
        child.kill()
        child.wait()
