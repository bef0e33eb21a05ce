"""Between Nomad's wire and ours: resources to limits, ends to results, files of a task's directory."""

from __future__ import annotations

import pytest
from dsec_plugins.drivers import convert
from dsec_plugins.drivers.configs import FncallTask, SandboxTask
from dsec_plugins.drivers.kinds import call_request, check_network, cores_of, memory_mib_of, sandbox_request
from dsec_plugins.drivers.schema import ConfigError
from dsec_plugins.drivers.statuses import is_retryable
from dsec_plugins.drivers.task_files import read_file
from dsec_plugins.proto import driver_pb2 as pb
from libdsec.errors import CapacityError, DeadlineExceeded, NotFoundError, PlatformError, UsageError
from libdsec.wire import Metrics
from libdsec.wire_tasks import TaskInfo

from tests.kit.driverhost import check_dereferenced


def resources(**linux):
    return pb.Resources(
        allocated_resources=pb.AllocatedTaskResources(
            cpu=pb.AllocatedCpuResources(cpu_shares=500), memory=pb.AllocatedMemoryResources(memory_mb=300)
        ),
        linux_resources=pb.LinuxResources(**linux),
    )


@pytest.mark.parametrize(
    ("linux", "cores"),
    [
        ({"PercentTicks": 0.25}, 1.0),
        ({"PercentTicks": 0.0}, 0.01),
        ({"cpuset_cpus": "0"}, 1.0),
        ({"cpuset_cpus": "0-2,5"}, 4.0),
    ],
)
def test_cores(linux, cores):
    assert cores_of(resources(**linux), 4) == cores


def test_memory_is_the_hard_limit():
    assert memory_mib_of(resources(memory_limit_bytes=512 << 20)) == 512
    assert memory_mib_of(resources()) == 300


@pytest.mark.parametrize(
    ("info", "code", "signal"),
    [
        (TaskInfo(key="k", task_id="t", exit_code=3), 3, 0),
        (TaskInfo(key="k", task_id="t", signal=9, oom_killed=True), 137, 9),
        (TaskInfo(key="k", task_id="t", error="lost"), 0, 0),
    ],
)
def test_ends(info, code, signal):
    result = convert.exit_result(info)
    assert (result.exit_code, result.signal, result.oom_killed) == (code, signal, info.oom_killed)
    check_dereferenced(pb.InspectTaskResponse(task=convert.task_status(info), driver=pb.TaskDriverStatus()))


def test_stats_before_and_after():
    first = Metrics(cpu_s=1.0, at=10.0, memory_mib=2.0)
    check_dereferenced(pb.TaskStatsResponse(stats=convert.task_stats("t", first, None)))
    second = convert.task_stats("t", Metrics(cpu_s=1.5, at=11.0, memory_mib=2.0), first)
    assert second.agg_resource_usage.cpu.percent == pytest.approx(50)
    assert second.agg_resource_usage.memory.rss == 2 << 20


@pytest.mark.parametrize(("name", "number"), [("SIGTERM", 15), ("term", 15), ("HUP", 1), ("", 15)])
def test_signals(name, number):
    assert convert.signal_number(name, 15) == number


def test_what_is_worth_another_try():
    assert is_retryable(CapacityError("capacity", "full"))
    assert is_retryable(DeadlineExceeded("start_timeout", "slow"))
    assert is_retryable(PlatformError("x", "y", retry_after_s=1.0))
    for final in (UsageError("x", "y"), NotFoundError("x", "y"), PlatformError("x", "y"), ConfigError("x")):
        assert not is_retryable(final)


def task(tmp_path, **more):
    (tmp_path / "t/local").mkdir(parents=True, exist_ok=True)
    return pb.TaskConfig(id="a/t/1", name="t", alloc_id="a", alloc_dir=str(tmp_path), resources=resources(), **more)


def test_task_directories_are_shown_and_secrets_read_only(tmp_path):
    wanted = sandbox_request(task(tmp_path, user="agent"), SandboxTask(image="i"), 4)
    shown = {mount.task_path: mount.readonly for mount in wanted.mounts}
    assert shown == {"/alloc": False, "/local": False, "/secrets": True}
    assert (wanted.home, wanted.user, wanted.memory_mib) == (str(tmp_path), "agent", 300)


def test_files_stay_in_the_tasks_directory(tmp_path):
    task(tmp_path)
    directory = str(tmp_path / "t")
    (tmp_path / "t/local/in").write_bytes(b"x")
    (tmp_path / "t/local/out").symlink_to("/etc/passwd")
    (tmp_path / "t/local/dir").mkdir()
    assert read_file(directory, "local/in", "w") == b"x"
    for name in ("local/out", "../../etc/passwd", "/etc/passwd", "local/none", "local/dir"):
        with pytest.raises(ConfigError, match="w: "):
            read_file(directory, name, "w")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"code": "x"}, "language"),
        ({"language": "python"}, "language"),
        ({"code": "x", "code_file": "y", "language": "python"}, "code_file"),
    ],
)
def test_wrong_calls(tmp_path, config, said):
    with pytest.raises(ConfigError, match=said):
        call_request(task(tmp_path), FncallTask(image="i", **config), 4)


@pytest.mark.parametrize(
    ("mode", "port", "said"),
    [
        (None, "", ""),
        (pb.NetworkIsolationSpec.HOST, "", ""),
        (pb.NetworkIsolationSpec.NONE, "", ""),
        (pb.NetworkIsolationSpec.GROUP, "", "can't join a group's network"),
        (pb.NetworkIsolationSpec.TASK, "", "can't join a group's network"),
        (None, "http", "port http is of no use"),
    ],
)
def test_networks_of_a_group(mode, port, said):
    task = pb.TaskConfig()
    if mode is not None:
        task.network_isolation_spec.mode = mode
    if port:
        task.resources.ports.add(label=port, value=20000)
    if not said:
        check_network(task)
        return
    with pytest.raises(ConfigError, match=said):
        check_network(task)
