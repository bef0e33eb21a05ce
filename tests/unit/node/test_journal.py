"""The journal: what was saved is there after the process is gone, in one commit for many, and errors are told."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest
from libdsec.errors import PlatformError

from nomad_dsec.node.journal import Journal
from nomad_dsec.node.row import HandleRow, Row, replace


def _row(number: int, **more) -> Row:
    return Row(
        id=f"sb-{number}", namespace="ns", backend="container", image="i", digest="d", cpus=1.0, memory_mib=64,
        disk_mib=1, pids=4, timeout_s=1.0, created_at=1.0, **more,
    )  # fmt: skip


async def test_rows_come_back_as_they_were_saved_last(tmp_path):
    journal = Journal(tmp_path / "journal.db")
    assert journal.open() == []
    row = _row(1, env={"A": "ü"}, labels={"k": "v"})
    await journal.save(row, now=1.0, durable=False)
    handle = HandleRow(version=1, backend="container", sandbox="sb-1", incarnation=1, data={"pid": 7})
    row = replace(row, state="running", handle=handle)
    await journal.save(row, now=2.0, durable=True)
    await journal.save(_row(2), now=2.0, durable=False)
    await journal.forget(["sb-2"])
    await journal.put_fact("draining", "1")
    other = Journal(tmp_path / "journal.db")  # while the first still has it open: nothing is only in memory
    assert other.open() == [row]
    assert other.facts() == {"draining": "1"}
    other.close()
    journal.close()


async def test_many_writers_share_commits(tmp_path):
    journal = Journal(tmp_path / "journal.db")
    journal.open()
    commits = 0
    original = journal._commit

    def counted(db, batch):
        nonlocal commits
        commits += 1
        original(db, batch)

    journal._commit = counted
    await asyncio.gather(*(journal.save(_row(i), now=1.0, durable=True) for i in range(300)))
    journal.close()
    assert commits < 100
    again = Journal(tmp_path / "journal.db")
    assert len(again.open()) == 300
    again.close()


async def test_a_failed_write_is_told_to_each_and_the_next_one_heals(tmp_path):
    journal = Journal(tmp_path / "journal.db")
    journal.open()
    blocker = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    journal._db.execute("PRAGMA busy_timeout=1")
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(PlatformError) as caught:
        await journal.save(_row(1), now=1.0, durable=True)
    assert caught.value.code == "journal_failed"
    assert journal.broken
    blocker.execute("ROLLBACK")
    await journal.save(_row(1), now=1.0, durable=True)
    assert not journal.broken
    blocker.close()
    journal.close()


async def test_a_value_that_no_row_can_hold_fails_its_own_write_only(tmp_path):
    journal = Journal(tmp_path / "journal.db")
    journal.open()
    names = [f"fact-{number}" for number in range(20)]
    writes = [journal.put_fact(name, "\ud800" if name == "fact-7" else name) for name in names]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    failed = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is not None]
    assert failed == ["fact-7"]
    assert isinstance(outcomes[7], PlatformError)
    assert not journal.broken
    await journal.put_fact("later", "yes")
    assert set(journal.facts()) == {*names, "later"} - {"fact-7"}
    journal.close()


def test_a_journal_of_another_kind_is_refused_with_its_path(tmp_path):
    path = tmp_path / "journal.db"
    path.write_bytes(b"no database at all, but longer than a header" * 40)
    with pytest.raises(PlatformError) as caught:
        Journal(path).open()
    assert caught.value.code == "journal_unreadable"
    assert str(path) in caught.value.message
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(PlatformError, match="99"):
        Journal(path).open()
