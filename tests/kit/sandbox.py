"""Real sandboxes for tests, straight from the container backend: no node daemon, no gateway, no SDK in between."""

from __future__ import annotations

import os
import secrets
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsec_imagefs.mounts import MountTable
from dsec_imagefs.store import ImageStore

from nomad_dsec.backends.base import Steps
from nomad_dsec.backends.container.backend import ContainerBackend
from nomad_dsec.backends.container.host import ContainerConfig
from nomad_dsec.guest.build import build
from nomad_dsec.guest.spec import ExecOutcome, ExecSpec
from nomad_dsec.model import Handle, SandboxSpec
from tests.kit.attacker import answers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from nomad_dsec.backends.base import Started
    from nomad_dsec.guest.channel import GuestChannel

PATH = (b"PATH", b"/usr/sbin:/usr/bin:/sbin:/bin")


@dataclass(frozen=True, kw_only=True)
class Box:
    """One running sandbox."""

    backend: ContainerBackend
    spec: SandboxSpec
    started: Started
    channel: GuestChannel

    async def run(
        self,
        *argv: str | int,
        user: str = "",
        cwd: str = "/",
        timeout_s: float = 30.0,
        max_output_bytes: int = 1 << 20,
    ) -> ExecOutcome:
        """A command to its end."""
        spec = ExecSpec(
            argv=tuple(str(word).encode() for word in argv),
            env=(PATH,),
            user=user,
            cwd=cwd.encode(),
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            no_new_privs=bool(self.spec.policy.get("no_new_privs", True)),
        )
        return await self.channel.run(spec, timeout_s=timeout_s + 30)

    async def attack(self, *argv: str | int, user: str = "", timeout_s: float = 30.0) -> dict[str, int]:
        """The attacker's program with one verb; its answers."""
        outcome = await self.run("/usr/bin/attack", *argv, user=user, timeout_s=timeout_s)
        assert outcome.exit_code == 0, (argv[:4], outcome)
        return answers(outcome.stdout)

    async def shell(self, script: str, *, user: str = "", timeout_s: float = 30.0) -> str:
        """A script of the image's bash; its output, stripped. Its exit status doesn't matter."""
        outcome = await self.run("/bin/bash", "-c", script, user=user, timeout_s=timeout_s)
        assert outcome.start_error is None, outcome
        return outcome.stdout.decode(errors="replace").strip()

    @property
    def pid(self) -> int:
        """PID 1 of the sandbox, as the host counts."""
        return self.backend._live[f"{self.spec.id}#{self.spec.incarnation}"].pid


class Machine:
    """One backend with an image store of its own, below one directory."""

    def __init__(self, backend: ContainerBackend, store: ImageStore, node: str) -> None:
        self.backend = backend
        self.store = store
        self.node = node

    @classmethod
    async def open(cls, directory: Path, **config: Any) -> Machine:
        """Probe the machine and bring the backend up, its launcher process included."""
        node = f"kit{os.getpid()}{secrets.token_hex(2)}"
        store = ImageStore(directory / "store")
        table = MountTable(store, directory / "mounts")
        binary = build(directory / "bin")
        settings = ContainerConfig(node=node, data=directory / "node", init_binary=binary, **config)
        backend = await ContainerBackend.open(settings, table)
        found = await backend.fingerprint()
        if not found.available:
            await backend.close()
            raise AssertionError(f"the container backend does not work here: {found.reason}")
        return cls(backend, store, node)

    def add_image(self, tree: Path, name: str) -> str:
        """Import a directory; returns the image's digest."""
        return self.store.import_image(f"dir:{tree}", name).digest

    async def close(self) -> None:
        """Nothing lives any more, so the backend leaves nothing: no cgroup, nft table or mount."""
        await self.backend.close()

    def spec(self, digest: str, policy: Mapping[str, Any], **changes: Any) -> SandboxSpec:
        """A small sandbox's spec."""
        values: dict[str, Any] = {
            "id": f"sb-{self.node}-{secrets.token_hex(8)}", "incarnation": 1, "namespace": "test", "digest": digest,
            "backend": "container", "cpus": 1.0, "memory_mib": 128, "disk_mib": 64, "pids": 64, "env": {}, "cwd": "/",
            "user": "", "hostname": "box", "qos": "latency_sensitive", "policy": dict(policy),
        }  # fmt: skip
        return SandboxSpec(**(values | changes))

    @asynccontextmanager
    async def sandbox(self, digest: str, policy: Mapping[str, Any] | None = None, **changes: Any) -> AsyncIterator[Box]:
        """A running sandbox, stopped at the end."""
        spec = self.spec(digest, policy or {}, **changes)
        started = await self.backend.start(spec, _no_journal, Steps())
        try:
            channel = await self.backend.connect(started.handle)
            yield Box(backend=self.backend, spec=spec, started=started, channel=channel)
        finally:
            await self.backend.stop(started.handle)


async def _no_journal(_: Handle) -> None:
    """Tests that crash daemons use a node, not this."""
