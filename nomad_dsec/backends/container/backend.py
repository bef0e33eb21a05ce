"""The container backend: the verbs of backends.base over one launcher and the host's pools.

What lasts is the handle and the label on the cgroup; what is kept here (`Live`) only saves look-ups and is rebuilt by
`recover`.
"""

from __future__ import annotations

import os
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dsec_policies.compile import compile_policy
from dsec_policies.describe import describe
from dsec_policies.errors import PolicyError
from dsec_policies.model import parse_policy
from libdsec.errors import DsecError, NotSupported, StateError, UsageError
from libdsec.wire import BackendFingerprint, Metrics

from nomad_dsec.backends.base import Ended, Fate, Recovered, Started, Steps
from nomad_dsec.backends.container.compose import compose, layer_name, limits_of, tmpfs_bytes
from nomad_dsec.backends.container.finish import finish
from nomad_dsec.backends.container.host import Host, open_host, owner_of
from nomad_dsec.backends.container.launcher import Slot
from nomad_dsec.backends.container.live import Live, find_init
from nomad_dsec.backends.container.native import NativeLauncher
from nomad_dsec.backends.container.owner import owner_uid
from nomad_dsec.backends.container.record import BACKEND, Record, owner_label, owner_of_spec, read_record
from nomad_dsec.backends.container.self_test import SELF_TEST, self_test
from nomad_dsec.backends.container.sockets import bind_listener
from nomad_dsec.backends.container.spec import MIB, ContainerSpec, check_secrets
from nomad_dsec.backends.container.sweep import sweep
from nomad_dsec.backends.container.verify import verify_policy
from nomad_dsec.linux.cgroup_files import Limits as CgroupLimits
from nomad_dsec.linux.procfs import boot_id
from nomad_dsec.linux.upper import UpperLayer, adopt_layer, default_inodes
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from dsec_imagefs.mounts import MountTable
    from dsec_policies.compiled import CompiledPolicy

    from nomad_dsec.backends.container.host import ContainerConfig
    from nomad_dsec.backends.container.launcher import Launcher
    from nomad_dsec.guest.channel import GuestChannel
    from nomad_dsec.model import Handle, SandboxSpec

FREEZE_S: Final = 10.0
RETRY_S: Final = 30.0
_log = get_log("container.backend")


class ContainerBackend:
    """Containers of one node. Make it with `await ContainerBackend.open(...)`, let go of it with `close`."""

    name = BACKEND

    def __init__(self, host: Host, launcher: Launcher) -> None:
        self._host = host
        self._launcher = launcher
        self._live: dict[str, Live] = {}  # by owner label: a late call for an old incarnation must not meet the new one
        self._refusal: str | None = None
        self._retry_at = 0.0

    @classmethod
    async def open(cls, config: ContainerConfig, table: MountTable) -> ContainerBackend:
        """Probe the machine, fill the pools. PlatformError says what is missing, UsageError what is misconfigured."""
        host = await open_host(config, table)
        return cls(host, _make_launcher(host))

    @property
    def host(self) -> Host:
        """What containers are made of here; the lanes of fncall draw from the same."""
        return self._host

    def adopt_lane(self, live: Live) -> None:
        """A container that another room starts and ends, so that no sweep takes it for a stray."""
        self._live[live.owner] = live

    def forget_lane(self, live: Live) -> None:
        """It has ended. Idempotent."""
        self._live.pop(live.owner, None)

    async def fingerprint(self) -> BackendFingerprint:
        """See Backend. Once, a container with an empty root is really started, asked and removed."""
        if self._refusal is None or (self._refusal and time.monotonic() > self._retry_at):
            self._refusal = await self_test(self._start, self.stop, self._host.config.data / SELF_TEST)
            self._retry_at = time.monotonic() + RETRY_S
        host = self._host
        return BackendFingerprint(
            name=self.name,
            available=not self._refusal,
            reason=self._refusal,
            features=["pause", "files", "exec", "pty", "network_none", "network_open"] if not self._refusal else [],
            attributes={
                "launcher": self._launcher.name,
                "cgroups": host.cgroups.layout.mode,
                "cgroup_moves": host.fast_moves or "fast",
                "upper": host.uppers.store.kind,
                "kernel": host.abilities.kernel,
            },
        )

    async def start(self, spec: SandboxSpec, journal: Callable[[Handle], Awaitable[None]], steps: Steps) -> Started:
        """See Backend. Cancelled or failing, it removes what it made."""
        check_secrets(spec.secrets)
        if owner_of_spec(spec) in self._live:
            raise StateError("exists", f"{spec.id} runs already")
        with steps.step("image"):
            rootfs = await self._host.roots.acquire(spec.digest)
        return await self._start(spec, journal, steps, rootfs)

    async def _start(
        self, spec: SandboxSpec, journal: Callable[[Handle], Awaitable[None]], steps: Steps, rootfs: Path
    ) -> Started:
        host = self._host
        with steps.step("policy"):
            compiled = self._compile(spec.policy)
        async with AsyncExitStack() as undo:
            live = Live(sandbox=spec.id, owner=owner_of_spec(spec), record=self._blank_record(spec))
            self._live[live.owner] = live
            undo.push_async_callback(self._end, live)
            with steps.step("slot"):
                await self._take_slot(live, spec, compiled)
            with steps.step("journal"):
                await journal(live.record.to_handle(spec.id, spec.incarnation))
            if host.uppers.store.kind != "tmpfs":
                with steps.step("upper"):
                    await self._make_upper(live, spec)
                    await journal(live.record.to_handle(spec.id, spec.incarnation))
            with steps.step("launch"):
                await self._launch(live, self._compose(spec, live, compiled, rootfs))
            with steps.step("connect"):
                channel = await live.connect()
            with steps.step("probe"):
                await verify_policy(channel, compiled)
            undo.pop_all()
        handle = live.record.to_handle(spec.id, spec.incarnation)
        in_memory = host.uppers.store.kind == "tmpfs"
        return Started(
            handle=handle,
            policy=_shown(compiled, host.config.resolvers, live),
            disk_mib=tmpfs_bytes(spec) // MIB if in_memory else None,
        )

    def _blank_record(self, spec: SandboxSpec) -> Record:
        return Record(
            boot_id=boot_id(),
            launcher=self._launcher.name,
            digest=spec.digest,
            uid_base=self._host.config.uid_base,
            socket=str(self._host.config.run / f"{layer_name(spec)}.sock"),
            cgroup={},
            net={},
            upper={"kind": self._host.uppers.store.kind, "name": layer_name(spec)},
        )

    async def _take_slot(self, live: Live, spec: SandboxSpec, compiled: CompiledPolicy) -> None:
        host = self._host
        live.uids = host.uids.take()
        limits = limits_of(spec)
        live.cgroup = host.take_cgroup(
            CgroupLimits(
                cpus=limits.cpus,
                memory_bytes=limits.memory_bytes,
                pids=limits.pids,
                best_effort=limits.best_effort,
            ),
            live.owner,
        )
        live.net = await host.nets.take("open" if compiled.network == "open" else "none")
        live.record = replace(
            live.record, uid_base=live.uids.base, cgroup=live.cgroup.to_record(), net=live.net.to_record()
        )

    async def _make_upper(self, live: Live, spec: SandboxSpec) -> None:
        """A layer on disk: made after the journal knows its name."""
        live.upper = await self._host.uppers.store.create(
            layer_name(spec),
            disk_mib=spec.disk_mib,
            inodes=default_inodes(spec.disk_mib),
            owner=live.record.uid_base,
        )
        live.record = replace(live.record, upper=live.upper.to_record())

    async def _launch(self, live: Live, container: ContainerSpec) -> None:
        assert live.cgroup is not None
        assert live.net is not None
        cgroup_fd = live.cgroup.open_delegated(container.uid_base, container.uid_base)
        try:
            with bind_listener(live.socket) as listener:
                slot = Slot(cgroup=live.cgroup, cgroup_fd=cgroup_fd, net=live.net)
                launched = await self._launcher.launch(container, slot, listener.fileno())
        finally:
            if cgroup_fd >= 0:
                os.close(cgroup_fd)
        live.pid, live.pidfd = launched.pid, launched.pidfd
        _log.debug("container launched", sandbox=live.sandbox, pid=live.pid, steps_ms=launched.steps_ms)

    def _compose(self, spec: SandboxSpec, live: Live, compiled: CompiledPolicy, rootfs: Path) -> ContainerSpec:
        return compose(
            spec,
            compiled=compiled,
            rootfs=rootfs,
            layer=live.upper or UpperLayer(kind="tmpfs", name=layer_name(spec)),
            uid_base=live.record.uid_base,
            runtime_dir=live.socket.parent,
            resolvers=self._host.config.resolvers,
            secrets_uid=owner_uid(rootfs, spec.user) if spec.secrets else 0,
        )

    def _compile(self, policy: Mapping[str, Any]) -> CompiledPolicy:
        try:
            return compile_policy(parse_policy(policy), self._host.abilities)
        except PolicyError as error:
            kind = NotSupported if error.code == "policy_unenforceable" else UsageError
            field = f"policy.{error.field}" if error.field != "policy" else "policy"
            raise kind(error.code, error.message, hint=error.hint, field=field) from error

    async def _end(self, live: Live) -> None:
        await finish(live.end(self._host, self._launcher))
        if self._live.get(live.owner) is live:
            del self._live[live.owner]

    async def recover(self, handle: Handle) -> Recovered:
        """See Backend."""
        record = read_record(handle)
        if record.boot_id != boot_id():
            return Recovered(fate=Fate.LOST, reason="node_lost", message="the machine was restarted")
        live = self._live.get(owner_label(handle)) or self._adopt(handle, record)
        if live is None:
            return Recovered(fate=Fate.EXITED, reason="killed", message="it had been removed already")
        if live.pidfd < 0 or live.cgroup is None:
            ended = live.cause()
            return Recovered(fate=Fate.EXITED, reason=ended.reason, message=ended.message)
        if live.cgroup.is_frozen():
            return Recovered(fate=Fate.PAUSED)
        try:
            await live.connect()
        except DsecError as error:
            return Recovered(fate=Fate.LOST, reason="error(recover)", message=str(error))
        return Recovered(fate=Fate.RUNNING)

    def _adopt(self, handle: Handle, record: Record) -> Live | None:
        """What is there of a sandbox that this process did not start; None when its cgroup is no longer its own."""
        host = self._host
        cgroup = host.cgroups.adopt(record.cgroup)
        if owner_of(cgroup) != owner_label(handle):
            return None
        live = Live(
            sandbox=handle.sandbox,
            owner=owner_label(handle),
            record=record,
            cgroup=cgroup,
            net=host.nets.adopt(record.net),
            upper=adopt_layer(record.upper),
            uids=host.claim_uids(record.uid_base),
        )
        found = find_init(cgroup)
        if found is not None:
            live.pid, live.pidfd = found
        self._live[live.owner] = live
        return live

    async def connect(self, handle: Handle) -> GuestChannel:
        """See Backend."""
        return await self._found(handle).connect()

    async def wait_ended(self, handle: Handle) -> Ended:
        """See Backend."""
        return await self._found(handle).wait_ended()

    def _found(self, handle: Handle) -> Live:
        live = self._live.get(owner_label(handle))
        if live is None:
            raise StateError("not_running", f"{handle.sandbox} does not run here")
        return live

    async def stop(self, handle: Handle) -> None:
        """See Backend."""
        record = read_record(handle)
        live = self._live.get(owner_label(handle))
        if live is None and record.boot_id == boot_id():
            live = self._adopt(handle, record)
        if live is not None:
            await self._end(live)
            return
        # Its cgroup is gone, or another's by now; what has a name of its own may still lie about.
        layer = adopt_layer(record.upper)
        if layer.path:
            await self._host.uppers.store.remove(layer)
        if Path(record.socket).parent == self._host.config.run:
            Path(record.socket).unlink(missing_ok=True)

    async def stats(self, handle: Handle) -> Metrics:
        """See Backend."""
        live = self._found(handle)
        if live.cgroup is None:
            raise StateError("not_running", f"{handle.sandbox} is being removed")
        use = live.cgroup.stats()
        live.oom_seen = use.oom_kills
        disk_bytes = 0
        if live.upper is not None and live.pid:
            try:
                disk_bytes = (await self._host.uppers.store.usage(live.upper, pid=live.pid)).used_bytes
            except OSError:
                disk_bytes = 0  # it has just ended
        return Metrics(
            cpu_s=use.cpu_usage_s,
            memory_mib=use.memory_current_bytes / MIB,
            memory_peak_mib=use.memory_peak_bytes / MIB,
            pids=use.pids_current,
            disk_mib=disk_bytes / MIB,
            oom_kills=use.oom_kills,
            at=time.time(),
        )

    async def pause(self, handle: Handle) -> None:
        """See Pausable."""
        live = self._found(handle)
        if live.cgroup is None:
            raise StateError("not_running", f"{handle.sandbox} is being removed")
        await live.cgroup.freeze(timeout_s=FREEZE_S)

    async def resume(self, handle: Handle) -> None:
        """See Pausable."""
        live = self._found(handle)
        if live.cgroup is None:
            raise StateError("not_running", f"{handle.sandbox} is being removed")
        await live.cgroup.thaw(timeout_s=FREEZE_S)

    def plan(self, spec: SandboxSpec) -> list[dict[str, Any]]:
        """See Planned. The uid range, the root's path and the runtime directory are those of nobody."""
        live = Live(sandbox=spec.id, owner="", record=self._blank_record(spec))
        return self._launcher.plan(self._compose(spec, live, self._compile(spec.policy), Path("/")))

    async def sweep(self, keep: Sequence[Handle]) -> list[str]:
        """See Backend."""
        return await sweep(self._host, list(self._live.values()), [read_record(handle) for handle in keep])

    async def close(self) -> None:
        """See Backend."""
        for live in self._live.values():
            if live.channel is not None:
                await live.channel.close()
            if live.pidfd >= 0:
                os.close(live.pidfd)
        self._live.clear()
        try:
            await self._launcher.close()
        finally:
            await self._host.close()


def _make_launcher(host: Host) -> Launcher:
    config = host.config
    if config.launcher == "native":
        return NativeLauncher(config.init_binary, host.cgroups.layout)
    kind, _, runtime = config.launcher.partition(":")
    if kind == "oci" and runtime:
        from nomad_dsec.backends.container.oci import OciLauncher

        return OciLauncher(runtime, config.init_binary, host.cgroups.layout)
    raise UsageError(
        "bad_launcher", f"{config.launcher!r} is no launcher", field="node.launcher", hint="native, or oci:<runtime>"
    )


@lru_cache(maxsize=64)
def _describe(compiled: CompiledPolicy, resolvers: tuple[str, ...]) -> Mapping[str, Any]:
    """The effective policy; the same one is shown for all sandboxes under it."""
    return describe(compiled, resolvers=resolvers)


def _shown(compiled: CompiledPolicy, resolvers: tuple[str, ...], live: Live) -> Mapping[str, Any]:
    """The effective policy of one sandbox, with its address when it has one."""
    policy = _describe(compiled, resolvers)
    return {**policy, "address": live.net.address} if live.net is not None and live.net.address else policy
