"""A real Consul agent of the test's own: in development mode on free ports, or with a data directory and ACLs."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nomad_dsec.cluster.settings import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

POLICIES = Path(__file__).parents[2] / "policies/acl"


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@dataclass
class Agent:
    """One agent; stop() and start() keep its data and its ports."""

    directory: Path
    config: dict[str, Any]
    port: int
    token: str = ""
    process: subprocess.Popen[bytes] | None = field(default=None)
    tokens: dict[str, str] = field(default_factory=dict)

    def endpoint(self, token: str | None = None) -> Endpoint:
        """How to reach it."""
        return Endpoint(scheme="http", host="127.0.0.1", port=self.port, token=self.token if token is None else token)

    def start(self, *, timeout_s: float = 30.0) -> None:
        """Start, and wait until it leads."""
        file = self.directory / "agent.json"
        file.write_text(json.dumps(self.config))
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["consul", "agent", "-config-file", str(file)], stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + timeout_s
        while not self._has_leader():
            assert self.process.poll() is None, (self.directory / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (self.directory / "log").read_text()[-3000:]
            time.sleep(0.1)

    def _has_leader(self) -> bool:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/health/service/consul")
        request.add_header("X-Consul-Token", self.token)
        try:
            with urllib.request.urlopen(request, timeout=2) as reply:
                return bool(json.load(reply)) or bool(self.config.get("acl"))
        except (urllib.error.URLError, OSError):
            return False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It hangs: connections are taken and nothing is answered."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def token_of(self, component: str, *, timeout_s: float = 20.0) -> str:
        """A token that may do what policies/acl/<component>.consul.hcl says, and no more."""
        if component in self.tokens:
            return self.tokens[component]
        rules = (POLICIES / f"{component}.consul.hcl").read_text()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._put("/v1/acl/policy", {"Name": component, "Rules": rules})
                made = self._put("/v1/acl/token", {"Policies": [{"Name": component}]})
                return self.tokens.setdefault(component, str(made["SecretID"]))
            except urllib.error.HTTPError as error:  # ACLs are not there before the first leader is
                assert time.monotonic() < deadline, error.read()
                time.sleep(0.2)

    def _put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data=json.dumps(body).encode(), method="PUT")
        request.add_header("X-Consul-Token", self.token)
        with urllib.request.urlopen(request, timeout=5) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def stop(self) -> None:
        """SIGKILL: what a crash leaves."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None


@contextmanager
def agent(
    directory: Path, *, acl: bool = False, https: int = -1, more: dict[str, Any] | None = None
) -> Iterator[Agent]:
    """A single server that keeps its data, so that a restart is a restart. https: a second port; more: its config."""
    http, serf, server, wan = free_ports(4)
    config: dict[str, Any] = {
        "server": True,
        "bootstrap_expect": 1,
        "data_dir": str(directory / "data"),
        "node_name": "test",
        "bind_addr": "127.0.0.1",
        "log_level": "warn",
        "ports": {"http": http, "dns": -1, "grpc": -1, "serf_lan": serf, "serf_wan": wan, "server": server},
        "performance": {"raft_multiplier": 1},
        "enable_debug": False,
        "disable_update_check": True,
    }
    if https > 0:
        config["ports"]["https"] = https
    config |= more or {}
    token = ""
    if acl:
        token = "11111111-2222-3333-4444-555555555555"
        config["acl"] = {"enabled": True, "default_policy": "deny", "tokens": {"master": token, "agent": token}}
    directory.mkdir(parents=True, exist_ok=True)
    one = Agent(directory, config, http, token)
    one.start()
    try:
        yield one
    finally:
        one.stop()
