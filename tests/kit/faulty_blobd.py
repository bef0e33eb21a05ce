"""A blob server whose directory store misbehaves as a file beside it says; a program that tests start.

Modes, one word and its number: ok | slow SECONDS | hang SECONDS | down | die | wrong SHARE | short SHARE | flaky SHARE.
"""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from dsec_imagefs.blobd.__main__ import main
from dsec_imagefs.stores.base import StoreError
from dsec_imagefs.stores.directory import DirectoryStore

MODE_FILE = "store-mode"


@dataclass(frozen=True)
class FaultyStore:
    """Only what a block fetcher uses."""

    inner: DirectoryStore
    mode_path: Path
    rng: random.Random = field(default_factory=random.Random)

    @property
    def label(self) -> str:
        return self.inner.label

    def read(self, digest: str, offset: int, length: int, *, deadline: float) -> bytes:
        word, _, number = self.mode_path.read_text().partition(" ")
        amount = float(number or 0)
        if word == "slow":
            time.sleep(amount)
        elif word == "die":
            os._exit(1)  # as a client's library that crashes would
        elif word == "hang":
            time.sleep(amount)  # past the deadline, as a hard NFS mount does
        elif word == "down" or (word == "flaky" and self.rng.random() < amount):
            raise StoreError("unavailable", "the store is down", retryable=True)
        data = self.inner.read(digest, offset, length, deadline=deadline if word != "hang" else deadline + 3600)
        if word == "wrong" and self.rng.random() < amount:
            return data[:-1] + bytes([data[-1] ^ 1])
        if word == "short" and self.rng.random() < amount:
            return data[:-1]
        return data

    def close(self) -> None:
        self.inner.close()


def open_faulty(url: str, options: dict[str, str]) -> FaultyStore:
    assert not options
    root = Path(url.removeprefix("dir:"))
    return FaultyStore(DirectoryStore(root=root), root.parent / MODE_FILE)


if __name__ == "__main__":
    sys.exit(main(opener=open_faulty, program=(sys.executable, "-P", __file__)))
