"""A daemon that is killed outright: its sandboxes live on and the next one takes them over (case L1)."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from dsec_imagefs.mounts import MountTable
from dsec_imagefs.store import ImageStore

from nomad_dsec.backends.base import Fate
from nomad_dsec.backends.container.backend import ContainerBackend
from nomad_dsec.backends.container.host import ContainerConfig
from nomad_dsec.guest.build import build
from nomad_dsec.guest.spec import ExecSpec
from nomad_dsec.linux.cgroup import CgroupRoot
from nomad_dsec.model import Handle
from tests.kit.abilities import needs
from tests.kit.attacker import build_attacker
from tests.kit.small_image import make_tree

pytestmark = needs("root", "erofs", "overlay", "userns", "netns", "cgroup", "filters", "cc")

DAEMON = """
import asyncio, dataclasses, json, sys
from pathlib import Path
from dsec_imagefs.mounts import MountTable
from dsec_imagefs.store import ImageStore
from nomad_dsec.backends.base import Steps
from nomad_dsec.backends.container.backend import ContainerBackend
from nomad_dsec.backends.container.host import ContainerConfig
from nomad_dsec.model import SandboxSpec

async def main(directory, node, digest, binary):
    directory = Path(directory)
    config = ContainerConfig(node=node, data=directory / "node", init_binary=Path(binary), pool_slots=2, network_pool=0)
    backend = await ContainerBackend.open(config, MountTable(ImageStore(directory / "store"), directory / "mounts"))

    async def journal(handle):
        print(json.dumps(dataclasses.asdict(handle)), flush=True)

    for number in range(3):
        spec = SandboxSpec(
            id=f"sb-{node}-{number}", incarnation=1, namespace="t", digest=digest, backend="container", cpus=1,
            memory_mib=64, disk_mib=16, pids=32, env={}, cwd="/", user="", hostname="box", qos="latency_sensitive",
            policy={})
        await backend.start(spec, journal, Steps())
    print("ready", flush=True)
    while True:  # half-made ones, for the kill to hit
        spec = dataclasses.replace(spec, id=spec.id + "x")
        started = await backend.start(spec, journal, Steps())
        await backend.stop(started.handle)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.leaks_ok  # the killed daemon's children are reaped by the machine's init; the test counts by itself
async def test_sandboxes_outlive_a_killed_daemon(tmp_path):
    node = f"k{os.getpid()}{secrets.token_hex(2)}"
    tree = tmp_path / "tree"
    tree.mkdir(mode=0o755)
    store = ImageStore(tmp_path / "store")
    digest = store.import_image(f"dir:{make_tree(tree, build_attacker(tmp_path))}", "plain").digest
    binary = build(tmp_path / "bin")
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(tmp_path), node, digest, str(binary)], stdout=subprocess.PIPE, text=True
    )
    handles: dict[str, Handle] = {}
    assert daemon.stdout is not None
    for line in daemon.stdout:
        if line.strip() == "ready":
            break
        handle = Handle(**json.loads(line))
        handles[handle.sandbox] = handle
    assert len(handles) == 3
    for _ in range(7):
        daemon.stdout.readline()
    daemon.kill()
    left, _ = daemon.communicate(timeout=10)
    half_made = [Handle(**json.loads(line)) for line in left.splitlines() if line.startswith("{")]

    table = MountTable(store, tmp_path / "mounts")
    config = ContainerConfig(node=node, data=tmp_path / "node", init_binary=binary, pool_slots=2, network_pool=0)
    backend = await ContainerBackend.open(config, table)
    try:
        for handle in handles.values():
            assert (await backend.recover(handle)).fate is Fate.RUNNING
            channel = await backend.connect(handle)
            outcome = await channel.run(ExecSpec(argv=(b"/bin/bash", b"-c", b"echo here")))
            assert outcome.stdout == b"here\n"
        for handle in half_made:
            await backend.stop(handle)
        await backend.sweep(list(handles.values()))
        own = {str(handle.data["cgroup"]["name"]) for handle in handles.values()}
        assert set(backend._host.cgroups.names()) == own | backend._host.cgroup_pool.idle_names()
        for handle in handles.values():
            await backend.stop(handle)
        assert not any(Path(config.run).iterdir())
    finally:
        await backend.sweep(())
        await backend.close()
        await CgroupRoot.detect(node).remove()
        table.close()
    assert _processes_of(tmp_path) == []


def _processes_of(directory: Path) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(directory) in words:
            found.append(f"{pid}: {words}")
    return found
