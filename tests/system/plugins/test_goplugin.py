"""go-plugin by itself: a plugin process of ours under a host emulator."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
from dsec_plugins.goplugin import wire_pb2_grpc
from dsec_plugins.goplugin.handshake import Protocol, handshake_line, make_socket_dir
from google.protobuf import empty_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.kit.pluginhost import NOMAD_COOKIE, end, launched

PLUGIN = """
import contextlib, logging, sys
from dsec_plugins.goplugin.handshake import Protocol
from dsec_plugins.goplugin.server import main
@contextlib.asynccontextmanager
async def register(server):
    print("junk before the handshake")
    logging.getLogger("mine").warning("started with %d", 7, extra={"ids": {"@level": 3, "n": 1}})
    yield
    print("junk after")
cookie = "e4327c2e01eabfd75a8a67adb114fb34a757d57eee7728d857a8cec6e91a7255"
sys.exit(main(Protocol(cookie_key="NOMAD_PLUGIN_MAGIC_COOKIE", cookie_value=cookie, version=2), register))
"""


@pytest.fixture
def argv(tmp_path):
    entry = tmp_path / "plugin.py"
    entry.write_text(PLUGIN)
    return [sys.executable, str(entry)]


async def test_serves_and_ends_as_a_host_expects(argv) -> None:
    async with launched(argv) as plugin:
        assert [*plugin.fields[:3], *plugin.fields[4:]] == ["1", "2", "unix", "grpc", ""]
        assert len(plugin.fields[3]) <= 107
        assert os.stat(os.path.dirname(plugin.fields[3])).st_mode & 0o777 == 0o700
        reply = await health_pb2_grpc.HealthStub(plugin.channel).Check(health_pb2.HealthCheckRequest(service="plugin"))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        stdio = wire_pb2_grpc.GRPCStdioStub(plugin.channel).StreamStdio(empty_pb2.Empty())
        with pytest.raises(TimeoutError):  # stays open and says nothing
            await asyncio.wait_for(stdio.read(), 0.3)
        began = time.monotonic()
        assert await end(plugin) == 0
        assert time.monotonic() - began < 2  # the host sends SIGKILL then
    assert plugin.stdout_after == b""  # junk went to stderr
    assert not os.path.exists(os.path.dirname(plugin.fields[3]))
    record = next(line for line in plugin.logs if line["@message"] == "started with 7")
    assert (record["@level"], record["n"], record["_@level"]) == ("warn", "1", "3")
    assert any("junk" in line for line in plugin.junk)


async def test_sigint_is_the_hosts_affair_and_sigterm_ends(argv) -> None:
    async with launched(argv) as plugin:
        plugin.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.2)
        assert plugin.process.returncode is None
        plugin.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(plugin.process.wait(), 3) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"NOMAD_PLUGIN_MAGIC_COOKIE": ""}, "started by the program"),
        ({"NOMAD_PLUGIN_MAGIC_COOKIE": "wrong"}, "started by the program"),
        ({"PLUGIN_CLIENT_CERT": "x"}, "AutoMTLS"),
        ({"PLUGIN_PROTOCOL_VERSIONS": "1,3"}, "protocol 1,3"),
    ],
)
def test_a_wrong_start_says_why_on_stderr_only(argv, change, said) -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(sys.path)} | NOMAD_COOKIE | change
    done = subprocess.run(argv, env=env, capture_output=True, timeout=20, check=False, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert said in done.stderr


def test_logging_survives_a_dead_reader(tmp_path) -> None:
    """After a host's crash fd 2 has no reader: EPIPE must not reach the plugin."""
    program = (
        "import logging, os\nfrom dsec_plugins.goplugin import hclog\nr, w = os.pipe()\nos.close(r)\nos.dup2(w, 2)\n"
        "hclog.install()\n[logging.error('x' * 100000) for _ in range(3)]\nprint('alive')\n"
    )
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, timeout=20, check=False, text=True
    )
    assert done.stdout == "alive\n"


def test_stale_socket_directories_are_swept(tmp_path) -> None:
    program = (
        "import socket, sys, pathlib\nfrom dsec_plugins.goplugin.handshake import make_socket_dir\n"
        "d = make_socket_dir({'PLUGIN_UNIX_SOCKET_DIR': sys.argv[1]}, 'gp-')\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(str(d / 's')); s.listen(); print(d)\n"
        "sys.stdout.flush(); (sys.stdin.read() if sys.argv[2] == 'wait' else None)\n"
    )
    env = {"PYTHONPATH": ":".join(sys.path)}
    argv = [sys.executable, "-c", program, str(tmp_path)]
    dead = subprocess.run(
        [*argv, "end"], env=env, capture_output=True, timeout=20, check=True, text=True
    ).stdout.strip()
    with subprocess.Popen([*argv, "wait"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as living:
        assert living.stdout is not None
        alive = living.stdout.readline().strip()
        mine = make_socket_dir({"PLUGIN_UNIX_SOCKET_DIR": str(tmp_path)}, "gp-")
        assert not os.path.exists(dead)
        assert os.path.exists(alive)
        assert mine.is_dir()
        living.communicate("")


def test_handshake_line() -> None:
    protocol = Protocol(cookie_key="K", cookie_value="V", version=2)
    assert handshake_line(protocol, "/tmp/x/s") == b"1|2|unix|/tmp/x/s|grpc|\n"
