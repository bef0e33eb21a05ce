"""What a cached blob may never do, whatever comes in between: call bytes right that nobody has hashed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dsec_imagefs.blobd.block_map import ABSENT, SUSPECT, TRUSTED
from dsec_imagefs.blobd.budget import Budget
from dsec_imagefs.blobd.dedup import BlockPlaces
from dsec_imagefs.blobd.fill import Filler
from dsec_imagefs.blobd.metrics import Counters
from dsec_imagefs.errors import ImageError

from tests.unit.imagefs.test_blobd import BLOCK, OTHER_BOOT, make_blob, part_of

if TYPE_CHECKING:
    from pathlib import Path


def test_a_new_boots_map_does_not_vouch_for_blocks_that_nobody_hashed(tmp_path: Path) -> None:
    """After a power loss: the first sync wrote the old boot's blocks under the new boot's name."""
    data, blob = make_blob(tmp_path, 6)
    for number in (0, 1):
        blob.store(number, part_of(data, number))
    blob.sync()
    blob.close()
    with blob.path.open("r+b") as file:  # what the power loss did
        file.seek(99)
        file.write(bytes([data[99] ^ 1]))
    _, after = make_blob(tmp_path, 6, boot=OTHER_BOOT)
    assert list(after.states[:2]) == [SUSPECT, SUSPECT]
    after.store(3, part_of(data, 3))
    after.sync()
    after.close()  # the worker is killed; nobody had read block 0
    _, again = make_blob(tmp_path, 6, boot=OTHER_BOOT)
    assert list(again.states[:4]) == [SUSPECT, SUSPECT, ABSENT, TRUSTED]
    assert again.check(0)[0] is None
    assert again.check(1)[0] == part_of(data, 1)


def test_a_block_evicted_while_it_is_written_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is written again while it is there (its read raced with an eviction), and then evicted itself."""
    data, blob = make_blob(tmp_path, 6)
    assert blob.store(2, part_of(data, 2)) == BLOCK
    real_write = blob.write

    def write_then_evict(number: int, part: bytes) -> None:
        real_write(number, part)
        assert blob.drop([number]) == BLOCK

    monkeypatch.setattr(blob, "write", write_then_evict)
    assert blob.store(2, part_of(data, 2)) is None
    assert blob.states[2] == ABSENT, "its bytes are a hole"


def test_an_eviction_before_the_look_is_seen(tmp_path: Path) -> None:
    """The generation is taken before the state: else a block evicted in between is read as zeros."""
    data, blob = make_blob(tmp_path, 6)
    blob.store(2, part_of(data, 2))

    class EvictsAtTheFirstLook(bytearray):
        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            if at == 2 and blob.states is self:
                blob.states = bytearray(self)
                blob.drop([2])
            return found

    blob.states = EvictsAtTheFirstLook(blob.states)
    filler = Filler(Budget(1 << 30, 0.5), BlockPlaces(), Counters())
    assert filler._local(blob, 2) is None


def test_a_blob_that_became_complete_while_an_eviction_waited_keeps_its_blocks(tmp_path: Path) -> None:
    """It looked whether the blob is complete before it had the lock that the promotion held."""
    data, blob = make_blob(tmp_path, 3)
    for number in range(3):
        blob.store(number, part_of(data, number))
    lock, inner = blob._sync_lock, blob

    class PromotedFirst:
        """The eviction passed its first look, then waited for the lock that the promotion had."""

        def __enter__(self) -> None:
            inner._sync_lock = lock
            assert inner.promote()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    blob._sync_lock = PromotedFirst()  # type: ignore[assignment]
    with pytest.raises(ImageError) as refused:
        blob.drop([1])
    assert refused.value.code == "in_use"
    assert list(blob.states) == [TRUSTED] * 3
    assert blob.read(1) == part_of(data, 1)


def test_such_an_eviction_counts_nothing_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that wanted room fetched a block: that must not fail for another blob's sake."""
    data, blob = make_blob(tmp_path, 3)
    budget = Budget(1 << 30, 0.5)
    for number in range(3):
        blob.store(number, part_of(data, number))
        budget.add_block(blob, number)

    def complete_by_now(numbers: object) -> int:
        raise ImageError("in_use", f"{blob.digest} is complete: {numbers}")

    monkeypatch.setattr(blob, "drop", complete_by_now)
    assert budget.evict(BLOCK) == 0
    assert budget.used_bytes == len(data)
    assert (budget.evicted_blocks, budget.evicted_bytes) == (0, 0)
