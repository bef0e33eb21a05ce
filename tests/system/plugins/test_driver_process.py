"""The driver as a process: handshake, restarts of plugin and node daemon, instances beside each other, its size."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from dsec_plugins.proto import base_pb2, structs_pb2
from dsec_plugins.proto import driver_pb2 as pb
from google.protobuf import empty_pb2
from google.rpc import status_pb2
from grpc import aio

from tests.contract.test_node_tasks import pid_of
from tests.kit.abilities import needs
from tests.kit.driverhost import driver_host
from tests.kit.node_daemon import NodeDaemon
from tests.kit.tasks import Collector

pytestmark = [needs("root", "overlay", "cc"), pytest.mark.timeout(120)]
SLEEP = ("sleep", "1000")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = NodeDaemon(tmp_path_factory.mktemp("n"))
    made.start()
    yield made
    made.remove()


@pytest.fixture
async def host(daemon, tmp_path):
    async with driver_host(daemon, tmp_path) as made:
        yield made


def recoverable(error: aio.AioRpcError) -> bool:
    """Whether Nomad's client would retry: the first detail is a RecoverableError that says so."""
    trailers = dict(error.trailing_metadata() or ())
    raw = trailers.get("grpc-status-details-bin")
    if raw is None:
        return False
    detail = status_pb2.Status.FromString(raw).details[0]
    assert detail.type_url == "type.googleapis.com/hashicorp.nomad.plugins.shared.structs.RecoverableError"
    return structs_pb2.RecoverableError.FromString(detail.value).recoverable


@pytest.mark.leaks_ok  # the same
async def test_waits_outlive_the_node_daemon(daemon, tmp_path):
    async with driver_host(daemon, tmp_path) as host:
        task = host.task("sh", "-c", "while [ ! -e /tmp/go ]; do sleep 0.05; done; exit 9")
        await host.start(task)
        waiting = asyncio.create_task(host.wait(task.id))
        await asyncio.sleep(0.3)
        daemon.kill9()
        await asyncio.sleep(0.5)
        daemon.start()
        _, _, result, _ = await host.exec_stream(task.id, ["sh", "-c", ": > /tmp/go"])
        assert result.exit_code == 0
        assert (await waiting).result.exit_code == 9
        await host.destroy(task.id)


async def test_newer_and_older_agents_are_understood(host):
    """P36: fields of 2.0 that 1.6 has not got, and one that nobody has."""
    task = host.task(*SLEEP)
    task.parent_job_id = "p"
    task.mounts.add(task_path="/x", host_path="/nowhere", selinux_label="z", request_name="r")
    del task.mounts[:]
    raw = pb.StartTaskRequest(task=task).SerializeToString() + b"\xfa\x07\x03abc"  # field 127
    request = pb.StartTaskRequest.FromString(raw)
    await host.driver.StartTask(request)
    await host.destroy(task.id)


async def test_a_plugin_that_is_killed_takes_nothing_along(daemon, tmp_path):
    """P05, P07: the host sees its death at once, the program lives, another plugin finds it."""
    async with driver_host(daemon, tmp_path) as host:
        task = host.task("sleep", "1010")
        handle = await host.start(task)
        pid = pid_of("sleep 1010")
        links = {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
        theirs = {os.readlink(f"/proc/{host.plugin.process.pid}/fd/{n}") for n in ("1", "2")} - {"/dev/null"}
        assert not links & theirs
        host.plugin.process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(2):
            await host.plugin.process.wait()
    async with driver_host(daemon, tmp_path) as host:
        await host.recover(handle)
        assert pid_of("sleep 1010") == pid
        await host.destroy(task.id)


async def test_a_second_instance_disturbs_nothing(host, daemon, tmp_path):
    """P03, P31: the loader's extra instances leave no file behind and touch no task."""
    task = host.task("sleep", "1011")
    await host.start(task)
    sockets = Path("/tmp")
    before = sorted(sockets.glob("dsec-plugin-*"))
    for number in range(2):
        async with driver_host(daemon, tmp_path / str(number)) as other:
            await other.base.PluginInfo(base_pb2.PluginInfoRequest())
    assert sorted(sockets.glob("dsec-plugin-*")) == before
    assert pid_of("sleep 1011") is not None
    await host.destroy(task.id)


async def test_the_stdio_service_is_there_and_silent(host):
    """P24."""
    from dsec_plugins.goplugin import wire_pb2_grpc

    stream = wire_pb2_grpc.GRPCStdioStub(host.plugin.channel).StreamStdio(empty_pb2.Empty())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.read(), 0.3)
    stream.cancel()


async def test_the_handshake_is_clean_in_a_hostile_environment(daemon, tmp_path):
    """P27: warnings, no HOME, another locale; tokens of the agent reach no task (P32)."""
    env = {"PYTHONWARNINGS": "always", "LANG": "C", "CONSUL_HTTP_TOKEN": "secret", "PYTHONSTARTUP": "/nowhere"}
    async with driver_host(daemon, tmp_path, env=env) as host:
        logs = Collector(tmp_path / "c")
        task = host.task("env", logs=logs)
        await host.start(task)
        await host.wait(task.id)
        assert b"secret" not in logs.read()
        await host.destroy(task.id)
        logs.close()
    assert host.plugin.stdout_after == b""


async def test_a_node_daemon_that_is_away_makes_a_start_retryable(tmp_path, daemon):
    async with driver_host(daemon, tmp_path) as host:
        await host.configure(node_socket=str(tmp_path / "none.sock"))
        with pytest.raises(aio.AioRpcError) as caught:
            await host.start(host.task(*SLEEP))
        assert recoverable(caught.value)
        assert "none.sock" in caught.value.details()


async def test_a_start_that_was_given_up_while_the_node_daemon_hung_is_never_made(daemon, tmp_path):
    """A daemon under SIGSTOP goes on after the asker has left: it starts nothing, and the next start is a first one."""
    async with driver_host(daemon, tmp_path) as host:
        task, other = host.task("sleep", "1016"), host.task("sleep", "1017")
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            starting = asyncio.create_task(host.start(task))
            waiting = asyncio.create_task(host.start(other))
            await asyncio.sleep(0.5)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await asyncio.sleep(0.5)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        await waiting  # who stayed gets what was asked for
        assert pid_of("sleep 1017") is not None
        assert pid_of("sleep 1016") is None
        await host.destroy(other.id)
        await host.start(task)
        assert pid_of("sleep 1016") is not None
        await host.destroy(task.id)


async def test_a_plugin_that_ends_in_the_middle_of_a_start_leaves_one_task_at_most(daemon, tmp_path):
    """P39: the start is carried through; the next invocation of the same task takes its place."""
    async with driver_host(daemon, tmp_path) as host:
        task = host.task("sleep", "1014")
        task.env["DSEC_FAKE_DELAY_S"] = "1"
        starting = asyncio.create_task(host.start(task))
        await asyncio.sleep(0.4)
        host.plugin.process.send_signal(signal.SIGKILL)
        with pytest.raises(aio.AioRpcError):
            await starting
    async with driver_host(daemon, tmp_path) as host:
        del task.env["DSEC_FAKE_DELAY_S"]
        first = task.id
        task.id = first.replace("0badcafe", "0badbeef")
        await host.start(task)
        found = [p for p in Path("/proc").glob("[0-9]*/cmdline") if _reads(p) == b"sleep\x001014\x00"]
        assert len(found) == 1
        await host.destroy(task.id)
        await host.destroy(first)
        assert pid_of("sleep 1014") is None


def _reads(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def test_an_idle_plugin_is_small(host):
    status = Path(f"/proc/{host.plugin.process.pid}/status").read_text()
    rss_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    assert rss_kib < 90 * 1024, rss_kib
