"""Every RPC of the container driver through its installed entry file, against a real node daemon (cases P01-P40)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from dsec_plugins.proto import base_pb2, structs_pb2
from dsec_plugins.proto import driver_pb2 as pb
from google.rpc import status_pb2
from grpc import StatusCode, aio

from tests.contract.test_node_tasks import pid_of
from tests.kit.abilities import needs
from tests.kit.driverhost import check_dereferenced, driver_host, state_of
from tests.kit.node_daemon import NodeDaemon
from tests.kit.tasks import Collector

pytestmark = [needs("root", "overlay", "cc"), pytest.mark.timeout(120)]
SLEEP = ("sleep", "1000")
GONE = pb.RecoverTaskRequest(handle=pb.TaskHandle(config=pb.TaskConfig(id="never/was/here")))


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


async def refused(awaitable, code: StatusCode) -> str:
    """The text of an error of this code."""
    with pytest.raises(aio.AioRpcError) as caught:
        await awaitable
    assert caught.value.code() == code, caught.value
    return caught.value.details()


def recoverable(error: aio.AioRpcError) -> bool:
    """Whether Nomad's client would retry: the first detail is a RecoverableError that says so."""
    trailers = dict(error.trailing_metadata() or ())
    raw = trailers.get("grpc-status-details-bin")
    if raw is None:
        return False
    detail = status_pb2.Status.FromString(raw).details[0]
    assert detail.type_url == "type.googleapis.com/hashicorp.nomad.plugins.shared.structs.RecoverableError"
    return structs_pb2.RecoverableError.FromString(detail.value).recoverable


async def test_who_it_is_and_what_it_takes(host):
    info = await host.base.PluginInfo(base_pb2.PluginInfoRequest())
    assert (info.type, info.name, list(info.plugin_api_versions)) == (base_pb2.DRIVER, "dsec-container", ["v0.1.0"])
    check_dereferenced(await host.base.ConfigSchema(base_pb2.ConfigSchemaRequest()))
    schema = check_dereferenced(await host.driver.TaskConfigSchema(pb.TaskConfigSchemaRequest())).spec
    assert schema.object.attributes["image"].Attr.required
    abilities = (await host.driver.Capabilities(pb.CapabilitiesRequest())).capabilities
    assert abilities.fs_isolation == pb.DriverCapabilities.IMAGE
    assert (abilities.exec, abilities.send_signals, abilities.disable_log_collection) == (True, True, False)
    await host.driver.Init(pb.InitRequest())
    await host.driver.Shutdown(pb.ShutdownRequest())


async def test_a_wrong_plugin_block_is_refused_in_words(host):
    assert "absolute" in await refused(host.configure(node_socket="here"), StatusCode.INVALID_ARGUMENT)
    assert "colour" in await refused(host.configure(colour="red"), StatusCode.INVALID_ARGUMENT)


async def test_a_task_from_start_to_forgotten(host, tmp_path):
    logs = Collector(tmp_path / "c")
    task = host.task("sh", "-c", "echo out $GIVEN; echo err >&2; exit 3", logs=logs)
    handle = await host.start(task)
    assert (handle.version, handle.state, handle.config.id) == (1, pb.RUNNING, task.id)
    assert state_of(handle)["sandbox"].startswith("sb-")
    for _ in range(2):  # any number of times until it is destroyed
        answer = await host.wait(task.id)
        assert (answer.result.exit_code, answer.result.signal, answer.err) == (3, 0, "")
    assert (logs.read(), logs.read("stderr")) == (b"out 1\n", b"err\n")
    status = check_dereferenced(await host.driver.InspectTask(pb.InspectTaskRequest(task_id=task.id)))
    assert status.task.state == pb.EXITED
    await host.recover(handle)  # P08: ended is not lost
    await host.stop(task.id)  # P15
    await host.destroy(task.id)
    await host.destroy(task.id)
    await host.stop(task.id)
    for call in (
        host.driver.WaitTask(pb.WaitTaskRequest(task_id=task.id)),
        host.driver.InspectTask(pb.InspectTaskRequest(task_id=task.id)),
        host.driver.SignalTask(pb.SignalTaskRequest(task_id=task.id, signal="SIGHUP")),
        host.driver.ExecTask(pb.ExecTaskRequest(task_id=task.id, command=["true"])),
        host.driver.RecoverTask(GONE),  # P34: it starts nothing
    ):
        await refused(call, StatusCode.NOT_FOUND)
    logs.close()


async def test_the_same_start_again_is_the_same_task(host):
    task = host.task(*SLEEP)
    first, second = await asyncio.gather(host.start(task), host.start(task))
    assert state_of(first) == state_of(second)
    await host.destroy(task.id)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"image": None}, "image"),
        ({"command": None, "args": ["x"]}, "args"),
        ({"command": "/no/such"}, "/no/such"),
        ({"cpus": "fast"}, "cpus"),
        ({"qos": "best"}, "qos"),
        ({"policy": "wild"}, "wild"),
    ],
)
async def test_a_wrong_job_is_final_and_in_words(host, config, said):
    task = host.task(*SLEEP, **config)
    with pytest.raises(aio.AioRpcError) as caught:
        await host.start(task)
    assert said in caught.value.details()
    assert not recoverable(caught.value)


async def test_missing_things_that_may_come_are_retryable(host, tmp_path):
    logs = Collector(tmp_path / "c")
    task = host.task(*SLEEP, logs=logs)
    task.stdout_path += ".missing"  # P13
    with pytest.raises(aio.AioRpcError) as caught:
        await host.start(task)
    assert caught.value.code() == StatusCode.FAILED_PRECONDITION
    assert recoverable(caught.value)
    with pytest.raises(aio.AioRpcError) as caught:
        await host.start(host.task(*SLEEP, image="missing-image"))
    assert recoverable(caught.value)
    logs.close()


async def test_stop_with_and_without_a_timeout(host):
    for timeout_s, exit_code, number in ((10.0, 3, 0), (None, 137, 9), (0.0, 137, 9)):  # P35: unset is 0
        task = host.task("sh", "-c", "trap 'exit 3' INT; echo; while :; do sleep 0.05; done")
        await host.start(task)
        await asyncio.sleep(0.3)
        await host.stop(task.id, timeout_s, "SIGINT")
        result = (await host.wait(task.id)).result
        assert (result.exit_code, result.signal) == (exit_code, number)
        await host.destroy(task.id)
    assert "no signal" in await refused(host.stop("any/task/id", 1.0, "SIGNONSENSE"), StatusCode.INVALID_ARGUMENT)


async def test_a_hung_sandbox_is_stopped_in_time(host):
    """P14: its dsec-init answers nobody."""
    task = host.task("sleep", "1006")
    handle = await host.start(task)
    pid = pid_of("sleep 1006")
    assert pid is not None
    init = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(init, signal.SIGSTOP)
    began = time.monotonic()
    await host.stop(task.id, 1.0)
    assert time.monotonic() - began < 1 + 8
    assert (await host.wait(task.id)).result.signal == 9
    assert pid_of("sleep 1006") is None
    assert state_of(handle)
    await host.destroy(task.id)


async def test_exec_for_checks(host):
    task = host.task(*SLEEP)
    await host.start(task)
    request = pb.ExecTaskRequest(task_id=task.id, command=["sh", "-c", "echo o; echo e >&2; exit 4"])
    answer = check_dereferenced(await host.driver.ExecTask(request))
    assert (answer.stdout, answer.stderr, answer.result.exit_code) == (b"o\n", b"e\n", 4)
    request = pb.ExecTaskRequest(task_id=task.id, command=["sleep", "100"])
    request.timeout.FromMilliseconds(300)
    answer = check_dereferenced(await host.driver.ExecTask(request))
    assert answer.result.signal == 9
    await host.destroy(task.id)


async def test_exec_streams_the_exit_frame_last(host):
    task = host.task(*SLEEP)
    await host.start(task)
    out, err, result, order = await host.exec_stream(task.id, ["sh", "-c", "echo o; echo e >&2; exit 43"])
    assert (out, err, result.exit_code) == (b"o\n", b"e\n", 43)
    assert order[-3:] == ["close", "close", "exited"]
    data = os.urandom(300_000)
    out, _, result, _ = await host.exec_stream(task.id, ["cat"], stdin=data)
    assert (out, result.exit_code) == (data, 0)
    size = 20_000_000  # P20, P22: a reader slower than the program gets every byte
    out, _, result, order = await host.exec_stream(task.id, ["head", "-c", str(size), "/dev/zero"])
    assert (len(out), result.exit_code, order[-1]) == (size, 0, "exited")
    out, err, result, order = await host.exec_stream(task.id, ["sh", "-c", "test -t 1 && echo tty"], tty=True)
    assert (out, err, result.exit_code) == (b"tty\r\n", b"", 0)
    await refused(host.exec_stream(task.id, ["/no/such"]), StatusCode.INVALID_ARGUMENT)
    await host.destroy(task.id)


async def test_a_user_who_leaves_takes_the_command_along(host):
    """P21."""
    task = host.task(*SLEEP)
    await host.start(task)
    call = host.driver.ExecTaskStreaming()
    setup = pb.ExecTaskStreamingRequest.Setup(task_id=task.id, command=["sleep", "1007"])
    await call.write(pb.ExecTaskStreamingRequest(setup=setup))
    async with asyncio.timeout(10):
        while pid_of("sleep 1007") is None:
            await asyncio.sleep(0.05)
        call.cancel()
        while pid_of("sleep 1007") is not None:
            await asyncio.sleep(0.05)
    await host.destroy(task.id)


async def test_recovery_needs_the_handle_alone(host):
    """P09: no task_id, no driver config; a handle of a newer plugin is refused in words."""
    task = host.task("sleep", "1008")
    handle = await host.start(task)
    pid = pid_of("sleep 1008")
    for _ in range(3):
        await host.recover(handle)
    assert pid_of("sleep 1008") == pid
    newer = pb.TaskHandle()
    newer.CopyFrom(handle)
    newer.driver_state = b'{"schema": 99}'
    assert "newer" in await refused(host.recover(newer), StatusCode.INVALID_ARGUMENT)
    newer.driver_state = b"\xff\x00 not json"
    await refused(host.recover(newer), StatusCode.FAILED_PRECONDITION)
    await host.destroy(task.id)


async def test_stats_and_events_stream(host):
    events = host.driver.TaskEvents(pb.TaskEventsRequest())
    await asyncio.sleep(0.3)
    task = host.task(*SLEEP)
    await host.start(task)
    event = check_dereferenced(await asyncio.wait_for(events.read(), 10))
    assert (event.task_id, event.alloc_id, event.task_name) == (task.id, task.alloc_id, "t")
    request = pb.TaskStatsRequest(task_id=task.id)
    request.collection_interval.FromMilliseconds(200)
    stats = host.driver.TaskStats(request)
    for _ in range(3):
        check_dereferenced(await asyncio.wait_for(stats.read(), 10))
    stats.cancel()
    events.cancel()
    await host.destroy(task.id)


@pytest.mark.leaks_ok  # the module's daemon is another process afterwards
async def test_the_fingerprint_speaks_once_a_change(host, daemon):
    """P17, P18: one message at once, one when the daemon goes, one when it is back; the stream never ends."""
    stream = host.driver.Fingerprint(pb.FingerprintRequest())
    first = await asyncio.wait_for(stream.read(), 10)
    assert first.health == pb.FingerprintResponse.HEALTHY, first
    assert first.attributes["driver.dsec-container.launcher"].string_val == "fake"
    daemon.kill9()
    try:
        away = await asyncio.wait_for(stream.read(), 20)
    finally:
        daemon.start()
    assert away.health == pb.FingerprintResponse.UNHEALTHY
    assert "node daemon" in away.health_description
    assert away.attributes["driver.dsec-container.launcher"].string_val == ""  # so that the client drops it
    back = await asyncio.wait_for(stream.read(), 20)
    assert back.health == pb.FingerprintResponse.HEALTHY
    stream.cancel()


async def test_many_waits_and_stats_leave_room_for_a_stop(host):
    """P29: streams that stay open are no threads."""
    tasks = [host.task("sleep", "1009") for _ in range(3)]
    for task in tasks:
        await host.start(task)
    calls = [host.driver.WaitTask(pb.WaitTaskRequest(task_id=tasks[n % 2].id)) for n in range(500)]
    request = pb.TaskStatsRequest(task_id=tasks[0].id)
    request.collection_interval.FromSeconds(5)
    streams = [host.driver.TaskStats(request) for _ in range(500)]
    waits = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(1)
    async with asyncio.timeout(20):
        await host.stop(tasks[2].id, 0)
        for task in tasks[:2]:
            await host.stop(task.id, 0)
        for answer in await asyncio.gather(*waits):
            assert answer.result.signal == 9
    for stream in streams:
        stream.cancel()
    for task in tasks:
        await host.destroy(task.id)


async def test_descriptors_stay_level(host, tmp_path):
    """P12, P20: restarts and execs leave none behind, in the plugin and in the daemon."""
    pids = (host.plugin.process.pid, host.daemon.process.pid)

    async def once():
        logs = Collector(tmp_path / "c")
        task = host.task("sh", "-c", "echo x", logs=logs)
        await host.start(task)
        await host.wait(task.id)
        await host.destroy(task.id)
        logs.close()

    def count():
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]

    await once()
    before = count()
    for _ in range(12):
        await once()
    assert all(now <= then + 2 for now, then in zip(count(), before)), (count(), before)
