"""Runs one node daemon and one gateway: takes over after a crash, restarts what dies, and stops cleanly."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libdsec._http import Transport
from libdsec._settings import load_settings
from libdsec.errors import DeadlineExceeded, DsecError, PlatformError
from libdsec.wire import LIVE_STATES, SandboxInfo, SandboxList

from nomad_dsec.clock import SYSTEM
from nomad_dsec.dev import cluster
from nomad_dsec.dev.child import Child
from nomad_dsec.dev.layout import DevState, Layout, Lock
from nomad_dsec.dev.processes import end_all, is_alive, record_of
from nomad_dsec.log import get_log
from nomad_dsec.node.fingerprint import machine_cpus, machine_memory_mib

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

log = get_log(__name__)
_READY_S = 90.0
_KILLS_AT_ONCE = 32
_STOP_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DevOptions:
    """What `dsec dev` was asked for. port 0: the one used before, else a free one."""

    layout: Layout
    node: str
    host: str = "127.0.0.1"
    port: int = 0
    keep: bool = False
    images: Path | None = None
    node_flags: Sequence[str] = ()
    gateway_flags: Sequence[str] = ()
    nomad: bool = False


class Supervisor:
    """One run of `dsec dev`. `run` returns after a clean stop."""

    def __init__(self, options: DevOptions, on_ready: Callable[[DevState], None]) -> None:
        self._options = options
        self._layout = options.layout
        self._on_ready = on_ready
        self._stop = asyncio.Event()
        self._keep = options.keep
        self._children: list[Child] = []
        self._ports: cluster.Ports | None = None

    async def run(self) -> None:
        """Supervise until SIGTERM, SIGINT or `request_stop`. StateError already_running when another does."""
        self._layout.prepare()
        lock = Lock(self._layout)
        lock.take()
        try:
            await self._take_over()
            self._state = self._new_state()
            if self._options.nomad:
                self._ports = cluster.choose_ports()
            self._children = [self._node(), self._gateway(), *self._cluster()]
            self._save()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.request_stop)
            loop.add_signal_handler(signal.SIGUSR1, self._stop_and_keep)
            await self._supervise()
        finally:
            lock.release()

    def request_stop(self) -> None:
        """Begin a clean stop."""
        self._stop.set()

    def _stop_and_keep(self) -> None:
        self._keep = True
        self._stop.set()

    async def _take_over(self) -> None:
        """End daemons that a killed supervisor left; their sandboxes go on and the new node daemon adopts them."""
        before = self._layout.read_state()
        if before is None:
            return
        left = [record for record in before.children.values() if is_alive(record)]
        if left:
            log.warning("daemons of a supervisor that was killed are replaced", pids=[record.pid for record in left])
            await end_all(left, patience_s=5.0)

    def _new_state(self) -> DevState:
        before = self._layout.read_state()
        port = self._options.port or _usable_port(before, self._options.host) or _free_port(self._options.host)
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        return DevState(
            endpoint=f"http://{host}:{port}",
            api_key=before.api_key if before is not None else f"dsk_{secrets.token_urlsafe(32)}",
            node=self._options.node,
            keep=self._options.keep,
            supervisor=record_of(os.getpid()),
        )

    def _node(self) -> Child:
        layout = self._layout
        images = self._options.images or layout.images
        flags = ["--id", self._state.node, "--data", str(layout.node), "--images", str(images)]
        if self._options.nomad:
            flags += ["--capacity", "granted", "--mount-roots", str(cluster.alloc_dir(layout))]
        return self._child("node", "nomad_dsec.node", [*flags, *self._options.node_flags], self._consul())

    def _consul(self) -> dict[str, str]:
        """Node and gateway are registered where there is a Consul; both go on while it is away."""
        if self._ports is None:
            return {}
        return {"DSEC_CONSUL_ADDRESS": f"http://{cluster.HOST}:{self._ports.consul_http}"}

    def _cluster(self) -> list[Child]:
        """Consul and Nomad, when they are wanted."""
        if self._ports is None:
            return []
        self._state.nomad = f"http://{cluster.HOST}:{self._ports.nomad_http}"
        self._state.consul = f"http://{cluster.HOST}:{self._ports.consul_http}"
        return cluster.make_children(self._layout, self._ports, lambda _child: self._save())

    def _gateway(self) -> Child:
        port = self._state.endpoint.rpartition(":")[2]
        flags = ["--data", str(self._layout.gateway), "--host", self._options.host, "--port", port]
        flags += ["--nodes", f"unix:{self._layout.node_socket}", *self._options.gateway_flags]
        # by environment: argv is for everybody to read
        env = {"DSEC_GATEWAY_ADMIN_KEY": self._state.api_key, **self._consul()}
        if self._ports is not None:
            env["DSEC_GATEWAY_NODE_TOKEN"] = f"file:{self._layout.node / 'token'}"  # made by the node
            env["DSEC_GATEWAY_ADVERTISE"] = cluster.HOST  # this Consul is for this machine only
        return self._child("gateway", "nomad_dsec.gateway", flags, env)

    def _child(self, name: str, module: str, flags: Sequence[str], env: dict[str, str]) -> Child:
        ours = {key: value for key, value in os.environ.items() if key.startswith(("DSEC_", "PYTHONPATH"))}
        for key in ("DSEC_NODE_ID", "DSEC_NODE_DATA", "DSEC_GATEWAY_DATA", "DSEC_API_KEY", "DSEC_ENDPOINT"):
            ours.pop(key, None)
        return Child(name, module, flags, ours | env, self._layout.logs / f"{name}.log", lambda _child: self._save())

    def _save(self) -> None:
        for child in self._children:
            record = child.record
            if record is not None:
                self._state.children[child.name] = record
            self._state.restarts[child.name] = child.restarts
        self._layout.write_state(self._state)

    async def _supervise(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for child in self._children:
                    tasks.create_task(child.supervise(), name=f"supervise {child.name}")
                await self._until_ready()
                if self._ports is not None and not self._stop.is_set():
                    cpus, memory_mib = machine_cpus(), machine_memory_mib()
                    await cluster.lend(self._ports, cpus=float(cpus), memory_mib=memory_mib * 3 // 4)
                if not self._stop.is_set():
                    self._state.ready = True
                    self._save()
                    self._on_ready(self._state)
                await self._stop.wait()
                await self._stop_all()
        except* DsecError as group:
            raise group.exceptions[0] from None
        finally:
            for child in self._children:
                await child.stop(patience_s=5.0)
            self._state.ready, self._state.children, self._state.supervisor = False, {}, None
            self._layout.write_state(self._state)

    async def _until_ready(self) -> None:
        deadline = SYSTEM.monotonic() + _READY_S
        endpoint = self._state.endpoint
        while not self._stop.is_set():
            if await _answers(f"unix:{self._layout.node_socket}") and await _answers(endpoint):
                return
            crashed = [child for child in self._children if child.restarts >= 5]
            if crashed or SYSTEM.monotonic() > deadline:
                names = [child.name for child in crashed] or ["dsec dev"]
                raise PlatformError(
                    "not_ready",
                    f"{names[0]} does not come up: {_last_words(self._layout, names[0])}",
                    hint=f"see {self._layout.logs}, or run `dsec doctor`",
                )
            await asyncio.sleep(0.05)

    async def _stop_all(self) -> None:
        if not self._keep:
            if self._ports is not None:
                await cluster.end_all_jobs(self._layout, self._ports)
            try:
                await kill_all_sandboxes(self._layout)
            except DsecError as error:
                log.error("sandboxes could not all be ended; the next start adopts them", error=str(error))
        for child in reversed(self._children):  # the gateway first: it must not see its node vanish
            await child.stop()


async def kill_all_sandboxes(layout: Layout) -> int:
    """End every sandbox of the node, through its daemon; returns how many there were."""
    transport = Transport(load_settings(f"unix:{layout.node_socket}", "", reconnect_s=15.0))
    try:
        async with asyncio.timeout(_STOP_S):
            listing = await transport.request("GET", "/v1/sandboxes", SandboxList)
            live = [info.id for info in listing.sandboxes if info.state in LIVE_STATES]
            gate = asyncio.Semaphore(_KILLS_AT_ONCE)

            async def kill(sandbox: str) -> None:
                async with gate:
                    await transport.request("DELETE", f"/v1/sandboxes/{sandbox}", SandboxInfo, timeout_s=60)

            await asyncio.gather(*(kill(sandbox) for sandbox in live))
            return len(live)
    except TimeoutError as error:
        raise DeadlineExceeded("stop_timeout", f"sandboxes did not end within {_STOP_S:g} s") from error
    finally:
        await transport.close()


async def _answers(endpoint: str) -> bool:
    transport = Transport(load_settings(endpoint, "", reconnect_s=0.0))
    try:
        async with transport.open("GET", "/readyz", timeout_s=5.0):
            return True
    except DsecError:
        return False
    finally:
        await transport.close()


def _usable_port(before: DevState | None, host: str) -> int:
    """The port of the last run, so that clients of before still find us; 0 when it is taken."""
    if before is None:
        return 0
    port = before.endpoint.rpartition(":")[2]
    return int(port) if port.isdecimal() and _can_bind(host, int(port)) else 0


def _can_bind(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind((host, port))
            return True
    return False


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _last_words(layout: Layout, name: str) -> str:
    try:
        lines = (layout.logs / f"{name}.log").read_text("utf-8", "replace").strip().splitlines()
    except FileNotFoundError:
        return "it left no log"
    return lines[-1][-600:] if lines else "it left no log"
