"""Creating: admission, one start per member, gangs, and what happens when the one who asked goes away.

Ids are the gateway's. A create whose id exists joins what is under way, or gets what there is: it never makes a second.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsec_policies.errors import PolicyError
from dsec_policies.model import parse_policy
from libdsec.errors import CapacityError, DeadlineExceeded, DsecError, PlatformError, UsageError
from libdsec.wire import CreateFailure, CreateReply

from nomad_dsec.backends.base import Steps
from nomad_dsec.ids import node_of
from nomad_dsec.log import get_log
from nomad_dsec.node.capacity import Need
from nomad_dsec.node.consul_label import asked_service
from nomad_dsec.node.core import Entry
from nomad_dsec.node.foreign import to_dsec
from nomad_dsec.node.row import Row, from_handle, to_spec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from libdsec.wire import NodeCreateRequest
    from libdsec.wire_tasks import HostMount

    from nomad_dsec.backends.base import Backend
    from nomad_dsec.model import Handle
    from nomad_dsec.node.core import Node
    from nomad_dsec.node.door import Door
    from nomad_dsec.node.images import ImageDefaults
    from nomad_dsec.node.supervisor import Supervisor

log = get_log(__name__)
ABANDONED = "the one who asked for it went away before it was ready"
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """What only the daemon itself may ask for: host mounts (checked already), and room outside the granted pool."""

    mounts: tuple[HostMount, ...] = ()
    outside: bool = False


PLAIN = Inner()


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """Members created by one request. delivered: a reply has reached someone, who now owns them."""

    members: list[Entry]
    all_or_none: bool
    waiters: int = 0
    delivered: bool = False
    task: asyncio.Task[None] | None = None
    started: float = field(default_factory=time.monotonic)


class Creator:
    """Carries out NodeCreateRequests."""

    def __init__(self, node: Node, door: Door, supervisor: Supervisor) -> None:
        self._node = node
        self._door = door
        self._supervisor = supervisor

    async def create(self, request: NodeCreateRequest, inner: Inner = PLAIN) -> tuple[CreateReply, list[Group]]:
        """Run the members; returns once each runs or has failed. The groups are for `delivered` or `leave`.

        Raises CapacityError (see CONTRACT: capacity, starting_limit, draining, queue_full, queue_deadline, disk,
        backend_unavailable, image_missing), UsageError, or, for a gang, what the first failing member met.
        """
        fresh = [sandbox for sandbox in request.ids if sandbox not in self._node.entries]
        refused = await self._admit(request, fresh, inner) if fresh else {}
        entries = [refused.get(sandbox) or self._node.entry(sandbox) for sandbox in request.ids]
        for entry in entries:
            if entry.row.namespace != request.namespace:
                raise UsageError("id_in_use", f"{entry.row.id} is of another namespace", field="ids")
        groups = list({id(e.group): e.group for e in entries if e.group is not None}.values())
        await self._wait(groups)
        try:
            return self._reply(entries, all_or_none=request.spec.all_or_none), groups
        except DsecError:
            self.delivered(groups)  # nothing of them lives: there is nothing to claim
            raise

    async def _wait(self, groups: list[Group]) -> None:
        for group in groups:
            group.waiters += 1
        try:
            for group in groups:
                assert group.task is not None
                await asyncio.shield(group.task)
        except asyncio.CancelledError:
            self.leave(groups)
            raise

    def leave(self, groups: Iterable[Group]) -> None:
        """One who waited, or was to get the reply, is gone; members that nobody else claims in time are removed."""
        for group in groups:
            group.waiters -= 1
            if group.waiters == 0 and not group.delivered:
                self._node.room.spawn("abandon group", self._abandon(group))

    def delivered(self, groups: Iterable[Group]) -> None:
        """The reply has been written."""
        for group in groups:
            group.waiters -= 1
            group.delivered = True
            for entry in group.members:
                if entry.ended.is_set() or entry.row.state != "creating":
                    entry.group = None

    async def _abandon(self, group: Group) -> None:
        await asyncio.sleep(self._node.limits.adopt_grace_s)
        if group.waiters or group.delivered:
            return
        group.delivered = True  # decided: a later create of the same ids gets their end
        await self._end_all(group.members, "killed", ABANDONED)

    def _reply(self, entries: list[Entry], *, all_or_none: bool) -> CreateReply:
        good = [entry for entry in entries if entry.error is None]
        bad = [entry for entry in entries if entry.error is not None]
        if bad and (all_or_none or not good):
            first = bad[0].error
            assert first is not None
            raise first
        failures = [
            CreateFailure(id=entry.row.id, error=_body(entry.error)) for entry in bad if entry.error is not None
        ]
        return CreateReply(sandboxes=[self._node.info(entry) for entry in good], failures=failures)

    async def _admit(self, request: NodeCreateRequest, fresh: list[str], inner: Inner) -> dict[str, Entry]:
        """All that can refuse, then, without a wait in between, the promise of room and the records.

        Returns the members of a group that need not be whole for which there was no room; they are in no table.
        """
        node, spec = self._node, request.spec
        try:
            self._check(request, fresh)
            backend = await self._backend(spec.backend)
            image = await node.images.defaults(request.digest, spec.image)
            policy = backend_policy(spec.policy)
            fresh = [sandbox for sandbox in dict.fromkeys(fresh) if sandbox not in node.entries]
            node.queue.check(len(fresh))
            need = Need(cpus=spec.cpus, memory_mib=spec.memory_mib)
            taken = node.capacity.promise_group(fresh, need, all_or_none=spec.all_or_none, outside=inner.outside)
        except CapacityError as refused:
            node.metrics.refused(refused.code)
            raise
        records = {sandbox: self._record(request, sandbox, image, policy, inner) for sandbox in fresh}
        members = [records.pop(sandbox) for sandbox in taken]
        for entry in records.values():
            entry.error = node.capacity.refusal(need, len(fresh), len(taken))
        group = Group(members=members, all_or_none=spec.all_or_none)
        for entry in members:
            node.entries[entry.row.id] = entry
            entry.group = group
            entry.starting = node.room.spawn(
                f"start {entry.row.id}", self._start(entry, backend, group, wait_s=spec.wait_s)
            )
        group.task = node.room.spawn("group", self._run_group(group))
        return records

    def _check(self, request: NodeCreateRequest, fresh: list[str]) -> None:
        node = self._node
        for sandbox in fresh:
            if node_of(sandbox) != node.id:
                raise UsageError("wrong_node", f"{sandbox} is not of node {node.id}", field="ids")
        if request.spec.secret_refs:
            raise UsageError(
                "secret_refs_at_node",
                "a node looks up no secrets",
                field="secret_refs",
                hint="ask the gateway, which puts the values in",
            )
        if request.spec.hostname and _HOSTNAME.fullmatch(request.spec.hostname) is None:
            raise UsageError(
                "bad_hostname",
                f"{request.spec.hostname!r} can't be a host name",
                field="hostname",
                hint="use 1-63 letters, digits and hyphens",
            )
        asked_service(request.spec.labels)
        if node.draining:
            raise CapacityError("draining", f"node {node.id} is draining", details={"node": node.id})
        if node.journal.broken:
            raise CapacityError("disk", f"node {node.id} can't write its journal: {node.journal.broken}")
        free = self._supervisor.disk_mib_free
        if free < node.limits.disk_mib_min:
            raise CapacityError(
                "disk",
                f"node {node.id} has {free} MiB of disk left",
                hint="remove images or old sandboxes",
                details={"free_mib": free, "needed_mib": node.limits.disk_mib_min},
            )

    async def _backend(self, name: str) -> Backend:
        backend = self._node.backends.get(name)
        why = f"node {self._node.id} was started without it"
        if backend is not None:
            found = await self._supervisor.fingerprint(name)
            if found.available:
                return backend
            why = found.reason
        raise CapacityError(
            "backend_unavailable",
            f"no {name} sandboxes here: {why}",
            details={"backend": name, "reason": why, "offered": sorted(self._node.backends)},
        )

    def _record(
        self, request: NodeCreateRequest, sandbox: str, image: ImageDefaults, policy: dict[str, Any], inner: Inner
    ) -> Entry:
        spec, now = request.spec, self._node.clock.now()
        row = Row(
            id=sandbox,
            namespace=request.namespace,
            backend=spec.backend,
            image=spec.image,
            digest=image.digest,
            cpus=spec.cpus,
            memory_mib=spec.memory_mib,
            disk_mib=spec.disk_mib,
            pids=spec.pids,
            timeout_s=spec.timeout_s,
            created_at=now,
            qos=spec.qos,
            env={**image.env, **spec.env},
            cwd=spec.cwd or image.cwd or "/",
            user=spec.user or image.user or "0",
            hostname=spec.hostname or sandbox[-16:],
            policy=policy,
            labels=spec.labels,
            lease_s=spec.lease_s,
            mounts=list(inner.mounts),
            outside=inner.outside,
        )
        return Entry(row=row, secrets=spec.secrets)

    async def _run_group(self, group: Group) -> None:
        """Wait for all members; when a gang can't be whole, remove those that run."""
        tasks = [entry.starting for entry in group.members if entry.starting is not None]
        if tasks:
            mode = asyncio.FIRST_EXCEPTION if group.all_or_none else asyncio.ALL_COMPLETED
            await asyncio.wait(tasks, return_when=mode)
        failed = next((entry.error for entry in group.members if entry.error is not None), None)
        if group.all_or_none and failed is not None:
            rest = [entry for entry in group.members if entry.error is None]
            await self._end_all(rest, "killed", f"another member of its group could not be made: {failed}")
            for entry in rest:
                entry.error = failed

    async def _end_all(self, entries: list[Entry], reason: str, message: str) -> None:
        ends = [self._door.end(entry, reason=reason, message=message) for entry in entries]
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, BaseException):
                log.error("a member of a group could not be removed", error=repr(result))

    async def _start(self, entry: Entry, backend: Backend, group: Group, *, wait_s: float) -> None:
        steps = Steps()
        row = entry.row
        try:
            async with self._node.queue.turn(row.qos, timeout_s=wait_s):
                steps.ms["queue"] = (time.monotonic() - group.started) * 1000
                self._node.failpoints.reach("admitted")
                await self._start_now(entry, backend, steps)
        except asyncio.CancelledError:
            entry.error = entry.error or PlatformError("create_cancelled", f"{row.id} was ended while it was made")
            raise
        except Exception as error:
            entry.error = _named(error, row.id, steps.current)
            self._node.metrics.created(row.backend, entry.error.code)
            log.error("a create failed", sandbox=row.id, step=steps.current, error=repr(error))
            await self._clean(entry, steps.current or "queue", entry.error)
            raise entry.error from error
        log.info("a sandbox is ready", sandbox=row.id, backend=row.backend, took_ms=round(steps.ms["start"], 1))
        self._node.metrics.created(row.backend, "ok")
        self._node.metrics.observe_steps(row.backend, entry.row.timings_ms)

    async def _start_now(self, entry: Entry, backend: Backend, steps: Steps) -> None:
        node, began = self._node, time.monotonic()

        async def journal(handle: Handle) -> None:
            with_name = time.monotonic()
            await self._door.note_handle(entry, handle)
            steps.ms["journal"] = steps.ms.get("journal", 0.0) + (time.monotonic() - with_name) * 1000

        try:
            async with asyncio.timeout(node.limits.start_s):
                started = await backend.start(to_spec(entry.row, entry.secrets), journal, steps)
        except TimeoutError as late:
            raise DeadlineExceeded(
                "start_timeout", f"{entry.row.id} was not ready within {node.limits.start_s:g} s (at {steps.current})"
            ) from late
        node.failpoints.reach("started")
        entry.secrets = {}
        steps.ms["start"] = (time.monotonic() - began) * 1000
        now, row = node.clock.now(), entry.row
        await self._door.change(
            entry,
            state="running",
            handle=from_handle(started.handle),
            effective_policy=started.policy,
            disk_mib=row.disk_mib if started.disk_mib is None else started.disk_mib,
            ready_at=now,
            expires_at=now + row.timeout_s,
            lease_expires_at=None if row.lease_s is None else now + row.lease_s,
            timings_ms={name: round(took, 3) for name, took in steps.ms.items()},
        )
        node.failpoints.reach("running")
        self._supervisor.watch(entry)

    async def _clean(self, entry: Entry, step: str, error: DsecError) -> None:
        """A failed start leaves nothing; going through `end` makes sure, and keeps the reason for `info`."""
        entry.starting = None
        if entry.stopping is not None:
            return
        await self._door.end(entry, reason=f"error({step})", message=str(error))
        if isinstance(error, CapacityError):
            self._node.entries.pop(entry.row.id, None)
            await self._node.journal.forget([entry.row.id])


def backend_policy(policy: str | dict[str, Any]) -> dict[str, Any]:
    """The mapping form: a bare name is a profile. UsageError names what is wrong in it."""
    mapping = {"profile": policy} if isinstance(policy, str) else policy
    try:
        parse_policy(mapping)
    except PolicyError as error:
        raise to_dsec(error) from error
    return mapping


def _named(error: Exception, sandbox: str, step: str) -> DsecError:
    known = to_dsec(error)
    if isinstance(error, DsecError) or known.code != "internal_error":
        if step:
            known.details.setdefault("step", step)
        return known
    return PlatformError(
        "start_failed",
        f"{sandbox} could not be started at step {step or 'start'}: {error or type(error).__name__}",
        hint="the node's log has the details",
        details={"step": step or "start"},
    )


def _body(error: DsecError) -> dict[str, Any]:
    body = error.to_body()
    return {name: getattr(body, name) for name in body.__struct_fields__}
