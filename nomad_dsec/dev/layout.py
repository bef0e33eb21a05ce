"""The data directory of `dsec dev`: where things lie, the lock of the one supervisor, and dev.json that others read."""

from __future__ import annotations

import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
from libdsec.errors import StateError, UsageError

DEFAULT_DATA = Path("/var/lib/dsec-dev")


class ProcessRecord(msgspec.Struct, kw_only=True, frozen=True):
    """A process that can be told from a later one of the same pid: starttime is field 22 of /proc/<pid>/stat."""

    pid: int
    starttime: int


class DevState(msgspec.Struct, kw_only=True):
    """dev.json. Mode 0600: it holds the key. `ready` once the gateway answers. nomad, consul: their addresses."""

    endpoint: str
    api_key: str
    node: str
    ready: bool = False
    keep: bool = False
    supervisor: ProcessRecord | None = None
    children: dict[str, ProcessRecord] = {}
    restarts: dict[str, int] = {}
    nomad: str = ""
    consul: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below one data directory."""

    data: Path

    @property
    def node(self) -> Path:
        """Data of the node daemon."""
        return self.data / "node"

    @property
    def node_socket(self) -> Path:
        """Where the node daemon listens."""
        return self.node / "node.sock"

    @property
    def gateway(self) -> Path:
        """Data of the gateway."""
        return self.data / "gateway"

    @property
    def images(self) -> Path:
        """The image store."""
        return self.data / "images"

    @property
    def logs(self) -> Path:
        """What the children and a detached supervisor write."""
        return self.data / "logs"

    @property
    def state_file(self) -> Path:
        """What clients read: endpoint, key, pids."""
        return self.data / "dev.json"

    def prepare(self) -> None:
        """Make the directories, for root only; UsageError when that can't be."""
        try:
            for path in (self.data, self.node, self.gateway, self.images, self.logs):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            why = f"can't use {self.data}: {error.strerror}"
            raise UsageError("bad_data", why, field="--data", hint="run as root or choose another") from error
        if len(os.fsencode(self.node_socket)) > 100:
            why = f"{self.data} is too long a path for a Unix socket"
            raise UsageError("bad_data", why, field="--data", hint="use a shorter one")

    def read_state(self) -> DevState | None:
        """dev.json, or None when there is none or it can't be read."""
        try:
            return msgspec.json.decode(self.state_file.read_bytes(), type=DevState)
        except (FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError):
            return None
        except PermissionError as error:
            raise UsageError("bad_data", f"can't read {self.state_file}", field="--data", hint="run as root") from error

    def write_state(self, state: DevState) -> None:
        """Replace dev.json in one step."""
        fd, name = tempfile.mkstemp(dir=self.data, prefix=".dev-")
        with os.fdopen(fd, "wb") as out:
            out.write(msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")
        Path(name).replace(self.state_file)


class Lock:
    """The right to supervise a data directory; the kernel drops it when the holder dies, however it dies."""

    def __init__(self, layout: Layout) -> None:
        self._path = layout.data / "dev.lock"
        self._fd = -1

    def take(self) -> None:
        """Hold it; StateError already_running names the holder."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise StateError(
                "already_running",
                f"`dsec dev` already runs on {self._path.parent} (pid {holder or 'unknown'})",
                hint=f"stop it with `dsec dev stop --data {self._path.parent}`, or give another --data",
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Let go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
