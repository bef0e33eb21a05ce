"""API keys: who a caller is. Only SHA-256 hashes are stored; the secrets have 160 random bits."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libdsec.errors import DeniedError, NotFoundError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from nomad_dsec.clock import Clock
    from nomad_dsec.gateway.db import Database

PREFIX = "dsk_"
ADMIN_NAMESPACE = "admin"
CONFIGURED_KEY = "configured"
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Whose request it is. Admin keys see every namespace and may use nodes, keys and quotas."""

    key_id: str
    namespace: str
    admin: bool = False

    def may_see(self, namespace: str) -> bool:
        """Whether sandboxes of that namespace exist for this caller."""
        return self.admin or namespace == self.namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """A key as it may be shown: without its secret."""

    id: str
    namespace: str
    admin: bool
    label: str
    created_at: float
    revoked_at: float | None = None


def check_namespace(namespace: str) -> str:
    """The namespace itself, or UsageError."""
    if _NAMESPACE.fullmatch(namespace) is None:
        raise UsageError(
            "bad_namespace",
            f"{namespace[:80]!r} can't be a namespace",
            field="namespace",
            hint="use 1-63 lower-case letters, digits and hyphens, not a hyphen at either end",
        )
    return namespace


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


class Keyring:
    """All keys in memory, by hash; the database has the last word when another process changed it."""

    def __init__(self, db: Database, clock: Clock, *, configured: str = "") -> None:
        if configured and len(configured) < 20:
            raise UsageError(
                "weak_key",
                "the admin key has fewer than 20 characters",
                field="gateway.admin_key",
                hint="leave it empty",
            )
        self._db = db
        self._clock = clock
        self._configured = configured
        self._by_hash: dict[bytes, Principal] = {}
        self.reload()

    def reload(self) -> None:
        """Read the keys that count now."""
        rows = self._db.read("SELECT hash, id, namespace, admin FROM keys WHERE revoked_at IS NULL")
        known = {row[0]: Principal(key_id=row[1], namespace=row[2], admin=bool(row[3])) for row in rows}
        if self._configured:
            known[_hash(self._configured)] = Principal(key_id=CONFIGURED_KEY, namespace=ADMIN_NAMESPACE, admin=True)
        self._by_hash = known

    def refresh(self) -> None:
        """Reload if another process, such as `dsec key revoke`, changed the database. Called each second."""
        if self._db.changed_elsewhere():
            self.reload()

    def authenticate(self, token: str) -> Principal:
        """Who holds this key; DeniedError bad_key (401) when nobody does."""
        principal = self._by_hash.get(_hash(token))
        if principal is None:
            self.refresh()
            principal = self._by_hash.get(_hash(token))
        if principal is None:
            raise Unauthenticated(
                "bad_key", "the API key is unknown or revoked", hint="make one with `dsec key create`"
            )
        return principal

    async def create(self, namespace: str, *, admin: bool = False, label: str = "") -> tuple[KeyRow, str]:
        """A new key and its secret, which is shown this once."""
        row, token = self.mint(namespace, admin=admin, label=label)
        await self.add(row, token)
        return row, token

    def mint(self, namespace: str, *, admin: bool, label: str) -> tuple[KeyRow, str]:
        """A key that does not count before it is added."""
        check_namespace(namespace)
        key_id = _random(5)
        row = KeyRow(id=key_id, namespace=namespace, admin=admin, label=label[:256], created_at=self._clock.now())
        return row, f"{PREFIX}{key_id}_{_random(20)}"

    async def add(self, row: KeyRow, token: str) -> None:
        """Store it; from now on it opens."""
        digest = _hash(token)
        await self._db.write(
            (
                "INSERT INTO keys (id, hash, namespace, admin, label, created_at) VALUES (?, ?, ?, ?, ?, ?)",
                (row.id, digest, row.namespace, int(row.admin), row.label, row.created_at),
            )
        )
        self._by_hash[digest] = Principal(key_id=row.id, namespace=row.namespace, admin=row.admin)

    async def revoke(self, key_id: str) -> KeyRow:
        """End a key at once; repeating it is harmless. NotFoundError when there is none."""
        if not any(row.id == key_id for row in self.rows()):
            raise NotFoundError(
                "key_not_found", f"there is no key {key_id[:40]!r}", field="key", hint="see `dsec key ls`"
            )
        await self._db.write(
            ("UPDATE keys SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?", (self._clock.now(), key_id))
        )
        self.reload()
        return next(row for row in self.rows() if row.id == key_id)

    def rows(self) -> list[KeyRow]:
        """All stored keys, revoked ones too, oldest first."""
        rows = self._db.read(
            "SELECT id, namespace, admin, label, created_at, revoked_at FROM keys ORDER BY created_at, id"
        )
        return [
            KeyRow(id=row[0], namespace=row[1], admin=bool(row[2]), label=row[3], created_at=row[4], revoked_at=row[5])
            for row in rows
        ]


class Unauthenticated(DeniedError):
    """No key, or none that is known: 401, so that clients ask for credentials rather than for rights."""

    status = 401


def require_admin(principal: Principal) -> None:
    """DeniedError admin_only unless the key is an admin's."""
    if not principal.admin:
        raise DeniedError("admin_only", "this needs an admin key", hint="use the operator's key")


def write_secret(path: Path, secret: str) -> None:
    """A file that only this user may read; replaces one that is there, and is whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _random(size: int) -> str:
    return base64.b32encode(secrets.token_bytes(size)).decode("ascii").lower()
