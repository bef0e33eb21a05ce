"""Cases P01-P40 that the other files of this room do not hold; CASES.md says where each one is."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack
import pytest
from dsec_plugins import install
from dsec_plugins.proto import base_pb2, base_pb2_grpc, driver_pb2_grpc
from dsec_plugins.proto import driver_pb2 as pb

from nomad_dsec.dev.processes import record_of
from tests.contract.test_node_tasks import pid_of
from tests.kit.abilities import needs
from tests.kit.driverhost import check_dereferenced, driver_host
from tests.kit.node_daemon import CONTAINER_NEEDS, NodeDaemon
from tests.kit.pluginhost import NOMAD_COOKIE, launched

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = [needs("root", "overlay", "cc"), pytest.mark.timeout(120)]
HEALTH = pb.FingerprintResponse


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    made = NodeDaemon(tmp_path_factory.mktemp("n"))
    made.start()
    yield made
    made.remove()


async def test_no_end_leaves_an_address_that_a_record_could_lead_to(tmp_path):
    """P01, P02: an agent dials what its record says, and kills that pid when nobody answers."""
    (entry,) = install.install(tmp_path / "plugins", names=("dsec-container",))
    env = NOMAD_COOKIE | {"TMPDIR": str(tmp_path)}
    for how in ("shutdown", signal.SIGTERM, signal.SIGKILL):
        async with launched([str(entry)], env=env) as plugin:
            socket = Path(plugin.fields[3])
            assert socket.is_socket()
            if isinstance(how, signal.Signals):
                plugin.process.send_signal(how)
                await asyncio.wait_for(plugin.process.wait(), 10)
        assert socket.exists() == (how is signal.SIGKILL)
    async with launched([str(entry)], env=env):  # the next one clears up after the one that could not
        assert not socket.exists()
    assert list(tmp_path.glob("dsec-plugin-*")) == []


async def test_starts_and_stops_leave_no_process_and_no_directory(tmp_path):
    """P04."""
    (entry,) = install.install(tmp_path / "plugins", names=("dsec-container",))
    pids = []
    for _ in range(8):
        async with launched([str(entry)], env=NOMAD_COOKIE | {"TMPDIR": str(tmp_path)}) as plugin:
            pids.append(plugin.process.pid)
    assert [pid for pid in pids if record_of(pid) is not None] == []
    assert list(tmp_path.glob("dsec-plugin-*")) == []


async def test_stats_go_on_after_a_plugin_was_killed(daemon, tmp_path):
    """P10."""
    async with driver_host(daemon, tmp_path) as first:
        task = first.task("sleep", "1011")
        handle = await first.start(task)
        first.plugin.process.kill()
        await first.plugin.process.wait()
    async with driver_host(daemon, tmp_path) as second:
        await second.recover(handle)
        request = pb.TaskStatsRequest(task_id=task.id)
        request.collection_interval.FromMilliseconds(50)
        stream = second.driver.TaskStats(request)
        async with asyncio.timeout(20):
            seen = [check_dereferenced(await stream.read()) for _ in range(2)]
        assert seen[1].stats.timestamp.ToNanoseconds() > seen[0].stats.timestamp.ToNanoseconds()
        stream.cancel()
        await second.destroy(task.id)


@asynccontextmanager
async def odd_daemon(path: Path, answers: list[bytes]) -> AsyncIterator[list[bytes]]:
    """A socket on which each request gets the first of `answers`; the last one stays."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0) if len(answers) > 1 else answers[0])
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(serve, path)
    async with server:
        yield answers


def answer(status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0\1\2 not http\r\n\r\n",
        b"",
        answer("200 OK", b"not json"),
        answer("200 OK", b'{"node": 7, "backends": "none"}'),
        answer("500 Internal Server Error", b"<html>oops</html>"),
        answer("404 Not Found", b'{"error": {"kind": "strange", "code": "x", "message": "y"}}'),
    ],
)
async def test_garbage_from_the_daemon_makes_a_driver_unhealthy_and_no_more(tmp_path, garbage):
    """P19."""
    (entry,) = install.install(tmp_path / "plugins", names=("dsec-container",))
    async with odd_daemon(tmp_path / "node.sock", [garbage]), launched([str(entry)]) as plugin:
        config = msgpack.packb({"node_socket": str(tmp_path / "node.sock")})
        await base_pb2_grpc.BasePluginStub(plugin.channel).SetConfig(
            base_pb2.SetConfigRequest(msgpack_config=config, plugin_api_version="v0.1.0"), timeout=20
        )
        driver = driver_pb2_grpc.DriverStub(plugin.channel)
        stream = driver.Fingerprint(pb.FingerprintRequest())
        async with asyncio.timeout(20):
            first = await stream.read()
        assert first.health == HEALTH.UNHEALTHY
        assert first.health_description
        assert (await driver.Capabilities(pb.CapabilitiesRequest(), timeout=20)).capabilities.exec
        stream.cancel()


@contextmanager
def hogs(count: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
        for one in running:
            one.wait()


async def test_a_busy_machine_delays_the_handshake_and_does_not_break_it(tmp_path):
    """P28: the bench `plugin` has the times; a host waits 60 s."""
    (entry,) = install.install(tmp_path / "plugins", names=("dsec-container",))
    with hogs(8):
        async with launched([str(entry)], timeout_s=60) as plugin:
            assert plugin.fields[:3] == ["1", "2", "unix"]
    assert plugin.junk == []


@needs(*CONTAINER_NEEDS)
async def test_a_task_is_no_safer_from_the_oom_killer_than_others(tmp_path):
    """P33: what protects its PID 1 is not passed on."""
    daemon = NodeDaemon(tmp_path, backend="container")
    daemon.start()
    try:
        async with driver_host(daemon, tmp_path) as host:
            task = host.task("sleep", "1012")
            await host.start(task)
            pid = pid_of("sleep 1012")
            assert pid is not None
            assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) >= 0
            await host.destroy(task.id)
    finally:
        daemon.remove()
