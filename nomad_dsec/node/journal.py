"""The node's memory across its own death: SQLite in WAL mode, written by one thread, many rows to a commit.

Live state is read from memory; the file is read once, at start. A durable save (a handle, before what it names is made)
is on disk when it returns; other saves have reached the kernel, which a SIGKILL of the daemon does not undo.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from libdsec.errors import PlatformError

from nomad_dsec.log import get_log
from nomad_dsec.node.row import Row

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = get_log(__name__)
SCHEMA_VERSION = 1
BATCH_MAX = 512
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sandbox (
    id TEXT PRIMARY KEY, incarnation INTEGER NOT NULL, namespace TEXT NOT NULL, state TEXT NOT NULL,
    reason TEXT NOT NULL, updated_at REAL NOT NULL, row BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS record (
    kind TEXT NOT NULL, key TEXT NOT NULL, row BLOB NOT NULL, PRIMARY KEY (kind, key)
) WITHOUT ROWID;
"""
_SAVE = """
INSERT INTO sandbox VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET incarnation = excluded.incarnation,
state = excluded.state, reason = excluded.reason, updated_at = excluded.updated_at, row = excluded.row
"""
#: What sqlite3 raises for a value: an integer past 64 bits, a lone surrogate, a type it does not know.
_UNBINDABLE = (OverflowError, ValueError, TypeError, sqlite3.InterfaceError, sqlite3.ProgrammingError)


@dataclass(frozen=True, slots=True)
class _Write:
    sql: str
    values: tuple[object, ...]
    durable: bool
    done: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop


class Journal:
    """Rows of sandboxes on disk. `open` in any thread, `save` and `forget` in the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_loop, name="journal", daemon=True)
        self._encode = msgspec.json.Encoder().encode
        self._durable_mode = True
        self.broken = ""
        self.unsaved: set[str] = set()  # sandboxes whose last row did not reach the file

    def open(self) -> list[Row]:
        """Create or open the file and read all rows. PlatformError journal_unreadable names the path and why."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=10.0)
            self._path.chmod(0o600)
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                raise _unreadable(self._path, f"its schema is {version}, this daemon knows {SCHEMA_VERSION}")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            rows: list[Row] = [
                msgspec.json.decode(blob, type=Row) for (blob,) in db.execute("SELECT row FROM sandbox ORDER BY id")
            ]
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise _unreadable(self._path, str(error)) from error
        self._db = db
        self._thread.start()
        return rows

    async def save(self, row: Row, *, now: float, durable: bool) -> None:
        """Write the row; returns when it is committed (and fsynced, when durable). PlatformError journal_failed."""
        values = (row.id, row.incarnation, row.namespace, row.state, row.reason, now, self._encode(row))
        try:
            await self._submit(_SAVE, values, durable=durable)
        except PlatformError:
            self.unsaved.add(row.id)
            raise
        self.unsaved.discard(row.id)

    async def forget(self, ids: Sequence[str]) -> None:
        """Drop rows of ended sandboxes."""
        if ids:
            marks = ",".join("?" * len(ids))
            await self._submit(f"DELETE FROM sandbox WHERE id IN ({marks})", tuple(ids), durable=False)  # noqa: S608
            self.unsaved.difference_update(ids)

    async def put_fact(self, name: str, value: str) -> None:
        """Remember a fact about the node itself (draining, boot id)."""
        sql = "INSERT INTO fact VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        await self._submit(sql, (name, value), durable=True)

    async def put_record(self, kind: str, key: str, row: msgspec.Struct, *, durable: bool) -> None:
        """Write a row that is no sandbox: a task or a grant of a cluster."""
        sql = "INSERT INTO record VALUES (?, ?, ?) ON CONFLICT (kind, key) DO UPDATE SET row = excluded.row"
        await self._submit(sql, (kind, key, self._encode(row)), durable=durable)

    async def drop_record(self, kind: str, key: str) -> None:
        """Forget it; an unknown one is fine."""
        await self._submit("DELETE FROM record WHERE kind = ? AND key = ?", (kind, key), durable=False)

    def records(self, kind: str) -> list[bytes]:
        """All rows of one kind as JSON; read at start."""
        assert self._db is not None
        return [row for (row,) in self._db.execute("SELECT row FROM record WHERE kind = ? ORDER BY key", (kind,))]

    def facts(self) -> dict[str, str]:
        """All facts; read at start."""
        assert self._db is not None
        return dict(self._db.execute("SELECT name, value FROM fact"))

    def close(self) -> None:
        """Write what is queued and close the file."""
        if self._thread.is_alive():
            self._writes.put(None)
            self._thread.join(timeout=10.0)

    async def _submit(self, sql: str, values: tuple[object, ...], *, durable: bool) -> None:
        loop = asyncio.get_running_loop()
        write = _Write(sql, values, durable, loop.create_future(), loop)
        self._writes.put(write)
        await write.done

    def _write_loop(self) -> None:
        assert self._db is not None
        db = self._db
        closing = False
        while not closing:
            batch, closing = self._next_batch()
            if batch:
                self._commit(db, batch)
        db.close()

    def _next_batch(self) -> tuple[list[_Write], bool]:
        batch: list[_Write] = []
        item = self._writes.get()
        while item is not None:
            batch.append(item)
            if len(batch) >= BATCH_MAX:
                return batch, False
            try:
                item = self._writes.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _commit(self, db: sqlite3.Connection, batch: list[_Write]) -> None:
        error: PlatformError | None = None
        try:
            durable = any(write.durable for write in batch)
            if durable != self._durable_mode:  # the pragma holds for later commits and must be outside a transaction
                db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
                self._durable_mode = durable
            db.execute("BEGIN IMMEDIATE")
            for write in batch:
                db.execute(write.sql, write.values)
            db.execute("COMMIT")
            self.broken = ""
        except _UNBINDABLE as failed:
            _roll_back(db)
            if len(batch) > 1:  # the others have done nothing wrong
                for write in batch:
                    self._commit(db, [write])
                return
            error = PlatformError("journal_failed", f"no value that {self._path} can hold: {failed}")
        except sqlite3.Error as failed:
            self.broken = str(failed)
            error = PlatformError(
                "journal_failed", f"the node can't write {self._path}: {failed}", hint="is the disk full?"
            )
            _roll_back(db)
        try:
            batch[0].loop.call_soon_threadsafe(_settle, batch, error)
        except RuntimeError:  # the loop is closed already: nobody waits any more
            log.warning("the journal outlived its event loop", writes=len(batch))


def _roll_back(db: sqlite3.Connection) -> None:
    with suppress(sqlite3.Error):  # the next BEGIN says it again; a dead writer would hang every later write
        if db.in_transaction:
            db.execute("ROLLBACK")


def _settle(batch: list[_Write], error: PlatformError | None) -> None:
    for write in batch:
        if write.done.done():
            continue
        if error is None:
            write.done.set_result(None)
        else:
            write.done.set_exception(error)


def _unreadable(path: Path, why: str) -> PlatformError:
    return PlatformError(
        "journal_unreadable", f"{path} can't be used: {why}", hint="move it aside to start with an empty node"
    )
