"""The database: group commit, failing units alone, what survives, who may open it."""

import asyncio
import sqlite3

import pytest
from libdsec.errors import PlatformError, UsageError

from nomad_dsec.clock import SYSTEM
from nomad_dsec.gateway.db import SCHEMA_VERSION, lock_directory, open_database
from nomad_dsec.gateway.keys import Keyring, Unauthenticated

INSERT = "INSERT INTO intents (sandbox, node, at) VALUES (?, 'n1', 0)"


@pytest.fixture
def db(tmp_path):
    database = open_database(tmp_path)
    yield database
    database.close()


def names(db) -> list[str]:
    return sorted(row[0] for row in db.read("SELECT sandbox FROM intents"))


async def test_what_was_written_is_read_at_once(db):
    await db.write((INSERT, ("a",)), (INSERT, ("b",)))
    assert names(db) == ["a", "b"]


@pytest.mark.parametrize("value", [2**64, "\ud800"], ids=["int past 64 bits", "lone surrogate"])
async def test_a_value_sqlite_cannot_bind_fails_its_unit_and_not_the_writer(db, value):
    with pytest.raises(PlatformError):
        await db.write((INSERT, ("half",)), (INSERT, (value,)))
    await db.write((INSERT, ("after",)))
    assert names(db) == ["after"]


async def test_a_failing_unit_fails_alone_and_whole(db):
    await db.write((INSERT, ("taken",)))
    results = await asyncio.gather(
        db.write((INSERT, ("a",))),
        db.write((INSERT, ("half",)), (INSERT, ("taken",))),
        db.write((INSERT, ("b",))),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [type(None), PlatformError, type(None)]
    assert results[1].code == "database_failed"
    assert names(db) == ["a", "b", "taken"]


async def test_hundreds_of_writers_share_commits(db, tmp_path):
    before = (tmp_path / "gateway.db-wal").stat().st_size
    await asyncio.gather(*(db.write((INSERT, (f"s{number}",))) for number in range(400)))
    assert len(names(db)) == 400
    pages = ((tmp_path / "gateway.db-wal").stat().st_size - before) // 4096
    assert pages < 400  # a commit of its own would write at least one page each


async def test_close_flushes_what_nobody_waited_for(tmp_path):
    db = open_database(tmp_path)
    for number in range(50):
        db.write_nowait((INSERT, (f"s{number}",)))
    db.close()
    again = open_database(tmp_path)
    assert len(names(again)) == 50
    again.close()


async def test_the_writer_outlives_whatever_a_commit_raises(db, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such thing")

    with monkeypatch.context() as patch:
        patch.setattr("nomad_dsec.gateway.db._commit", broken)
        with pytest.raises(PlatformError, match="no such thing"):
            await db.write((INSERT, ("a",)))
    await db.write((INSERT, ("b",)))
    assert names(db) == ["b"]


def test_what_no_row_can_hold_is_not_found(db):
    for value in (2**70, "\ud800"):
        assert db.read("SELECT sandbox FROM intents WHERE sandbox = ?", (value,)) == []


async def test_a_cancelled_writer_harms_no_other(db):
    first = asyncio.create_task(db.write((INSERT, ("a",))))
    await asyncio.sleep(0)
    first.cancel()
    await db.write((INSERT, ("b",)))
    assert "b" in names(db)


def test_a_second_gateway_on_the_directory_is_refused(tmp_path):
    with lock_directory(tmp_path):
        with pytest.raises(UsageError) as caught:
            lock_directory(tmp_path)
        assert (caught.value.code, caught.value.field) == ("data_in_use", "data")
    lock_directory(tmp_path).close()


def test_a_newer_schema_is_left_alone(tmp_path):
    open_database(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "gateway.db")
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(UsageError, match="newer"):
        open_database(tmp_path)


def test_what_is_no_database_is_an_error_with_its_path(tmp_path):
    (tmp_path / "gateway.db").write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(PlatformError, match=str(tmp_path)):
        open_database(tmp_path)


async def test_keys_made_and_revoked_by_another_process_count_at_once(db, tmp_path):
    mine = Keyring(db, SYSTEM)
    other_db = open_database(tmp_path)
    other = Keyring(other_db, SYSTEM)
    row, token = await other.create("team-a")
    assert mine.authenticate(token).namespace == "team-a"
    await other.revoke(row.id)
    mine.refresh()
    with pytest.raises(Unauthenticated):
        mine.authenticate(token)
    other_db.close()
