"""The process that does the work, and may be killed at any instant: it owns nothing that can't be found again."""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec_imagefs.blobd.block_map import ABSENT, SUSPECT, TRUSTED
from dsec_imagefs.blobd.budget import Budget
from dsec_imagefs.blobd.dedup import BlockPlaces
from dsec_imagefs.blobd.fill import Filler
from dsec_imagefs.blobd.flight import Flights
from dsec_imagefs.blobd.fuse_wire import notify_resend
from dsec_imagefs.blobd.metrics import Counters
from dsec_imagefs.blobd.reads import Reads
from dsec_imagefs.blobd.session import Session
from dsec_imagefs.blobd.source import Sources, open_store
from dsec_imagefs.blobd.table import Table
from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from dsec_imagefs.blobd.fuse_wire import Negotiated
    from dsec_imagefs.blobd.settings import Places, Settings
    from dsec_imagefs.blobd.shared import SharedState
    from dsec_imagefs.blobd.source import OpenStore
    from dsec_imagefs.blobd.table import Attached

log = logging.getLogger("dsec.blobd")
_TICK_S = 0.1
_FLUSH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What a worker gets from its supervisor: descriptors, and what was settled with the kernel."""

    fuse_fd: int
    listen_fd: int
    shared: SharedState
    negotiated: Negotiated
    mount_id: str
    supervisor_pid: int


def boot_id() -> str:
    """The running kernel's."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Worker:
    """Everything of one worker's life, put together. `start`, then `run_clock` until `stop` was asked."""

    def __init__(
        self, places: Places, settings: Settings, inherited: Inherited, opener: OpenStore = open_store
    ) -> None:
        self.places = places
        self.settings = settings
        self.inherited = inherited
        self.counters = Counters()
        self.started = time.time()
        self.stopping = threading.Event()
        self.sources = Sources(opener)
        self.table = Table(places, boot_id(), self.sources)
        self.budget = Budget(settings.cache_bytes, settings.pinned_share)
        self.blocks = BlockPlaces()
        self.filler = Filler(self.budget, self.blocks, self.counters)
        self.flights = Flights(
            self.filler.obtain,
            threads=settings.fetchers,
            limit=settings.prefetch_blocks,
            read_deadline_s=settings.read_deadline_s,
        )
        self.reads = Reads(inherited.fuse_fd, self.flights, self.counters, settings)
        self.session = Session(
            inherited.fuse_fd,
            inherited.negotiated,
            self.table,
            self.reads,
            inherited.shared,
            self.counters,
            passthrough=settings.passthrough,
        )

    def start(self, *, resend: bool) -> None:
        """Open the attached blobs, then take requests.

        Args:
            resend: a worker before us may have taken requests that it did not answer.
        """
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.inherited.shared.reread()
        self.inherited.shared.beat()
        for attached in self.table.load():
            self.opened(attached)
        self.flights.start()
        if resend and self.inherited.negotiated.resend:
            os.write(self.inherited.fuse_fd, notify_resend())
        for number in range(self.settings.readers):
            threading.Thread(target=self._take_requests, name=f"fuse-{number}", daemon=True).start()

    def _take_requests(self) -> None:
        try:
            self.session.run()
        except BaseException:
            # A bug: another worker does better than one with a thread less. The requests are resent to it.
            log.exception("a request thread died; this worker ends")
            os._exit(70)
        if not self.stopping.is_set():
            log.warning("the FUSE connection ended")
            os._exit(69)

    def opened(self, attached: Attached) -> None:
        """Count a blob that was just opened."""
        if attached.blob is None:
            log.warning("blob=%s can't be opened: %s", attached.digest, attached.error)
            return
        if attached.record.ours:
            self.budget.add_blob(attached.blob)
        for number, state in enumerate(attached.blob.states):
            if state == TRUSTED:
                self.blocks.note(attached.blob, number)

    def run_clock(self) -> None:
        """Expire reads and show life, until stopped. Syncs have a thread of their own: a disk may take its time."""
        syncer = threading.Thread(target=self._sync_often, name="sync", daemon=True)
        syncer.start()
        while not self.stopping.wait(_TICK_S):
            self.reads.expire(time.monotonic())
            self.inherited.shared.beat()
        self.reads.stop()
        self.flights.stop(timeout_s=_FLUSH_TIMEOUT_S)
        syncer.join(_FLUSH_TIMEOUT_S)
        if not syncer.is_alive():
            self.sync()
        self.sources.close()

    def _sync_often(self) -> None:
        while not self.stopping.wait(self.settings.sync_s):
            self.sync()

    def sync(self) -> None:
        """Note what is durable, and promote what is whole while there is room for complete blobs."""
        for attached in self.table.all():
            blob = attached.blob
            if blob is None or blob.complete:
                continue
            try:
                blob.sync()
                if blob.is_whole() and self.budget.may_pin(blob):
                    with self.table.change:  # against an eviction of what just became complete
                        if blob.fd >= 0 and not blob.complete and blob.promote():
                            self.budget.pin(blob)
                            self.counters.promoted_blobs += 1
            except (ImageError, OSError) as err:
                self.counters.sync_errors += 1
                log.warning("blob=%s step=sync: %s", attached.digest, err)

    def stats(self) -> dict[str, Any]:
        """Counters, gauges, and a row for each blob."""
        demand, flights = self.flights.depth()
        budget = self.budget
        return {
            "counters": self.counters.as_data()
            | {
                "fetched_blocks": self.flights.fetched,
                "failed_fetches": self.flights.failures,
                "evicted_blocks": budget.evicted_blocks,
                "evicted_bytes": budget.evicted_bytes,
                "worker_deaths": self.inherited.shared.deaths,
            },
            "gauges": {
                "cache_bytes": budget.used_bytes,
                "cache_limit_bytes": budget.limit_bytes,
                "pinned_bytes": budget.pinned_bytes,
                "waiting_reads": self.reads.pending(),
                "queued_demand": demand,
                "flights": flights,
                "open_files": len(self.inherited.shared.opens.values),
                "uptime_s": time.time() - self.started,
            },
            "last_error": self.flights.last_error,
            "blobs": [self._row(one) for one in self.table.all()],
        }

    def _row(self, attached: Attached) -> dict[str, Any]:
        blob = attached.blob
        row: dict[str, Any] = {"digest": attached.digest, "size": attached.record.spec.size}
        if blob is None:
            return row | {"error": str(attached.error)}
        states = blob.states
        return row | {
            "complete": blob.complete,
            "blocks": len(states),
            "block_bytes": blob.index.block_bytes,
            "present": len(states) - states.count(ABSENT),
            "suspect": states.count(SUSPECT),
            "present_bytes": blob.present_bytes(),
            "holds": sorted(attached.record.holds),
        }
