"""The installed entry files under a host built on the released go-plugin library: what HashiCorp's own code expects."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path

import msgpack
import pytest
from dsec_plugins import install
from dsec_plugins.proto import base_pb2, structs_pb2
from dsec_plugins.proto import driver_pb2 as pb
from google.rpc import status_pb2

from tests.contract.test_node_tasks import pid_of
from tests.kit.abilities import needs
from tests.kit.driverhost import DriverHost, check_dereferenced
from tests.kit.node_daemon import NodeDaemon

pytestmark = [needs("root", "overlay", "cc", "go"), pytest.mark.timeout(300)]
SOURCE = Path(__file__).parents[2] / "kit/gohost"
BASE = "/hashicorp.nomad.plugins.base.proto.BasePlugin/"
DRIVER = "/hashicorp.nomad.plugins.drivers.proto.Driver/"
UNIMPLEMENTED, DEADLINE = 12, 4


@pytest.fixture(scope="module")
def binary(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("go") / "gohost"
    subprocess.run(["go", "build", "-o", str(path), "."], cwd=SOURCE, check=True, timeout=280)
    return path


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = NodeDaemon(tmp_path_factory.mktemp("n"))
    made.start()
    yield made
    made.remove()


class GoHost:
    """One run of the program: requests in, replies out."""

    def __init__(self, binary: Path, entry: Path, log: Path) -> None:
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [str(binary), str(entry)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )

    def ask(self, method: str, *messages, kind=None, responses: int = 1, timeout_s: float = 30.0):
        """(messages of `kind`, reply)."""
        body = {
            "method": method,
            "requests": [base64.b64encode(m.SerializeToString()).decode() for m in messages],
            "responses": responses,
            "timeout_s": timeout_s,
        }
        self.process.stdin.write(json.dumps(body).encode() + b"\n")
        self.process.stdin.flush()
        reply = json.loads(self.process.stdout.readline())
        found = [kind.FromString(base64.b64decode(raw or "")) for raw in reply["responses"] or ()] if kind else []
        return [check_dereferenced(message) for message in found], reply

    def close(self) -> int:
        self.process.stdin.close()
        try:
            return self.process.wait(20)
        finally:
            self.process.stdout.close()
            self._log.close()


@pytest.fixture
def host(binary, daemon, tmp_path):
    (entry,) = install.install(tmp_path / "plugins", names=("dsec-container",))
    made = GoHost(binary, entry, tmp_path / "log")
    config = msgpack.packb({"node_socket": str(daemon.data / "node.sock")})
    made.ask(f"{BASE}SetConfig", base_pb2.SetConfigRequest(msgpack_config=config), kind=base_pb2.SetConfigResponse)
    yield made
    assert made.close() == 0, (tmp_path / "log").read_text()[-2000:]


def task_of(daemon, tmp_path, *argv, **config):
    return DriverHost.task(_Shape(daemon, tmp_path), *argv, **config)


class _Shape:
    def __init__(self, daemon, directory) -> None:
        self.daemon, self.directory = daemon, directory


@pytest.mark.parametrize("name", install.NAMES)
def test_every_entry_file_shakes_hands_and_ends(binary, tmp_path, name):
    (entry,) = install.install(tmp_path / "plugins", names=(name,))
    host = GoHost(binary, entry, tmp_path / "log")
    assert host.ask("ping")[1]["code"] == 0
    ((info,), _) = host.ask(f"{BASE}PluginInfo", base_pb2.PluginInfoRequest(), kind=base_pb2.PluginInfoResponse)
    assert (info.name, info.type) == (name, base_pb2.DRIVER)
    ((schema,), _) = host.ask(
        f"{DRIVER}TaskConfigSchema", pb.TaskConfigSchemaRequest(), kind=pb.TaskConfigSchemaResponse
    )
    assert schema.spec.object.attributes
    _, killed = host.ask("kill")
    assert killed["code"] == 0
    assert killed["took_s"] < 2  # later the host sends SIGKILL
    assert host.close() == 0
    log = (tmp_path / "log").read_text()
    assert "plugin process exited" in log
    assert "Unimplemented" not in log
    assert '"@level":"error"' not in log


def test_a_task_through_go(host, daemon, tmp_path):
    task = task_of(daemon, tmp_path, "sh", "-c", "exit 12")
    ((started,), _) = host.ask(f"{DRIVER}StartTask", pb.StartTaskRequest(task=task), kind=pb.StartTaskResponse)
    assert started.handle.config.id == task.id
    ((waited,), _) = host.ask(f"{DRIVER}WaitTask", pb.WaitTaskRequest(task_id=task.id), kind=pb.WaitTaskResponse)
    assert waited.result.exit_code == 12
    recover = pb.RecoverTaskRequest(handle=started.handle)
    assert host.ask(f"{DRIVER}RecoverTask", recover, kind=pb.RecoverTaskResponse)[1]["code"] == 0
    destroy = pb.DestroyTaskRequest(task_id=task.id, force=True)
    assert host.ask(f"{DRIVER}DestroyTask", destroy, kind=pb.DestroyTaskResponse)[1]["code"] == 0


def test_exec_and_streams_through_go(host, daemon, tmp_path):
    task = task_of(daemon, tmp_path, "sleep", "1012")
    host.ask(f"{DRIVER}StartTask", pb.StartTaskRequest(task=task), kind=pb.StartTaskResponse)
    setup = pb.ExecTaskStreamingRequest.Setup(task_id=task.id, command=["sh", "-c", "cat; exit 5"])
    frames, reply = host.ask(
        f"{DRIVER}ExecTaskStreaming",
        pb.ExecTaskStreamingRequest(setup=setup),
        pb.ExecTaskStreamingRequest(stdin=pb.ExecTaskStreamingIOOperation(data=b"given")),
        pb.ExecTaskStreamingRequest(stdin=pb.ExecTaskStreamingIOOperation(close=True)),
        kind=pb.ExecTaskStreamingResponse,
        responses=0,
    )
    assert reply["code"] == 0, reply
    assert b"".join(frame.stdout.data for frame in frames) == b"given"
    assert frames[-1].exited
    assert frames[-1].result.exit_code == 5
    request = pb.TaskStatsRequest(task_id=task.id)
    stats, reply = host.ask(f"{DRIVER}TaskStats", request, kind=pb.TaskStatsResponse, responses=2)
    assert len(stats) == 2
    (first, *more), reply = host.ask(
        f"{DRIVER}Fingerprint", pb.FingerprintRequest(), kind=pb.FingerprintResponse, responses=2, timeout_s=3
    )
    assert first.health == pb.FingerprintResponse.HEALTHY
    assert (more, reply["code"]) == ([], DEADLINE)  # silent while nothing changes, and never ended
    stop = pb.StopTaskRequest(task_id=task.id)
    assert host.ask(f"{DRIVER}StopTask", stop, kind=pb.StopTaskResponse)[1]["code"] == 0
    assert pid_of("sleep 1012") is None
    host.ask(f"{DRIVER}DestroyTask", pb.DestroyTaskRequest(task_id=task.id, force=True), kind=pb.DestroyTaskResponse)


def test_go_reads_our_recoverable_error(host, daemon, tmp_path):
    task = task_of(daemon, tmp_path, "true", image="missing")
    _, reply = host.ask(f"{DRIVER}StartTask", pb.StartTaskRequest(task=task), kind=pb.StartTaskResponse)
    status = status_pb2.Status.FromString(base64.b64decode(reply["status"]))
    assert "missing" in status.message
    assert structs_pb2.RecoverableError.FromString(status.details[0].value).recoverable


def test_a_killed_plugin_is_noticed_and_harms_no_task(binary, daemon, tmp_path):
    (entry,) = install.install(tmp_path / "plugins", names=("dsec-container",))
    host = GoHost(binary, entry, tmp_path / "log")
    config = msgpack.packb({"node_socket": str(daemon.data / "node.sock")})
    host.ask(f"{BASE}SetConfig", base_pb2.SetConfigRequest(msgpack_config=config))
    task = task_of(daemon, tmp_path, "sleep", "1013")
    host.ask(f"{DRIVER}StartTask", pb.StartTaskRequest(task=task))
    children = Path(f"/proc/{host.process.pid}/task/{host.process.pid}/children").read_text().split()
    threads = Path(f"/proc/{host.process.pid}/task").glob("*/children")
    pids = {int(pid) for path in threads for pid in path.read_text().split()} | {int(pid) for pid in children}
    for pid in pids:
        os.kill(pid, 9)
    _, reply = host.ask(f"{DRIVER}WaitTask", pb.WaitTaskRequest(task_id=task.id), kind=pb.WaitTaskResponse)
    assert reply["code"] == 14  # UNAVAILABLE
    host.close()
    assert "signal: killed" in (tmp_path / "log").read_text()
    assert pid_of("sleep 1013") is not None
    again = GoHost(binary, entry, tmp_path / "log2")
    again.ask(f"{BASE}SetConfig", base_pb2.SetConfigRequest(msgpack_config=config))
    again.ask(f"{DRIVER}DestroyTask", pb.DestroyTaskRequest(task_id=task.id, force=True))
    again.close()
    assert pid_of("sleep 1013") is None
