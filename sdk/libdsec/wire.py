"""Wire types between SDK, gateway and node daemon: JSON by msgspec, bytes as base64, unknown fields refused.

Seconds and MiB in names. Every number from outside is bounded here; what needs the outside world (does the image
exist, is there room) is checked later.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

BackendName = Literal["fncall", "container", "microvm", "vm"]
Qos = Literal["latency_sensitive", "best_effort"]
State = Literal["creating", "running", "pausing", "paused", "resuming", "stopping", "exited", "lost"]
LIVE_STATES = ("creating", "running", "pausing", "paused", "resuming", "stopping")

MAX_ARG_BYTES = 131_071  # one string of argv or env: MAX_ARG_STRLEN less the NUL, execve(2)
MAX_JSON_BYTES = 96 * 1024 * 1024
DEFAULT_OUTPUT_BYTES = 1024 * 1024
MAX_OUTPUT_BYTES = 64 * 1024 * 1024
MAX_TIMEOUT_S = 30 * 24 * 3600.0

Labels = dict[Annotated[str, Meta(max_length=128)], Annotated[str, Meta(max_length=1024)]]
Env = dict[Annotated[str, Meta(min_length=1, max_length=4096)], Annotated[str, Meta(max_length=MAX_ARG_BYTES)]]
TimeoutS = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
REFERENCE_PATTERN = r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*(#[A-Za-z0-9_.-]+)?$"
SecretRefs = Annotated[dict[str, Annotated[str, Meta(pattern=REFERENCE_PATTERN, max_length=512)]], Meta(max_length=64)]
WaitS = Annotated[float, Meta(ge=0, le=MAX_TIMEOUT_S)]  # 0: not at all


class _Wire(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Requests: a misspelt field is an error."""


class _Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Replies: an older client ignores a newer node's fields."""


class CreateRequest(_Wire, kw_only=True):
    """Create one sandbox or a group. `policy` is a profile name or a mapping (see dsec_policies.model).

    secrets: file name -> text, shown below /run/secrets to these sandboxes only. secret_refs: file name -> the name of
    a secret of the caller's namespace, which the gateway looks up; a node takes none.
    """

    image: Annotated[str, Meta(min_length=1, max_length=512)]
    backend: BackendName = "container"
    cpus: Annotated[float, Meta(ge=0.01, le=1024)] = 1.0
    memory_mib: Annotated[int, Meta(ge=16, le=4 * 1024 * 1024)] = 512
    disk_mib: Annotated[int, Meta(ge=1, le=16 * 1024 * 1024)] = 1024
    pids: Annotated[int, Meta(ge=4, le=4_194_304)] = 512
    timeout_s: TimeoutS = 3600.0
    lease_s: TimeoutS | None = None
    env: Env = {}
    cwd: Annotated[str, Meta(max_length=4096)] = ""
    user: Annotated[str, Meta(max_length=256)] = ""
    hostname: Annotated[str, Meta(max_length=63)] = ""
    qos: Qos = "latency_sensitive"
    policy: str | dict[str, Any] = "default"
    labels: Labels = {}
    secrets: dict[str, str] = {}
    secret_refs: SecretRefs = {}
    idempotency_key: Annotated[str, Meta(max_length=256)] = ""
    count: Annotated[int, Meta(ge=1, le=10_000)] = 1
    all_or_none: bool = True
    wait_s: WaitS = 60.0

    def __repr__(self) -> str:
        """Secrets by name only: a log line or a traceback can't tell them."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["secrets"] = sorted(self.secrets)
        return f"CreateRequest({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class NodeCreateRequest(_Wire, kw_only=True):
    """Gateway to node: one group of identical sandboxes with ids and namespace decided by the gateway."""

    ids: Annotated[list[str], Meta(min_length=1, max_length=1000)]
    namespace: str
    digest: str = ""
    spec: CreateRequest


class SandboxInfo(_Reply, kw_only=True):
    """One sandbox as seen from outside. Times are seconds since the epoch (UTC).

    disk_mib: of the writable layer as it is. On a node that keeps layers in memory (tmpfs) it is charged to the
    sandbox's memory and may be smaller than was asked for: with it full, a quarter of memory_mib is left to programs.
    """

    id: str
    node: str
    namespace: str
    backend: str
    image: str
    digest: str
    state: State
    reason: str = ""
    message: str = ""
    incarnation: int = 1
    cpus: float = 1.0
    memory_mib: int = 0
    disk_mib: int = 0
    qos: str = "latency_sensitive"
    labels: dict[str, str] = {}
    created_at: float = 0.0
    ready_at: float | None = None
    ended_at: float | None = None
    expires_at: float | None = None
    lease_expires_at: float | None = None
    policy: dict[str, Any] = {}
    timings_ms: dict[str, float] = {}
    token: str = ""


class CreateFailure(_Reply, kw_only=True):
    """Why one member of a group was not made."""

    id: str
    error: dict[str, Any]


class CreateReply(_Reply, kw_only=True):
    """The members that run and, only when all_or_none is false, those that could not be made."""

    sandboxes: list[SandboxInfo]
    failures: list[CreateFailure] = []


class SandboxList(_Reply, kw_only=True):
    """A listing; `stale_nodes` names nodes that could not be asked, whose sandboxes may be missing or old."""

    sandboxes: list[SandboxInfo]
    stale_nodes: list[str] = []


class Pty(_Wire, kw_only=True):
    """A terminal of rows x cols characters."""

    rows: Annotated[int, Meta(ge=1, le=4096)] = 24
    cols: Annotated[int, Meta(ge=1, le=4096)] = 80


class ExecRequest(_Wire, kw_only=True):
    """Start a command. `cmd` is exact argv (list) or a string for /bin/sh -c.

    exec_id: chosen by the client, 1-64 of [A-Za-z0-9_-]; the same id again is the same exec (never runs twice).
    hold: a slow reader of a stream holds the program up, and gets every byte; else the middle of the output is dropped.
    stdin: bytes given whole; `stdin_open` keeps stdin open for a stream; neither: EOF at once.
    """

    cmd: (
        list[Annotated[str, Meta(max_length=MAX_ARG_BYTES)]]
        | Annotated[str, Meta(min_length=1, max_length=MAX_ARG_BYTES)]
    )
    cwd: Annotated[str, Meta(max_length=4096)] = ""
    env: Env = {}
    user: Annotated[str, Meta(max_length=256)] = ""
    stdin: bytes = b""
    stdin_open: bool = False
    pty: Pty | None = None
    timeout_s: TimeoutS | None = None
    max_output_bytes: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_BYTES)] = DEFAULT_OUTPUT_BYTES
    rlimits: dict[str, int] = {}
    exec_id: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{0,64}$")] = ""
    hold: bool = False


class ExecReply(_Reply, kw_only=True):
    """How a command ended. Exactly one of exit_code and signal is set once `running` is false.

    stdout, stderr: what was kept (head and tail when truncated). offset: bytes of the interleaved log so far.
    """

    exec_id: str
    running: bool = False
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    total_bytes: int = 0
    offset: int = 0
    duration_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_mib: float = 0.0


class ExecList(_Reply, kw_only=True):
    """Execs that the sandbox still remembers."""

    execs: list[ExecReply]


class SignalRequest(_Wire, kw_only=True):
    """Send a signal to the whole tree of an exec (or only its leader)."""

    signal: Annotated[int, Meta(ge=1, le=64)]
    tree: bool = True


class SetTimeoutRequest(_Wire, kw_only=True):
    """The TTL, counted from now."""

    timeout_s: TimeoutS


class LeaseRequest(_Wire, kw_only=True):
    """Renew the lease: the sandbox ends when no renewal comes for this long."""

    lease_s: TimeoutS


class FileStat(_Reply, kw_only=True):
    """One directory entry; mode is st_mode & 07777.

    JSON holds only Unicode: where a name (or link) is not UTF-8, `raw` (`raw_link`) has the exact bytes and the text
    form has U+FFFD in their place; otherwise both are empty. The SDK shows the surrogateescape form.
    """

    name: str
    raw: bytes = b""
    raw_link: bytes = b""
    kind: Literal["file", "dir", "symlink", "fifo", "socket", "char", "block", "other"]
    size: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime: float = 0.0
    link: str = ""


class FileList(_Reply, kw_only=True):
    """Directory contents in name order."""

    entries: list[FileStat]


class FileWritten(_Reply, kw_only=True):
    """Bytes that are durable under the final name."""

    bytes: int


class TreeResult(_Reply, kw_only=True):
    """What a tree transfer left out (special files), and why."""

    skipped: list[tuple[str, str]] = []
    files: int = 0


class FileOp(_Wire, kw_only=True):
    """mkdir, move, remove, chmod. `raw_path` and `raw_to`, when not empty, are exact bytes and win over the text."""

    op: Literal["mkdir", "move", "remove", "chmod"]
    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    raw_path: Annotated[bytes, Meta(max_length=4096)] = b""
    raw_to: Annotated[bytes, Meta(max_length=4096)] = b""
    to: str = ""
    mode: Annotated[int, Meta(ge=0, le=0o7777)] | UnsetType = UNSET
    recursive: bool = False
    parents: bool = False
    missing_ok: bool = False


class WatchEvent(_Reply, kw_only=True):
    """kind: created, modified, removed, moved_from, moved_to, attrib, overflow (events were lost: look again).

    `raw`: the exact bytes of a path that is not UTF-8.
    """

    kind: str
    path: str
    raw: bytes = b""
    cookie: int = 0


class Metrics(_Reply, kw_only=True):
    """Use by one sandbox now."""

    cpu_s: float = 0.0
    memory_mib: float = 0.0
    memory_peak_mib: float = 0.0
    pids: int = 0
    disk_mib: float = 0.0
    oom_kills: int = 0
    at: float = 0.0


class NetworkInfo(_Reply, kw_only=True):
    """The effective network policy and its generation. address: the sandbox's own IPv4 address, "" without a network.

    Others on the node, and the host itself, can't reach it there: it is what outside logs show before NAT.
    """

    kind: str
    generation: int = 1
    address: str = ""
    holes: list[str] = []


class BackendFingerprint(_Reply, kw_only=True):
    """What one backend can do here; `available` false carries the reason."""

    name: str
    available: bool
    reason: str = ""
    features: list[str] = []
    attributes: dict[str, str] = {}


class NodeCapacity(_Reply, kw_only=True):
    """Totals after overcommit, and what is promised to live sandboxes."""

    cpus_total: float = 0.0
    cpus_used: float = 0.0
    memory_mib_total: int = 0
    memory_mib_used: int = 0
    sandboxes: int = 0
    sandboxes_max: int = 0
    starting: int = 0
    starting_max: int = 0
    disk_mib_free: int = 0


class NodeInfo(_Reply, kw_only=True):
    """A node daemon's view of itself; rides on heartbeats and replies. `error`: why a gateway can't ask it."""

    node: str
    version: str = ""
    address: str = ""
    draining: bool = False
    boot_id: str = ""
    backends: list[BackendFingerprint] = []
    capacity: NodeCapacity = msgspec.field(default_factory=NodeCapacity)
    images: list[str] = []
    counts: dict[str, int] = {}
    seq: int = 0
    seen_at: float = 0.0
    stale: bool = False
    error: str = ""


class NodeList(_Reply, kw_only=True):
    """All nodes that the gateway knows. notes: what an operator should know of it, such as that Consul is away."""

    nodes: list[NodeInfo]
    notes: list[str] = []


class DrainRequest(_Wire, kw_only=True):
    """Take no new sandboxes; with a deadline, stop the rest after it."""

    on: bool = True
    deadline_s: TimeoutS | None = None


class ImageInfo(_Reply, kw_only=True):
    """One image of the store."""

    digest: str
    names: list[str] = []
    size_bytes: int = 0
    files: int = 0
    created_at: float = 0.0
    source: str = ""
    env: list[str] = []
    cwd: str = ""
    user: str = ""
    cmd: list[str] = []


class ImageList(_Reply, kw_only=True):
    """The images of the store."""

    images: list[ImageInfo]


class Ok(_Reply, kw_only=True):
    """Done."""

    ok: bool = True
