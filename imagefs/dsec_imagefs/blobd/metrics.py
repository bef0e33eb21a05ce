"""What happened, as numbers of one worker's life. Plain additions by many threads: exact enough for people."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Counters:
    """All only grow.

    Attributes:
        requests: of the kernel, all kinds.
        reads, read_bytes: answered from disk without waiting.
        waited_reads: that had to wait for blocks.
        failed_reads: answered EIO.
        expired_reads: of those, at their deadline.
        interrupted_reads: whose reader was killed or interrupted.
        raced_reads: repeated because a block was evicted meanwhile.
        fetched_bytes: verified raw bytes from stores.
        copied_blocks, reflinked_blocks: that another blob had.
        rehashed_blocks: suspect ones that were hashed before use.
        wrong_local_blocks: found wrong on the local disk, and dropped.
        uncached_blocks: served from memory, for want of room.
        disk_full, disk_errors: writes to the cache that failed.
        sync_errors: fdatasync failed; what it covered is hashed before its next use.
        promoted_blobs: that became complete here.
        passthrough_opens: files given to the kernel.
        bad_messages: on the control socket.
    """

    requests: int = 0
    reads: int = 0
    read_bytes: int = 0
    waited_reads: int = 0
    failed_reads: int = 0
    expired_reads: int = 0
    interrupted_reads: int = 0
    raced_reads: int = 0
    fetched_bytes: int = 0
    copied_blocks: int = 0
    reflinked_blocks: int = 0
    rehashed_blocks: int = 0
    wrong_local_blocks: int = 0
    uncached_blocks: int = 0
    disk_full: int = 0
    disk_errors: int = 0
    sync_errors: int = 0
    promoted_blobs: int = 0
    passthrough_opens: int = 0
    bad_messages: int = 0

    def as_data(self) -> dict[str, int]:
        """Name to number."""
        return dataclasses.asdict(self)
