"""`dsec dev --nomad`: a Consul and a Nomad agent for this machine, with our drivers and a pool that lends capacity.

Nomad runs as server and client in one that keeps its data, so that its tasks outlive a restart as they do in a cluster.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsec_plugins import install
from libdsec.errors import DsecError, NotFoundError, PlatformError, UsageError

from nomad_dsec.clock import SYSTEM
from nomad_dsec.cluster.nomad import NomadClient
from nomad_dsec.cluster.settings import Endpoint
from nomad_dsec.dev.child import Child
from nomad_dsec.log import get_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from nomad_dsec.dev.layout import Layout

log = get_log(__name__)
POOL = "dsec-pool"
POOL_PRIORITY = 20
READY_S = 120.0
END_S = 30.0
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """All on the loopback."""

    nomad_http: int
    nomad_rpc: int
    nomad_serf: int
    consul_http: int
    consul_server: int
    consul_serf: int
    consul_wan: int


def check_tools(wanted: Iterable[str] = ("nomad", "consul")) -> None:
    """UsageError tools_missing names what is not on PATH and where it is to be had."""
    missing = [tool for tool in wanted if shutil.which(tool) is None]
    if missing:
        raise UsageError(
            "tools_missing",
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not on PATH",
            field="--nomad",
            hint="install from https://developer.hashicorp.com (Nomad 1.6 or later, any Consul), or leave out --nomad",
        )


def choose_ports() -> Ports:
    """Nomad's and Consul's own where they are free, else any."""
    usual = {
        "nomad_http": 4646,
        "nomad_rpc": 4647,
        "nomad_serf": 4648,
        "consul_http": 8500,
        "consul_server": 8300,
        "consul_serf": 8301,
        "consul_wan": 8302,
    }
    held: list[socket.socket] = []
    try:
        return Ports(**{name: _claim(port, held) for name, port in usual.items()})
    finally:
        for one in held:
            one.close()


def _claim(port: int, held: list[socket.socket]) -> int:
    one = socket.socket()
    held.append(one)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        one.bind((HOST, port))
    except OSError:
        one.bind((HOST, 0))
    return int(one.getsockname()[1])


def alloc_dir(layout: Layout) -> Path:
    """Below it lie the directories of tasks, which may be shown inside sandboxes."""
    return layout.data / "nomad" / "alloc"


def nomad_config(layout: Layout, ports: Ports) -> dict[str, Any]:
    """One agent that is server and client, for this machine only."""
    return {
        "data_dir": str(layout.data / "nomad"),
        "plugin_dir": str(layout.data / "nomad-plugins"),
        "bind_addr": HOST,
        "advertise": dict.fromkeys(("http", "rpc", "serf"), HOST),
        "ports": {"http": ports.nomad_http, "rpc": ports.nomad_rpc, "serf": ports.nomad_serf},
        "disable_update_check": True,
        "server": {"enabled": True, "bootstrap_expect": 1, "raft_multiplier": 1},
        # Not asked: whether this is a cloud's machine.
        "client": {
            "enabled": True,
            "options": {"fingerprint.denylist": "env_aws,env_gce,env_azure,env_digitalocean"},
        },
        "consul": {"address": f"{HOST}:{ports.consul_http}"},
        "plugin": [{name: [{"config": [{"node_socket": str(layout.node_socket)}]}]} for name in install.NAMES],
    }


def consul_flags(ports: Ports) -> list[str]:
    """A development agent: one server, in memory."""
    numbers = {
        "http": ports.consul_http,
        "server": ports.consul_server,
        "serf-lan": ports.consul_serf,
        "serf-wan": ports.consul_wan,
        "grpc": -1,
        "dns": -1,
    }
    flags = [f"-{name}-port={number}" for name, number in numbers.items()]
    return ["agent", "-dev", f"-bind={HOST}", "-log-level=warn", *flags]


def make_children(layout: Layout, ports: Ports, changed: Callable[[Child], None]) -> list[Child]:
    """Consul, then Nomad; the plugins are installed and the config is written."""
    try:
        install.install(layout.data / "nomad-plugins")
    except install.InstallError as error:
        raise PlatformError("plugins_not_installed", str(error)) from error
    alloc_dir(layout).mkdir(parents=True, exist_ok=True)
    config = layout.data / "nomad.json"
    config.write_text(json.dumps(nomad_config(layout, ports), indent=1))
    return [
        Child("consul", "", consul_flags(ports), {}, layout.logs / "consul.log", changed, program="consul"),
        Child("nomad", "", ["agent", "-config", str(config)], {}, layout.logs / "nomad.log", changed, program="nomad"),
    ]


def pool_job(cpus: float, memory_mib: int) -> dict[str, Any]:
    """jobspecs/pool.nomad.hcl for one machine: lends this much, and reserves little, as the machine is all ours."""
    task = {
        "Name": "slice",
        "Driver": "dsec-pool",
        "Config": {"cpus": cpus, "memory_mib": memory_mib},
        "KillTimeout": 5_000_000_000,
        "Resources": {"CPU": 100, "MemoryMB": 64},
    }
    return {
        "ID": POOL,
        "Name": POOL,
        "Type": "system",
        "Priority": POOL_PRIORITY,
        "Datacenters": ["*"],
        "TaskGroups": [{"Name": "slice", "Tasks": [task]}],
    }


async def lend(ports: Ports, *, cpus: float, memory_mib: int) -> None:
    """Wait until the client offers our drivers, run the pool, and wait until it runs. PlatformError not_ready."""
    client = NomadClient(Endpoint(scheme="http", host=HOST, port=ports.nomad_http))
    deadline = SYSTEM.monotonic() + READY_S
    try:
        while not await _offers_drivers(client):
            await _again(deadline, "Nomad's client does not offer our drivers")
        await client.register(pool_job(cpus, memory_mib))
        while not await _lends(client):
            await _again(deadline, f"the job {POOL} does not run")
    finally:
        await client.close()


async def end_all_jobs(layout: Layout, ports: Ports) -> None:
    """Stop and purge every job, until the directories of their tasks (and what is mounted there) are gone."""
    client = NomadClient(Endpoint(scheme="http", host=HOST, port=ports.nomad_http))
    deadline = SYSTEM.monotonic() + END_S
    try:
        for job in await client.jobs():
            await client.stop(job, purge=True)
        while any(alloc_dir(layout).iterdir()) and SYSTEM.monotonic() < deadline:
            await client.collect_garbage()
            await asyncio.sleep(0.5)
    except (DsecError, OSError) as error:
        log.error("jobs could not all be ended", error=str(error))
    finally:
        await client.close()


async def _again(deadline: float, why: str) -> None:
    if SYSTEM.monotonic() > deadline:
        raise PlatformError("not_ready", why, hint="see nomad.log beside the other logs")
    await asyncio.sleep(0.2)


async def _offers_drivers(client: NomadClient) -> bool:
    try:
        nodes = await client.nodes()
    except DsecError:
        return False
    return any(
        node.status == "ready" and all(node.drivers.get(name, (False, False, ""))[1] for name in install.NAMES)
        for node in nodes
    )


async def _lends(client: NomadClient) -> bool:
    try:
        return any(one.status == "running" for one in await client.allocations(POOL))
    except NotFoundError:
        return False
