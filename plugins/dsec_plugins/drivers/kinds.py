"""The drivers as data: a name, a configuration, and how a Nomad task becomes a request to the node daemon."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from libdsec.wire_fncall import Checker, FnLimits, FnRequest
from libdsec.wire_tasks import CallTaskRequest, GrantRequest, HostMount, TaskRequest

from dsec_plugins.drivers.configs import FncallTask, PoolTask, SandboxTask
from dsec_plugins.drivers.schema import ConfigError
from dsec_plugins.drivers.task_files import read_file
from dsec_plugins.proto.driver_pb2 import NetworkIsolationSpec as Isolation

if TYPE_CHECKING:
    from collections.abc import Callable

    from libdsec.wire import Qos

_TASK_DIRS = (("alloc", "/alloc"), ("{task}/local", "/local"), ("{task}/secrets", "/secrets"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverKind:
    """One driver. path: its verbs on the node daemon; backend: whose fingerprint it shows ("": the node's).

    request: from Nomad's TaskConfig, the decoded config and the number of the machine's cores.
    """

    name: str
    config: type
    path: str
    request: Callable[[Any, Any, int], Any]
    backend: str = ""
    can_exec: bool = False
    has_logs: bool = False


def cores_of(resources: Any, node_cores: int) -> float:
    """Cores that Nomad granted: the reserved ones when the job names `cores`, else its share of the node's MHz."""
    linux = resources.linux_resources
    if linux.cpuset_cpus and resources.allocated_resources.cpu.cpu_shares:
        return float(_count_cpus(linux.cpuset_cpus))
    return max(0.01, round(float(linux.PercentTicks) * node_cores, 3))


def _count_cpus(cpus: str) -> int:
    total = 0
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total


def memory_mib_of(resources: Any) -> int:
    """The hard limit that Nomad set, in MiB."""
    limit = resources.linux_resources.memory_limit_bytes // (1024 * 1024)
    return max(16, int(limit or resources.allocated_resources.memory.memory_mb))


def sandbox_request(task: Any, config: SandboxTask, node_cores: int) -> TaskRequest:
    """A task that is one sandbox and its command."""
    if config.args and not config.command:
        raise ConfigError("config.args: there are arguments but no command")
    check_network(task)
    policy = {"profile": config.policy, "network": config.network, "protected_paths": list(config.protected_paths)}
    return TaskRequest(
        task_id=task.id,
        alloc_id=task.alloc_id,
        task_name=task.name,
        home=task.alloc_dir,
        backend="container",
        image=config.image,
        argv=[config.command, *config.args] if config.command else [],
        cwd=config.cwd,
        user=task.user,
        env=dict(task.env),
        cpus=config.cpus if config.cpus is not None else cores_of(task.resources, node_cores),
        memory_mib=memory_mib_of(task.resources),
        disk_mib=config.disk_mib,
        pids=config.pids,
        qos=cast("Qos", config.qos),  # the node daemon names the field when it is neither
        policy=policy,
        mounts=[*_task_dirs(task), *_volumes(task)],
        stdout_path=task.stdout_path,
        stderr_path=task.stderr_path,
    )


def check_network(task: Any) -> None:
    """ConfigError for a group network that a sandbox can't be in: it has a network of its own, and nothing comes in.

    Clients refuse the modes `bridge`, `none` and `cni/*` (to them all three are "group") by our capabilities already.
    """
    mode = task.network_isolation_spec.mode if task.HasField("network_isolation_spec") else Isolation.HOST
    if mode not in (Isolation.HOST, Isolation.NONE):
        raise ConfigError("network.mode: a sandbox can't join a group's network; leave the block out")
    ports = sorted(port.label for port in task.resources.ports)
    ports += sorted(
        port.label
        for net in task.resources.allocated_resources.networks
        for port in (*net.reserved_ports, *net.dynamic_ports)
        if port.label not in ports
    )
    if ports:
        raise ConfigError(f"network.port: nothing outside can reach into a sandbox, so port {ports[0]} is of no use")


def _task_dirs(task: Any) -> list[HostMount]:
    if not task.alloc_dir:
        return []
    found = []
    for source, target in _TASK_DIRS:
        path = os.path.join(task.alloc_dir, source.format(task=task.name))
        secrets = target == "/secrets"  # files of the host's root among them
        owners: Literal["task", "host"] = "host" if secrets else "task"
        found.append(HostMount(host_path=path, task_path=target, readonly=secrets, owners=owners))
    return found


def _volumes(task: Any) -> list[HostMount]:
    return [
        HostMount(host_path=mount.host_path, task_path=mount.task_path, readonly=mount.readonly)
        for mount in task.mounts
    ]


def grant_request(task: Any, config: PoolTask, node_cores: int) -> GrantRequest:
    """A task that lends its resources."""
    return GrantRequest(
        task_id=task.id,
        alloc_id=task.alloc_id,
        task_name=task.name,
        home=task.alloc_dir,
        cpus=config.cpus if config.cpus is not None else cores_of(task.resources, node_cores),
        memory_mib=config.memory_mib if config.memory_mib is not None else memory_mib_of(task.resources),
    )


def call_request(task: Any, config: FncallTask, _: int) -> CallTaskRequest:
    """A task that is one stateless call. Files are those of the task's own directory."""
    if config.code and config.code_file:
        raise ConfigError("config.code_file: there is code already; give one of them")
    directory = os.path.join(task.alloc_dir, task.name)
    code = config.code
    if config.code_file:
        code = read_file(directory, config.code_file, "config.code_file").decode("utf-8", "replace")
    if bool(code) != bool(config.language):
        raise ConfigError("config.language: code needs its language, and a language needs code")
    stdin = read_file(directory, config.stdin_file, "config.stdin_file") if config.stdin_file else b""
    expected = read_file(directory, config.expected_file, "config.expected_file") if config.expected_file else None
    call = FnRequest(
        image=config.image,
        code=code,
        language=config.language,
        argv=[] if code else list(config.args),
        args=list(config.args) if code else [],
        stdin=stdin,
        env=dict(task.env),
        limits=FnLimits(
            cpu_s=config.cpu_s,
            wall_s=config.wall_s,
            memory_mib=memory_mib_of(task.resources),
            output_bytes=config.output_bytes,
        ),
        expected=expected,
        checker=Checker(kind="tokens"),
    )
    return CallTaskRequest(
        task_id=task.id,
        alloc_id=task.alloc_id,
        task_name=task.name,
        home=task.alloc_dir,
        call=call,
        stdout_path=task.stdout_path,
        stderr_path=task.stderr_path,
    )


CONTAINER = DriverKind(
    name="dsec-container",
    config=SandboxTask,
    path="/v1/tasks",
    request=sandbox_request,
    backend="container",
    can_exec=True,
    has_logs=True,
)
FNCALL = DriverKind(
    name="dsec-fncall",
    config=FncallTask,
    path="/v1/calls",
    request=call_request,
    backend="fncall",
    has_logs=True,
)
POOL = DriverKind(name="dsec-pool", config=PoolTask, path="/v1/grants", request=grant_request)
KINDS = {kind.name: kind for kind in (CONTAINER, FNCALL, POOL)}
