"""A real Nomad agent of the test's own: server and client in one, with our plugins, on free ports, keeping its data."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from dsec_plugins import install

from nomad_dsec.dev.processes import record_of
from tests.kit.consul import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nomad_dsec.dev.layout import ProcessRecord

START_S = 60.0
CALL_S = 30.0


def nomad_version() -> tuple[int, ...]:
    """Of the `nomad` on PATH."""
    line = subprocess.run(["nomad", "version"], capture_output=True, text=True, check=True, timeout=30).stdout
    return tuple(int(part) for part in line.split()[1].removeprefix("v").split("."))


@dataclass
class NomadAgent:
    """One agent; kill9() and start() keep its data and ports."""

    directory: Path
    node_socket: Path
    drivers: Sequence[str] = install.NAMES
    more: dict[str, Any] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def configure(self) -> None:
        """Write the agent's config and install the plugins."""
        http, rpc, serf = free_ports(3)
        self.port = http
        plugin_dir = self.directory / "plugins"
        install.install(plugin_dir, names=tuple(self.drivers))
        config: dict[str, Any] = {
            "data_dir": str(self.directory / "data"),
            "plugin_dir": str(plugin_dir),
            "bind_addr": "127.0.0.1",
            "advertise": {"http": "127.0.0.1", "rpc": "127.0.0.1", "serf": "127.0.0.1"},
            "log_level": "INFO",
            "disable_update_check": True,
            "ports": {"http": http, "rpc": rpc, "serf": serf},
            "server": {"enabled": True, "bootstrap_expect": 1, "raft_multiplier": 1, "heartbeat_grace": "60s"},
            "client": {
                "enabled": True,
                "cpu_total_compute": 4000,
                "memory_total_mb": 8192,
                "gc_interval": "1h",
                "gc_max_allocs": 1000,  # by default the directories of the oldest ended ones go after 50
                "options": {
                    "driver.allowlist": ",".join(self.drivers),
                    "fingerprint.denylist": "env_aws,env_gce,env_azure,env_digitalocean,consul,vault",
                },
            },
            "consul": {"auto_advertise": False, "server_auto_join": False, "client_auto_join": False},
            "telemetry": {"publish_allocation_metrics": True, "collection_interval": "1s"},
            "plugin": [{name: [{"config": [{"node_socket": str(self.node_socket)}]}]} for name in self.drivers],
        }
        (self.directory / "agent.json").write_text(json.dumps(config | self.more))

    def start(self, *, ready: bool = True) -> None:
        """Start it; with ready, wait until it has a client node that can be placed on."""
        argv = ["nomad", "agent", "-config", str(self.directory / "agent.json")]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if ready:
            self.wait(self._is_ready, START_S)

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log()[-4000:]
        try:
            nodes = self.get("/v1/nodes")
        except (urllib.error.URLError, OSError):
            return False
        return (
            bool(nodes)
            and nodes[0]["Status"] == "ready"
            and all(nodes[0]["Drivers"].get(name, {}).get("Healthy") for name in self.drivers)
        )

    def log(self) -> str:
        return (self.directory / "log").read_text("utf-8", "replace")

    def wait(self, ready: Callable[[], Any], timeout_s: float, what: str = "") -> Any:
        """What `ready` returns once it is true."""
        deadline = time.monotonic() + timeout_s
        while not (found := ready()):
            assert time.monotonic() < deadline, f"{what} not within {timeout_s} s\n{self.log()[-3000:]}"
            time.sleep(0.1)
        return found

    def get(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """The HTTP API."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data, method=method)
        with urllib.request.urlopen(request, timeout=CALL_S) as reply:
            raw = reply.read()
        return json.loads(raw) if raw.strip() else None

    def cli(self, *argv: str, stdin: bytes = b"", check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """The nomad command."""
        env = os.environ | {"NOMAD_ADDR": f"http://127.0.0.1:{self.port}"}
        done = subprocess.run(["nomad", *argv], input=stdin, capture_output=True, timeout=60, env=env, check=False)
        assert not check or done.returncode == 0, (done.stdout, done.stderr, self.log()[-3000:])
        return done

    def run(self, body: dict[str, Any]) -> None:
        """Register a job of `job()`, without waiting."""
        self.get("/v1/jobs", "PUT", {"Job": body})

    def allocs(self, job: str) -> list[dict[str, Any]]:
        """Of one job, oldest first."""
        return sorted(self.get(f"/v1/job/{job}/allocations") or [], key=lambda row: row["CreateIndex"])

    def task(self, job: str, task: str = "t", index: int = -1) -> dict[str, Any]:
        """State of a task of the newest (or given) allocation; {} while there is none."""
        rows = self.allocs(job)
        return ((rows[index].get("TaskStates") or {}).get(task) or {}) if rows else {}

    def wait_task(self, job: str, state: str, timeout_s: float = 60.0, task: str = "t") -> dict[str, Any]:
        """The task once it is in the state."""

        def ready() -> dict[str, Any] | None:
            found = self.task(job, task)
            return found if found.get("State") == state else None

        return self.wait(
            ready,
            timeout_s,
            f"{job} {state}: {[e.get('DisplayMessage') for e in self.task(job, task).get('Events') or []]}",
        )

    def events(self, job: str, task: str = "t") -> list[str]:
        """`Type: text` of the newest allocation's task, oldest first."""
        return [f"{e['Type']}: {e['DisplayMessage']}" for e in self.task(job, task).get("Events") or []]

    def terminated(self, job: str, task: str = "t") -> dict[str, str]:
        """Details of the last Terminated event."""
        return next(e["Details"] for e in reversed(self.task(job, task)["Events"]) if e["Type"] == "Terminated")

    def logs(self, job: str, stream: str = "stdout", task: str = "t") -> str:
        """All of a task's collected output."""
        rows = self.allocs(job)
        if not rows:
            return ""
        alloc = rows[-1]["ID"]
        path = f"/v1/client/fs/logs/{alloc}?task={task}&type={stream}&plain=true&origin=start"
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        try:
            with urllib.request.urlopen(request, timeout=CALL_S) as reply:
                return reply.read().decode("utf-8", "replace")
        except urllib.error.HTTPError:
            return ""

    def wait_log(self, job: str, text: str, stream: str = "stdout", timeout_s: float = 30.0) -> str:
        """The output once it holds this."""

        def ready() -> str | None:
            got = self.logs(job, stream)
            return got if text in got else None

        return self.wait(ready, timeout_s, f"{text!r} in {stream} of {job}")

    def exec(self, alloc: str, *argv: str, stdin: bytes = b"", task: str = "t") -> tuple[int | None, bytes, str]:
        """(exit code, stdout, error) by the API's WebSocket. Unlike the command, it waits for the agent to hang up:
        agents of 1.6 panic (a concurrent write to the WebSocket) on a client that goes first.
        """
        return asyncio.run(self._exec(alloc, list(argv), stdin, task))

    async def _exec(self, alloc: str, argv: list[str], stdin: bytes, task: str) -> tuple[int | None, bytes, str]:
        query = {"command": json.dumps(argv), "task": task, "tty": "false"}
        out, code = [], None
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self.port}") as session, asyncio.timeout(CALL_S):
            try:
                ws = await session.ws_connect(f"/v1/client/allocation/{alloc}/exec", params=query, max_msg_size=0)
            except aiohttp.ClientError as error:
                return None, b"", str(error)
            for at in range(0, len(stdin), 2048):
                data = base64.b64encode(stdin[at : at + 2048]).decode()
                await ws.send_json({"stdin": {"data": data}})
            await ws.send_json({"stdin": {"close": True}})
            async for message in ws:
                frame = json.loads(message.data)
                out.append(base64.b64decode((frame.get("stdout") or {}).get("data") or ""))
                if frame.get("exited"):
                    code = (frame.get("result") or {}).get("exit_code", 0)
            return code, b"".join(out), "" if code is not None else f"closed: {ws.close_code}"

    def plugins(self) -> dict[str, ProcessRecord]:
        """Live plugin processes by driver."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                argv = (directory / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            for name in self.drivers:
                if str(self.directory / "plugins" / name).encode() in argv:
                    record = record_of(int(directory.name))
                    if record is not None:
                        found[name] = record
        return found

    def kill9(self) -> None:
        """As a crash would; plugins and log collectors live on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)
        self.process = None

    def stop(self) -> int:
        """SIGINT: what systemd sends; the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(60)
        self.process = None
        return status

    def purge(self, *jobs: str) -> None:
        """Stop jobs and wait until nothing of them runs."""
        for job in jobs:
            self.cli("job", "stop", "-purge", "-detach", job, check=False)
        for job in jobs:
            self.wait(
                lambda job=job: all(row["ClientStatus"] in ("complete", "failed", "lost") for row in self.allocs(job)),
                60,
                f"{job} gone",
            )

    def clean(self) -> None:
        """End it, its plugins and collectors, and unmount what it mounted."""
        if self.process is not None:
            self.stop()
        for record in self._leftovers():
            os.kill(record, signal.SIGKILL)
        below = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in reversed([path for path in below if path.startswith(str(self.directory))]):
            subprocess.run(["umount", "-l", mount], check=False, timeout=20)

    def _leftovers(self) -> list[int]:
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                text = (directory / "cmdline").read_bytes()
                cwd = os.readlink(directory / "cwd")
            except OSError:
                continue
            mine = str(self.directory).encode() in text or (b"logmon" in text and cwd == str(self.directory))
            if mine and int(directory.name) != os.getpid():
                found.append(int(directory.name))
        return found


def job(
    name: str,
    *argv: str,
    driver: str = "dsec-container",
    kind: str = "batch",
    image: str = "small",
    config: dict[str, Any] | None = None,
    cpu: int = 100,
    memory_mib: int = 64,
    attempts: int = 0,
    task: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A job of one task, in Nomad's JSON. attempts: restarts by the client after a failure."""
    if config is None:
        config = {"image": image} | ({"command": argv[0], "args": list(argv[1:])} if argv else {})
    group = {
        "Name": "g",
        "Count": 1,
        "RestartPolicy": {"Attempts": attempts, "Interval": 300_000_000_000, "Delay": 100_000_000, "Mode": "fail"},
        "ReschedulePolicy": {"Attempts": 0, "Unlimited": False},
        "EphemeralDisk": {"SizeMB": 60},
        "Tasks": [
            {
                "Name": "t",
                "Driver": driver,
                "Config": config,
                "KillTimeout": 5_000_000_000,
                "LogConfig": {"MaxFiles": 2, "MaxFileSizeMB": 5},
                "Resources": {"CPU": cpu, "MemoryMB": memory_mib},
            }
            | (task or {})
        ],
    }
    if kind == "system":
        group |= {"ReschedulePolicy": None}
    return {"ID": name, "Name": name, "Type": kind, "Datacenters": ["dc1"], "TaskGroups": [group]} | (more or {})
