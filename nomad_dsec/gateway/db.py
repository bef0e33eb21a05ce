"""The gateway's durable rows: SQLite in WAL. One thread writes; what queued up meanwhile shares one commit.

Reads run on the caller's thread over a connection of their own: they see every write whose `write` has returned.
"""

from __future__ import annotations

import asyncio
import fcntl
import queue
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from libdsec.errors import PlatformError, UsageError

from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from pathlib import Path

log = get_log(__name__)
SCHEMA_VERSION = 1
BATCH_MAX = 512
WRITE_TIMEOUT_S = 30.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
  id TEXT PRIMARY KEY, hash BLOB NOT NULL UNIQUE, namespace TEXT NOT NULL, admin INTEGER NOT NULL,
  label TEXT NOT NULL, created_at REAL NOT NULL, revoked_at REAL
) STRICT;
CREATE TABLE IF NOT EXISTS quotas (
  namespace TEXT PRIMARY KEY, sandboxes INTEGER, cpus REAL, memory_mib INTEGER, disk_mib INTEGER
) STRICT;
CREATE TABLE IF NOT EXISTS intents (
  sandbox TEXT PRIMARY KEY, node TEXT NOT NULL, at REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS idempotent (
  namespace TEXT NOT NULL, key TEXT NOT NULL, body BLOB NOT NULL, at REAL NOT NULL, reply BLOB NOT NULL,
  PRIMARY KEY (namespace, key)
) STRICT;
CREATE TABLE IF NOT EXISTS nodes (node TEXT PRIMARY KEY, endpoint TEXT NOT NULL, seen_at REAL NOT NULL) STRICT;
"""
_ADDED = (("quotas", "disk_mib", "INTEGER"),)

Statement = tuple[str, Sequence[Any]]


@dataclass(slots=True)
class _Unit:
    """Statements that commit together or not at all."""

    statements: Sequence[Statement]
    durable: bool
    loop: asyncio.AbstractEventLoop | None
    done: asyncio.Future[None] | None
    error: Exception | None = None


class Database:
    """Open with `open_database`; close flushes what was queued."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = _connect(path)
        self._queue: queue.SimpleQueue[_Unit | None] = queue.SimpleQueue()
        self._version = self._data_version()
        self._writer = threading.Thread(target=self._write_loop, name="gateway-db", daemon=True)
        self._writer.start()

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows now. Only for look-ups by primary key and for small tables: it blocks the caller."""
        try:
            return self._reader.execute(sql, parameters).fetchall()
        except (OverflowError, UnicodeEncodeError):
            return []  # no row can hold what can't be bound
        except sqlite3.Error as error:
            raise _failed(self._path, error) from error

    async def write(self, *statements: Statement, durable: bool = True) -> None:
        """Commit these together. durable: survives power loss too; else only the death of this process.

        Raises PlatformError database_failed; then none of them took effect.
        """
        loop = asyncio.get_running_loop()
        unit = _Unit(statements, durable, loop, loop.create_future())
        self._queue.put(unit)
        assert unit.done is not None
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await unit.done

    def write_nowait(self, *statements: Statement) -> None:
        """Queue for the next commit without waiting; for what a restart would find out again. Failures are logged."""
        self._queue.put(_Unit(statements, durable=False, loop=None, done=None))

    def changed_elsewhere(self) -> bool:
        """True once after another connection committed, which our own writer is too."""
        version = self._data_version()
        changed, self._version = version != self._version, version
        return changed

    def close(self) -> None:
        """Flush and close; later calls fail."""
        self._queue.put(None)
        self._writer.join(timeout=WRITE_TIMEOUT_S)
        self._reader.close()

    def _data_version(self) -> int:
        return int(self._reader.execute("PRAGMA data_version").fetchone()[0])

    def _write_loop(self) -> None:
        connection: sqlite3.Connection | None = None
        mode = ""
        try:
            while (first := self._queue.get()) is not None:
                batch, last = [first], False
                while len(batch) < BATCH_MAX and not last and not self._queue.empty():
                    unit = self._queue.get()
                    last = unit is None
                    if unit is not None:
                        batch.append(unit)
                wanted = "FULL" if any(unit.durable for unit in batch) else "NORMAL"
                try:
                    if connection is None:
                        connection, mode = _connect(self._path), ""
                    if wanted != mode:
                        connection.execute(f"PRAGMA synchronous={wanted}")
                        mode = wanted
                    _commit(connection, batch)
                except Exception as error:  # whatever it is: without its writer every later write would hang
                    log.exception("the database writer starts over", path=str(self._path))
                    for unit in batch:
                        unit.error = unit.error or error
                    _close(connection)
                    connection = None
                _answer(batch)
                if last:
                    return
        finally:
            _close(connection)


def open_database(directory: Path) -> Database:
    """Open or make `<directory>/gateway.db`."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / "gateway.db"
    try:
        connection = _connect(path)
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version > SCHEMA_VERSION:
            connection.close()
            raise UsageError(
                "database_newer",
                f"{path} was written by a newer version (schema {version}, this is {SCHEMA_VERSION})",
                field="data",
                hint="run that version, or give another data directory",
            )
        connection.executescript(_SCHEMA)
        _add_columns(connection)
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.close()
        path.chmod(0o600)
    except sqlite3.Error as error:
        raise _failed(path, error) from error
    return Database(path)


def _add_columns(connection: sqlite3.Connection) -> None:
    """Those that came later, at the end and empty, so that an older gateway can still use the file."""
    for table, column, kind in _ADDED:
        if column not in {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")


def lock_directory(directory: Path) -> BinaryIO:
    """Hold the data directory for this process until the file is closed; UsageError data_in_use when it is taken."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = (directory / "lock").open("ab", buffering=0)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UsageError(
            "data_in_use",
            f"another gateway runs on {directory}",
            field="data",
            hint="stop it, or give this one its own data directory",
        ) from None
    return lock


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    return connection


def _close(connection: sqlite3.Connection | None) -> None:
    if connection is not None:
        with suppress(sqlite3.Error):
            connection.close()


def _commit(connection: sqlite3.Connection, batch: Sequence[_Unit]) -> None:
    """One transaction; a unit that fails is rolled back alone, a failing commit fails them all."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        for unit in batch:
            connection.execute("SAVEPOINT unit")
            try:
                for sql, parameters in unit.statements:
                    connection.execute(sql, parameters)
            # A value SQLite cannot bind (an int past 64 bits, a lone surrogate) fails its unit, never the writer.
            except (sqlite3.Error, OverflowError, ValueError, TypeError) as error:
                connection.execute("ROLLBACK TO unit")
                unit.error = error
            connection.execute("RELEASE unit")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.rollback()
        for unit in batch:
            unit.error = unit.error or error


def _answer(batch: Sequence[_Unit]) -> None:
    for unit in batch:
        if unit.loop is None:
            if unit.error is not None:
                log.error("a database write failed", error=str(unit.error))
        else:
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
                unit.loop.call_soon_threadsafe(_resolve, unit)


def _resolve(unit: _Unit) -> None:
    if unit.done is None or unit.done.done():
        return
    if unit.error is None:
        unit.done.set_result(None)
    else:
        unit.done.set_exception(_failed(None, unit.error))


def _failed(path: Path | None, error: Exception) -> PlatformError:
    where = f"{path}: " if path is not None else ""
    return PlatformError(
        "database_failed", f"the gateway's database failed: {where}{error}", hint="see disk space and log"
    )
