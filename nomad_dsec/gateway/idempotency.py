"""Idempotency keys: for a day the same key and body get the same reply, restarts included; another body is an error."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
from libdsec.errors import UsageError

if TYPE_CHECKING:
    from libdsec.wire import CreateRequest

    from nomad_dsec.clock import Clock
    from nomad_dsec.gateway.db import Database, Statement

KEEP_S = 24 * 3600.0
_encoder = msgspec.json.Encoder(order="sorted")


def fingerprint(namespace: str, request: CreateRequest) -> bytes:
    """Equal for requests that ask for the same, whatever the order of their fields; secrets can't be read from it."""
    fields = msgspec.structs.asdict(request)  # all of them: a default that is spelled out is the same request
    return hashlib.sha256(namespace.encode() + b"\0" + _encoder.encode(fields)).digest()


class ReplyStore:
    """Replies by (namespace, key), in the database."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    def find(self, namespace: str, key: str, body: bytes | None) -> bytes | None:
        """The stored reply; UsageError idempotency_mismatch when it was for another body (None: any will do)."""
        rows = self._db.read(
            "SELECT body, reply FROM idempotent WHERE namespace = ? AND key = ? AND at > ?",
            (namespace, key, self._clock.now() - KEEP_S),
        )
        if not rows:
            return None
        if body is not None:
            check_same(rows[0][0], body, key)
        return bytes(rows[0][1])

    def keep_statement(self, namespace: str, key: str, body: bytes, reply: bytes) -> Statement:
        """Store it, together with whatever settles the create."""
        return (
            "INSERT OR REPLACE INTO idempotent (namespace, key, body, at, reply) VALUES (?, ?, ?, ?, ?)",
            (namespace, key, body, self._clock.now(), reply),
        )

    def forget_nowait(self, namespace: str, key: str) -> None:
        """The reply reached nobody and was undone."""
        self._db.write_nowait(("DELETE FROM idempotent WHERE namespace = ? AND key = ?", (namespace, key)))

    async def forget(self, namespace: str, key: str) -> None:
        """The same, and gone when this returns: a repeat of the key may come at once."""
        await self._db.write(
            ("DELETE FROM idempotent WHERE namespace = ? AND key = ?", (namespace, key)), durable=False
        )

    def purge_nowait(self) -> None:
        """Drop what is over a day old."""
        self._db.write_nowait(("DELETE FROM idempotent WHERE at <= ?", (self._clock.now() - KEEP_S,)))


def check_same(stored: bytes, body: bytes, key: str) -> None:
    """UsageError unless the two fingerprints are one."""
    if stored != body:
        raise UsageError(
            "idempotency_mismatch",
            f"the idempotency key {key[:80]!r} was used for a different create",
            field="idempotency_key",
            hint="use a fresh key for each create; repeat a create with exactly the same fields",
        )
