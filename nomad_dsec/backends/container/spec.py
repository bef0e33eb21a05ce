"""What one container is made of, as data: every path, number and rule that a launcher needs. Pure: nothing is opened.

Launchers (native, oci) read only this and a `Slot` (see launcher.py); they never see the user's request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from libdsec.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsec_policies.compiled import CompiledPolicy

UID_RANGE = 65536  # ids of one sandbox: 0..65535 inside
MIB = 1024 * 1024
SECRETS_DIR = "/run/secrets"
NO_TARGETS = ((), ("proc",), ("sys",), ("dev",))
MAX_SECRET_BYTES = 256 * 1024
MAX_SECRETS_TOTAL_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TmpfsUpper:
    """A writable layer in memory, made by the launcher inside the sandbox's mount namespace; charged to its memory."""

    size_bytes: int
    inodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DirUpper:
    """A writable layer on disk: `path` holds directories `upper` and `work`, owned by the sandbox's root."""

    path: Path

    @property
    def upper(self) -> Path:
        """Overlay's upperdir."""
        return self.path / "upper"

    @property
    def work(self) -> Path:
        """Overlay's workdir."""
        return self.path / "work"


Upper = TmpfsUpper | DirUpper


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """cpus: cores, fractions allowed; memory_bytes covers the tmpfs upper too; pids counts threads."""

    cpus: float
    memory_bytes: int
    pids: int
    best_effort: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMount:
    """A directory or file of the host shown inside; source lies below one of the node's allowed roots.

    owners: whose its files are inside; see mount_owners.py.
    """

    source: Path
    target: str
    read_only: bool = True
    owners: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """One container. `rootfs` is the mounted, shared, read-only image; `uid_base` is host id of inside's root.

    runtime_dir: host directory, mode 0700, in which this incarnation has its listening socket and nothing else.
    shm_bytes: size of /dev/shm; log_bytes: what dsec-init keeps of all execs' output; both are charged to the memory.
    env, cwd, user: the defaults of execs, which the node passes with each; launchers only need them for show.
    secrets_uid: who inside may read the secrets; root inside may too.
    lane: it serves stateless calls (guest/c/call.h): a read-only root, no exec protocol; the native launcher only.
    """

    id: str
    incarnation: int
    rootfs: Path
    upper: Upper
    limits: Limits
    policy: CompiledPolicy
    uid_base: int
    runtime_dir: Path
    hostname: str
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    user: str = "0"
    shm_bytes: int = 64 * MIB
    log_bytes: int = 64 * MIB
    nameservers: tuple[str, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets_uid: int = 0
    mounts: tuple[HostMount, ...] = ()
    lane: bool = False

    @property
    def socket_path(self) -> Path:
        """Where dsec-init of this container listens, on the host."""
        return self.runtime_dir / f"{self.id}.{self.incarnation}.sock"


def check_secrets(secrets: Mapping[str, str]) -> None:
    """UsageError naming the secret that can't be a file below /run/secrets."""
    total = 0
    for name, text in secrets.items():
        size = len(text.encode())
        total += size
        if not name or "/" in name or "\0" in name or name in (".", "..") or len(name.encode()) > 255:
            raise UsageError(
                "bad_secret_name",
                f"{name[:80]!r} can't be a file name",
                field=f"secrets.{name[:80]}",
                hint=f"use 1-255 bytes without '/'; the secret is shown as {SECRETS_DIR}/<name>",
            )
        if size > MAX_SECRET_BYTES or total > MAX_SECRETS_TOTAL_BYTES:
            raise UsageError(
                "secret_too_large",
                f"{size} bytes, {total} in all",
                field=f"secrets.{name}",
                hint=f"at most {MAX_SECRET_BYTES} bytes each, {MAX_SECRETS_TOTAL_BYTES} together; write a file instead",
            )


def check_mounts(mounts: tuple[HostMount, ...], allowed_roots: tuple[Path, ...]) -> None:
    """UsageError naming the mount whose source is outside the allowed roots or whose target can't be.

    The source is checked again on an open descriptor when it is mounted; here only its name is.
    """
    for index, mount in enumerate(mounts):
        where = f"mounts[{index}]"
        pure = PurePosixPath(mount.source)
        if not pure.is_absolute() or ".." in pure.parts or not any(pure.is_relative_to(root) for root in allowed_roots):
            raise UsageError(
                "mount_not_allowed",
                f"{mount.source} is not below an allowed root",
                field=f"{where}.source",
                hint=f"allowed roots of this node: {', '.join(map(str, allowed_roots)) or 'none'}",
            )
        target = PurePosixPath(mount.target)
        if (
            not target.is_absolute()
            or ".." in target.parts
            or len(target.parts) < 2
            or target.parts[1] in ("proc", "sys", "dev")
        ):
            raise UsageError(
                "bad_mount_target",
                f"{mount.target!r} can't be mounted on",
                field=f"{where}.target",
                hint="use an absolute path without '..', not /, /proc, /sys or /dev",
            )
