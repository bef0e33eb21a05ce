"""What the control socket can ask of a worker. Arguments come from outside: all are checked here."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from dsec_imagefs.blobd.block_map import ABSENT, TRUSTED
from dsec_imagefs.blobd.recorder import Recorder
from dsec_imagefs.blobd.spec import BlobSpec, Record
from dsec_imagefs.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsec_imagefs.blobd.cached import CachedBlob
    from dsec_imagefs.blobd.table import Attached
    from dsec_imagefs.blobd.worker import Worker

_POLL_S = 0.02
_QUIET_S = 10.0  # how long evicting and detaching wait for fetches under way
_MAX_RANGES = 1 << 20
_MAX_USER = 200


class Verbs:
    """`call(message)` runs one; raises ImageError for whatever is wrong with it."""

    def __init__(self, worker: Worker, stop: Callable[[], None]) -> None:
        self._worker = worker
        self._stop = stop
        self._verbs: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "attach": self._attach,
            "detach": self._detach,
            "hold": self._hold,
            "drop": self._drop,
            "prefetch": self._prefetch,
            "evict": self._evict,
            "verify": self._verify,
            "record": self._record,
            "trace": self._trace,
            "stats": lambda _: worker.stats(),
            "status": self._status,
            "stop": self._end,
        }

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run a verb."""
        verb = message.get("verb")
        found = self._verbs.get(verb) if isinstance(verb, str) else None
        if found is None:
            hint = f"one of {', '.join(self._verbs)}"
            raise ImageError("bad_source", f"there is no verb {str(verb)[:40]!r}", hint, "verb")
        return found(message)

    def _attached(self, message: dict[str, Any]) -> Attached:
        return self._worker.table.get(_text(message, "digest"))

    def _blob(self, message: dict[str, Any]) -> tuple[Attached, CachedBlob]:
        attached = self._attached(message)
        if attached.blob is None:
            raise attached.error or ImageError("corrupt", f"{attached.digest} can't be opened")
        return attached, attached.blob

    def _attach(self, message: dict[str, Any]) -> dict[str, Any]:
        spec = BlobSpec.from_json(message.get("blob"))
        user, record_s = _user(message, optional=True), _number(message, "record_s", 0.0, 86400.0)
        worker = self._worker
        with worker.table.change:
            attached, fresh = worker.table.attach(spec)
            if fresh:
                worker.opened(attached)
            if user:
                self._take_hold(attached, user)
            if record_s:
                attached.recorder = Recorder(record_s)
        blob = attached.blob
        assert blob is not None
        base = worker.places.mount / spec.digest
        return {
            "direct": f"{base}.d",
            "mapped": f"{base}.m",
            "complete": blob.complete,
            "present_bytes": blob.present_bytes(),
            "mount_id": worker.inherited.mount_id,
        }

    def _take_hold(self, attached: Attached, user: str) -> None:
        record = attached.record
        if record.holds.get(user) == self._worker.inherited.mount_id:
            return
        holds = record.holds | {user: self._worker.inherited.mount_id}
        self._worker.table.write(attached, Record(spec=record.spec, ours=record.ours, holds=holds))

    def _hold(self, message: dict[str, Any]) -> dict[str, Any]:
        user = _user(message)
        with self._worker.table.change:  # looked up under it: a record of what was just detached must not come back
            self._take_hold(self._attached(message), user)
        return {}

    def _drop(self, message: dict[str, Any]) -> dict[str, Any]:
        user = _user(message)
        with self._worker.table.change:
            attached = self._attached(message)
            record = attached.record
            if user in record.holds:
                holds = {name: at for name, at in record.holds.items() if name != user}
                self._worker.table.write(attached, Record(spec=record.spec, ours=record.ours, holds=holds))
        return {}

    def _check_idle(self, attached: Attached, *, what: str) -> None:
        """Nobody holds it, the kernel has it not open, nothing is fetched. Called with `table.change`."""
        worker = self._worker
        if attached.record.holds:
            users = ", ".join(sorted(attached.record.holds)[:5])
            raise ImageError("in_use", f"{attached.digest} is held by {users}", f"unmount them before you {what} it")
        for node in [one for one in worker.table.nodes.values() if one.attached is attached]:
            if worker.session.is_open(node):
                raise ImageError("in_use", f"{node.name.decode()} is open", f"close it before you {what} it")
        end = time.monotonic() + _QUIET_S
        while attached.blob is not None and not worker.flights.cancel(attached.blob):
            if time.monotonic() > end:
                raise ImageError("busy", f"blocks of {attached.digest} are being fetched", "try again")
            time.sleep(_POLL_S)

    def _close_backings(self, attached: Attached) -> None:
        for node in [one for one in self._worker.table.nodes.values() if one.attached is attached]:
            self._worker.session.close_backing(node)

    def _detach(self, message: dict[str, Any]) -> dict[str, Any]:
        worker = self._worker
        with worker.table.change:
            attached = self._attached(message)
            self._check_idle(attached, what="detach")
            self._close_backings(attached)
            if attached.blob is not None:
                worker.filler.forget_blob(attached.blob)
                if attached.record.ours:
                    worker.budget.remove_blob(attached.blob)
            worker.table.detach(attached)
        return {}

    def _evict(self, message: dict[str, Any]) -> dict[str, Any]:
        worker = self._worker
        if not message.get("digest"):
            wanted = int(_number(message, "bytes_wanted", 0, 1 << 62))
            return {"freed_bytes": worker.budget.evict(wanted)}
        attached, blob = self._blob(message)
        if not blob.complete:
            freed = blob.drop([number for number, state in enumerate(blob.states) if state != ABSENT])
            worker.budget.freed(freed)
            return {"freed_bytes": freed}
        with worker.table.change:
            self._check_idle(attached, what="evict")
            if not attached.record.ours and not attached.record.spec.store:
                raise ImageError("in_use", f"{attached.digest} has no store to come back from", "remove the image")
            self._close_backings(attached)
            worker.filler.forget_blob(blob)
            if attached.record.ours:
                worker.budget.remove_blob(blob)
            freed = blob.reset()
            worker.table.write(attached, Record(spec=attached.record.spec, ours=True, holds=attached.record.holds))
        return {"freed_bytes": freed}

    def _prefetch(self, message: dict[str, Any]) -> dict[str, Any]:
        worker = self._worker
        _, blob = self._blob(message)
        priority = int(_number(message, "priority", 2, 100, default=10))
        wait_s = _number(message, "wait_s", 0.0, 86400.0)
        missing = [number for number in _blocks(message, blob) if blob.states[number] != TRUSTED]
        failed_before = worker.flights.failures
        queued = worker.flights.prefetch(blob, missing, priority)
        end = time.monotonic() + wait_s
        while (left := worker.flights.waiting(blob, missing)) and time.monotonic() < end:
            if worker.stopping.wait(_POLL_S):
                break
        failed = worker.flights.failures - failed_before if wait_s else 0
        return {"queued": queued, "left": left, "failed": failed}

    def _verify(self, message: dict[str, Any]) -> dict[str, Any]:
        """Complete blobs are checked too; a bad block there can't be dropped while the kernel may read it."""
        worker = self._worker
        _, blob = self._blob(message)
        bad: list[int] = []
        checked = dropped = 0
        for number in range(blob.index.count):
            if blob.states[number] == ABSENT:
                continue
            generation = blob.generation
            right = blob.index.verify(number, blob.read(number))
            checked += 1
            if right or blob.generation != generation:
                continue
            bad.append(number)
            if not blob.complete:
                worker.budget.freed(blob.drop([number]))
                worker.counters.wrong_local_blocks += 1
                dropped += 1
        return {"checked": checked, "bad": bad, "dropped": dropped}

    def _record(self, message: dict[str, Any]) -> dict[str, Any]:
        self._attached(message).recorder = Recorder(_number(message, "seconds", 0.0, 86400.0))
        return {}

    def _trace(self, message: dict[str, Any]) -> dict[str, Any]:
        recorder = self._attached(message).recorder
        return {"accesses": recorder.accesses() if recorder is not None else []}

    def _status(self, message: dict[str, Any]) -> dict[str, Any]:
        del message
        inherited = self._worker.inherited
        stale: dict[str, list[str]] = {}
        for attached in self._worker.table.all():
            for user, mount_id in attached.record.holds.items():
                if mount_id != inherited.mount_id:
                    stale.setdefault(user, []).append(attached.digest)
        return {
            "mount": str(self._worker.places.mount),
            "mount_id": inherited.mount_id,
            "supervisor_pid": inherited.supervisor_pid,  # getppid would name a stranger once it is dead
            "worker_pid": os.getpid(),
            "worker_deaths": inherited.shared.deaths,
            "resend": inherited.negotiated.resend,
            "passthrough": inherited.negotiated.passthrough and self._worker.settings.passthrough,
            "protocol": f"7.{inherited.negotiated.minor}",
            "stale": stale,
        }

    def _end(self, message: dict[str, Any]) -> dict[str, Any]:
        del message
        self._stop()
        return {}


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise ImageError("bad_source", f"{name} must be a string, not {str(value)[:40]!r}", f"give {name}", name)
    return value


def _user(message: dict[str, Any], *, optional: bool = False) -> str:
    value = _text(message, "user") if not optional or message.get("user") else ""
    if len(value) > _MAX_USER or (not value and not optional):
        raise ImageError("bad_source", f"user must have 1 to {_MAX_USER} characters", "", "user")
    return value


def _number(message: dict[str, Any], name: str, low: float, high: float, *, default: float = 0.0) -> float:
    value = message.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ImageError("bad_source", f"{name} must be {low:g} to {high:g}, not {str(value)[:40]!r}", "", name)
    return float(value)


def _blocks(message: dict[str, Any], blob: CachedBlob) -> list[int]:
    """Blocks of the ranges, in their order, each once."""
    ranges = message.get("ranges")
    if ranges is None:
        return list(range(blob.index.count))
    if not isinstance(ranges, list) or len(ranges) > _MAX_RANGES:
        raise ImageError("bad_source", "ranges must be a list of [offset, length]", "", "ranges")
    found: dict[int, None] = {}
    for one in ranges:
        if not isinstance(one, list) or len(one) != 2 or not all(type(part) is int and part >= 0 for part in one):
            raise ImageError("bad_source", f"{str(one)[:40]!r} is no [offset, length]", "", "ranges")
        offset, length = one
        end = min(offset + length, blob.index.blob_size)
        if offset < end:
            found.update(dict.fromkeys(range(offset >> blob.shift, ((end - 1) >> blob.shift) + 1)))
    return list(found)
