"""What users write into `plugin "..." { config {} }` and into a task's `config {}`."""

from __future__ import annotations

from dataclasses import dataclass

from dsec_plugins.drivers.schema import setting

DEFAULT_SOCKET = "/var/lib/dsec/node/node.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """One for all drivers: they are shims before the node daemon."""

    node_socket: str = setting("Unix socket of the node daemon on this machine", DEFAULT_SOCKET)
    enabled: bool = setting("false hides the driver on this client", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxTask:
    """A task that is one sandbox and its command. CPU, memory, env and user come from the job."""

    image: str = setting("image name or digest in the node's store", required=True)
    command: str = setting("program to run; default: the image's own command", "")
    args: list[str] = setting("its arguments", [])
    cwd: str = setting("working directory inside; default: the image's", "")
    qos: str = setting("latency_sensitive or best_effort", "latency_sensitive")
    policy: str = setting("policy profile: default or debug", "default")
    network: str = setting("none, or open (outbound by NAT; host and special addresses refused)", "none")
    protected_paths: list[str] = setting("absolute paths inside that nobody may change", [])
    disk_mib: int = setting("writable layer in MiB", 1024)
    pids: int = setting("processes at once", 512)
    cpus: float | None = setting("hard CPU limit in cores; default: from the job's cpu or cores", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FncallTask:
    """A stateless call: the code or argv of the job, stdin from the dispatch payload, verdict in the logs."""

    image: str = setting("image name or digest in the node's store", required=True)
    language: str = setting("language of the code (see `dsec fncall languages`); empty runs args as argv", "")
    code: str = setting("source text; or code_file", "")
    code_file: str = setting("file with the source, relative to the task directory (local/...)", "")
    args: list[str] = setting("arguments, or the whole argv when there is no code", [])
    stdin_file: str = setting("file given as stdin, relative to the task directory, such as the dispatch payload's", "")
    cpu_s: float = setting("CPU seconds", 10.0)
    wall_s: float = setting("wall seconds", 20.0)
    output_bytes: int = setting("bytes of stdout and of stderr kept", 1_048_576)
    expected_file: str = setting("expected output, relative to the task directory; compared by tokens", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTask:
    """A running task lends its cpu and memory to the node daemon."""

    cpus: float | None = setting("cores to lend; default: from the job's cpu or cores", None)
    memory_mib: int | None = setting("memory to lend; default: the job's memory", None)
